"""Interface of judges, which tell the better of two answers to a prompt.

* ``fedlight.OracleJudge``: knows every client's taste in the embedded world.
* ``fedlight.FactJudge``: knows the facts of the embedded instruction domains.
* ``fedlight.SelectorJudge``: a trained selector, or several, of which the majority decides.
* ``fedlight.LocalJudge``: a language model on this machine; the verdict that it finds likeliest.
* ``fedlight.ChatJudge``: an endpoint or a local model, asked in words.
* ``fedlight.LengthJudge``: the longer answer wins; the baseline of every judge.

A judge gives verdicts, from which all else follows: scores here, both orders of a pair in
`fedlight.evaluation.both_positions`, wins with their intervals in `fedlight.evaluation.win_tie_lose`, agreement with people
in `fedlight.evaluation.human_agreement`.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

from fedlight.support.types import Fields


class Judge(ABC):
    """Says which of two answers is better. A subclass gives `verdicts`.

    Example:
        >>> class Longer(Judge):
        ...     def verdicts(self, fields, ours, theirs):
        ...         pairs = zip(ours, theirs, strict=True)
        ...         return [float(len(a) > len(b)) if len(a) != len(b) else math.nan for a, b in pairs]
        >>> Longer().verdicts([{}] * 2, ["long", "on"], ["", "no"]), Longer().scores([{}] * 2, ["long", "on"], ["", "no"])
        ([1.0, nan], [1.0, 0.5])
    """

    sees_order: bool = True
    """Whether the order of the two can change what is said; where it cannot, nobody asks twice."""

    @abstractmethod
    def verdicts(self, fields: Sequence[Fields], ours: Sequence[str], theirs: Sequence[str]) -> list[float]:
        """Compares two answers to each prompt, ours shown first.

        Args:
            fields: per prompt the slots' texts that it was made of, ``(prompts,)``.
            ours: an answer to each.
            theirs: another answer to each.

        Returns:
            Per prompt 1 where ours is better, 0 where theirs is, 0.5 where they are equal, NaN where the judge has said
            nothing that could be read.

        Raises:
            ValueError: the prompts have not what the judge reads.
        """

    def scores(self, fields: Sequence[Fields], ours: Sequence[str], theirs: Sequence[str]) -> list[float]:
        """As `verdicts`, but what could not be read counts one half."""
        return [0.5 if math.isnan(one) else one for one in self.verdicts(fields, ours, theirs)]

    def announce(self, fields: Sequence[Fields], ours: Sequence[str], theirs: Sequence[str]) -> None:  # noqa: B027 - most cost nothing
        """Says what these verdicts will cost, and refuses what is over the judge's limits, before anything is asked.

        Args:
            fields: as of `verdicts`.
            ours: likewise.
            theirs: likewise.

        Raises:
            ValueError: a limit would be passed.
        """


def check_slots(slots: Sequence[str], fields: Sequence[Fields], who: str) -> None:
    """Refuses prompts without what a judge reads.

    Raises:
        ValueError: a slot is missing.

    Example:
        >>> check_slots(["post"], [{"prompt": "x"}], "SelectorJudge")
        Traceback (most recent call last):
        ...
        ValueError: SelectorJudge reads {post}, but the prompts have prompt: set the columns of the prompts
    """
    for own in fields:
        if missing := [slot for slot in slots if slot not in own]:
            raise ValueError(
                f"{who} reads {{{missing[0]}}}, but the prompts have {', '.join(own)}: set the columns of the prompts"
            )
