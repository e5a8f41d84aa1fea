"""Judges that follow a rule and load no model: the embedded world's oracle, its facts, and the length of answers."""

from collections.abc import Sequence

from fedlight.evaluation.judge import Judge, check_slots
from fedlight.evaluation.win_rate import wins
from fedlight.support.types import Fields
from fedlight.toy.instructions import DOMAINS, answer
from fedlight.toy.oracle import Oracle
from fedlight.toy.world import NAMES

DOMAIN_OF = {area: name for name, domain in DOMAINS.items() for area in domain.areas}


class OracleJudge(Judge):
    """Judge that knows every client's taste in the embedded world: the answer with the higher mean utility is better.

    Args:
        seed: seed of the embedded world; this and the next three have to be those of the votes.
        opposition: how far the clients' groups contradict each other, in [0, 1].
        num_clients: number of clients of the world.
        votes_per_client: median number of training votes of a client.
        group: group whose mean taste counts; None: that of all clients.
        tastes: tastes of the groups, see `fedlight.toy.votes.WorldOptions`.
        shares: relative sizes of the groups, see there.

    Raises:
        ValueError: a setting is out of range, or the group has no client; at a verdict, ``prompt``, the post, is not among
            the fields.

    Examples:
        >>> post = {"prompt": "anna bakes bread . ben reads maps ."}
        >>> OracleJudge().verdicts([post] * 2, ["anna bakes bread .", "same"], ["anna bakes pies .", "same"])
        [1.0, 0.5]
    """

    sees_order = False

    def __init__(
        self,
        seed: int = 0,
        opposition: float = 0.2,
        num_clients: int = 40,
        votes_per_client: float = 120.0,
        group: str | None = None,
        tastes: str = "opposed",
        shares: str = "1-1-1",
    ) -> None:
        self.group = group
        self._oracle = Oracle(
            seed,
            opposition=opposition,
            num_clients=num_clients,
            votes_per_client=votes_per_client,
            tastes=tastes,
            shares=shares,
        )
        self._oracle.utility("", "", group)  # refuses an empty group now, not at the first pair

    def verdicts(self, fields: Sequence[Fields], ours: Sequence[str], theirs: Sequence[str]) -> list[float]:
        check_slots(["prompt"], fields, "OracleJudge")
        posts = [slots["prompt"] for slots in fields]
        utilities = (
            [self._oracle.utility(post, text, self.group) for post, text in zip(posts, texts, strict=True)]
            for texts in (ours, theirs)
        )
        return wins(*utilities)


class FactJudge(Judge):
    """Judge that knows the facts of the embedded domains: the answer with more right words is better.

    Args:
        seed: seed of the embedded world, as in the source of the rows.
        slot: slot of the prompt whose text ends in the topic, a name and a thing; at a verdict, ValueError without it, and
            for another text.

    Examples:
        >>> from fedlight.toy.instructions import answer
        >>> topic, right = {"input": "anna bees"}, answer(0, "farm", ("bees", "anna"))
        >>> FactJudge().verdicts([topic] * 3, [right, "kind", right.split()[0]], ["rude", "rude", right])
        [1.0, 0.5, 0.0]
    """

    sees_order = False

    def __init__(self, seed: int = 0, slot: str = "input") -> None:
        self.seed, self.slot = seed, slot

    def verdicts(self, fields: Sequence[Fields], ours: Sequence[str], theirs: Sequence[str]) -> list[float]:
        check_slots([self.slot], fields, "FactJudge")
        right = [self._right(slots[self.slot]) for slots in fields]
        shares = ([share_right(*pair) for pair in zip(texts, right, strict=True)] for texts in (ours, theirs))
        return wins(*shares)

    def _right(self, text: str) -> str:
        name, area = ["", "", *text.split()][-2:]  # of a text of one word, too
        if name not in NAMES or area not in DOMAIN_OF:
            raise ValueError(
                f"FactJudge: {self.slot}={text!r} does not end in a name and a thing of the toy domains: judge answers to "
                "rows of toy:instructions, and set slot to the name of their input"
            )
        return answer(self.seed, DOMAIN_OF[area], (area, name))


class LengthJudge(Judge):
    """Judge that prefers the answer with more characters; equally long ones tie. A baseline for every other judge.

    Examples:
        >>> LengthJudge().verdicts([{}] * 3, ["long", "no", "same "], ["no", "long", "size"])
        [1.0, 0.0, 0.5]
    """

    sees_order = False

    def verdicts(self, fields: Sequence[Fields], ours: Sequence[str], theirs: Sequence[str]) -> list[float]:
        return wins(*([len(text.strip()) for text in texts] for texts in (ours, theirs)))


def share_right(text: str, right: str) -> float:
    """Return the share of words of the longer text that are right in their place; 1 for the right answer alone.

    Examples:
        >>> share_right("kind 7", "kind 7"), share_right("kind 8", "kind 7"), share_right("kind 7 7 7", "kind 7")
        (1.0, 0.5, 0.5)
        >>> share_right("7 kind", "kind 7"), share_right("", "kind 7")
        (0.0, 0.0)
    """
    words, known = text.split(), right.split()
    # Words beyond the shorter text count as wrong.
    return sum(a == b for a, b in zip(words, known, strict=False)) / max(len(words), len(known))
