"""The judge of the toy instruction domains: it knows what is right to answer, and how much of it an answer has right."""

from collections.abc import Sequence

from fedlight.evaluation.judge import Fields, Judge, check_slots
from fedlight.evaluation.win_rate import win_rate
from fedlight.toy.instructions import DOMAINS, answer
from fedlight.toy.world import NAMES

DOMAIN_OF = {area: name for name, domain in DOMAINS.items() for area in domain.areas}


class FactJudge(Judge):
    """Knows the facts of the world: the answer with more right words is better, equally right ones tie.

    Args:
        seed: of the world, as in the source of the rows.
        slot: which of a prompt's texts ends in the topic, a name and a thing.

    Example:
        >>> from fedlight.toy.instructions import answer
        >>> topic, right = {"input": "anna bees"}, answer(0, "farm", ("bees", "anna"))
        >>> FactJudge().scores([topic] * 3, [right, "kind", right.split()[0]], ["rude", "rude", right])
        [1.0, 0.5, 0.0]
    """

    sees_order = False

    def __init__(self, seed: int = 0, slot: str = "input") -> None:
        self.seed, self.slot = seed, slot

    def verdicts(self, fields: Sequence[Fields], ours: Sequence[str], theirs: Sequence[str]) -> list[float]:
        """Who is better, pair by pair; see `fedlight.evaluation.judge`.

        Args:
            fields: per prompt the texts of its slots.
            ours: an answer to each.
            theirs: another answer to each.

        Raises:
            ValueError: a prompt has no such slot, or asks about no topic of a domain.
        """
        check_slots([self.slot], fields, "FactJudge")
        right = [self._right(own[self.slot]) for own in fields]
        return [
            win_rate([share_right(a, known)], [share_right(b, known)])
            for known, a, b in zip(right, ours, theirs, strict=True)
        ]

    def _right(self, text: str) -> str:
        name, area = ["", "", *text.split()][-2:]
        if name not in NAMES or area not in DOMAIN_OF:
            raise ValueError(
                f"FactJudge: {self.slot}={text!r} does not end in a name and a thing of the toy domains: judge answers to "
                "rows of toy:instructions, and set slot to what holds their input"
            )
        return answer(self.seed, DOMAIN_OF[area], (area, name))


def share_right(text: str, right: str) -> float:
    """Words of ``text`` that are right in their place, over the words of the longer of both.

    Args:
        text: an answer.
        right: the right one.

    Returns:
        In [0, 1]; 1 for the right answer alone.

    Example:
        >>> share_right("kind 7", "kind 7"), share_right("kind 8", "kind 7"), share_right("kind 7 7 7", "kind 7")
        (1.0, 0.5, 0.5)
        >>> share_right("7 kind", "kind 7"), share_right("", "kind 7")
        (0.0, 0.0)
    """
    words, known = text.split(), right.split()
    return sum(a == b for a, b in zip(words, known, strict=False)) / max(len(words), len(known))
