"""Interface of judges, which choose the better of two answers to a prompt.

* ``fedlight.OracleJudge``: knows every client's taste in the embedded world.
* ``fedlight.FactJudge``: knows the facts of the embedded instruction domains.
* ``fedlight.SelectorJudge``: a trained selector, or several, of which the majority decides.
* ``fedlight.LocalJudge``: a language model on this machine; the verdict that it finds likeliest.
* ``fedlight.ChatJudge``: an endpoint or a local model, asked in words.
* ``fedlight.LengthJudge``: the longer answer wins; the baseline of every judge.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

from fedlight.evaluation.win_rate import outcomes
from fedlight.support.types import Fields


class Judge(ABC):
    """Base class of judges; a subclass defines `verdicts`.

    Attributes:
        sees_order: whether the order of the two answers can change the verdict; if not, no pair is judged twice.

    Examples:
        >>> class Longer(Judge):
        ...     def verdicts(self, fields, ours, theirs):
        ...         pairs = zip(ours, theirs, strict=True)
        ...         return [float(len(a) > len(b)) if len(a) != len(b) else math.nan for a, b in pairs]
        >>> Longer().verdicts([{}] * 2, ["long", "on"], ["", "no"]), Longer().scores([{}] * 2, ["long", "on"], ["", "no"])
        ([1.0, nan], [1.0, 0.5])
    """

    sees_order: bool = True

    @abstractmethod
    def verdicts(self, fields: Sequence[Fields], ours: Sequence[str], theirs: Sequence[str]) -> list[float]:
        """Compare two answers to each prompt, ours shown first.

        Args:
            fields: texts of each prompt by slot, ``(prompts,)``.
            ours: an answer to each prompt.
            theirs: another answer to each prompt.

        Returns:
            For each prompt 1 where ours is better, 0 where theirs is, 0.5 where they are equal, NaN where the judge's
            verdict could not be read.

        Raises:
            ValueError: the prompts lack a slot that the judge reads.
        """

    def scores(self, fields: Sequence[Fields], ours: Sequence[str], theirs: Sequence[str]) -> list[float]:
        """Return the `verdicts`, with one half for those that could not be read."""
        return [0.5 if math.isnan(one) else one for one in self.verdicts(fields, ours, theirs)]

    def announce(self, fields: Sequence[Fields], ours: Sequence[str], theirs: Sequence[str]) -> None:  # noqa: B027 - most cost nothing
        """Report the costs of the same `verdicts` beforehand, and refuse costs above the judge's limits.

        Raises:
            ValueError: a limit would be exceeded.
        """


class BothPositions:
    """Judge that compares each pair in both orders, since many judges prefer a position; once if order cannot matter.

    Zheng et al., "Judging LLM-as-a-Judge with MT-Bench and Chatbot Arena", NeurIPS 2023, https://arxiv.org/abs/2306.05685,
    section 3.4.

    Args:
        judge: judge of each order.

    Examples:
        >>> class Longer(Judge):  # and of two equally long ones the first
        ...     def verdicts(self, fields, ours, theirs):
        ...         return [float(len(a) >= len(b)) for a, b in zip(ours, theirs, strict=True)]
        >>> BothPositions(Longer()).scores([{}] * 3, ["longer", "x", "same"], ["short", "yy", "size"])
        [1.0, 0.0, 0.5]
    """

    def __init__(self, judge: Judge) -> None:
        self.judge = judge

    def verdicts(
        self, fields: Sequence[Fields], ours: Sequence[str], theirs: Sequence[str]
    ) -> tuple[list[float], list[float]]:
        """Return the verdicts with our answers shown first and those with ours second; 1 means ours in both."""
        if not self.judge.sees_order:
            once = self.judge.verdicts(fields, ours, theirs)
            return once, list(once)
        second = self.judge.verdicts(fields, theirs, ours)
        return self.judge.verdicts(fields, ours, theirs), [1 - verdict for verdict in second]

    def scores(self, fields: Sequence[Fields], ours: Sequence[str], theirs: Sequence[str]) -> list[float]:
        """Return one score from both orders, free of position bias; one half where a verdict could not be read."""
        both = outcomes(*self.verdicts(fields, ours, theirs))
        return [0.5 if math.isnan(outcome) else outcome for outcome in both]

    def announce(self, fields: Sequence[Fields], ours: Sequence[str], theirs: Sequence[str]) -> None:
        """Report the costs of both orders; see `Judge.announce`."""
        if not self.judge.sees_order:
            self.judge.announce(fields, ours, theirs)
        else:
            self.judge.announce([*fields, *fields], [*ours, *theirs], [*theirs, *ours])


def check_slots(slots: Sequence[str], fields: Sequence[Fields], who: str) -> None:
    """Raise ValueError if a prompt lacks a slot that the judge ``who`` reads."""
    for own in fields:
        if missing := [slot for slot in slots if slot not in own]:
            raise ValueError(
                f"{who} reads {{{missing[0]}}}, but the prompts have {', '.join(own)}: set the columns of the prompts"
            )
