"""Each pair of answers before a judge in both orders, since many judges prefer a position.

Zheng et al., "Judging LLM-as-a-Judge with MT-Bench and Chatbot Arena", NeurIPS 2023, https://arxiv.org/abs/2306.05685,
section 3.4.
"""

import math
from collections.abc import Sequence

from fedlight.evaluation.judge import Judge
from fedlight.evaluation.win_tie_lose import outcomes
from fedlight.support.types import Fields


class BothPositions:
    """Asks a judge twice about each pair, our answer first and their answer first; once where the order cannot matter.

    Args:
        judge: who is asked.

    Example:
        >>> class Longer(Judge):  # and of two equally long ones the first
        ...     def verdicts(self, fields, ours, theirs):
        ...         return [float(len(a) >= len(b)) for a, b in zip(ours, theirs, strict=True)]
        >>> BothPositions(Longer()).verdicts([{}] * 3, ["longer", "x", "same"], ["short", "yy", "size"])
        ([1.0, 0.0, 1.0], [1.0, 0.0, 0.0])
        >>> BothPositions(Longer()).scores([{}] * 3, ["longer", "x", "same"], ["short", "yy", "size"])
        [1.0, 0.0, 0.5]
    """

    def __init__(self, judge: Judge) -> None:
        self.judge = judge

    def verdicts(
        self, fields: Sequence[Fields], ours: Sequence[str], theirs: Sequence[str]
    ) -> tuple[list[float], list[float]]:
        """What is said of our answers where they are shown first, and where they are shown second.

        Args:
            fields: per prompt the slots' texts that it was made of.
            ours: an answer to each.
            theirs: another answer to each.

        Returns:
            Twice ``(prompts,)``: 1 for ours, 0 for theirs, 0.5 for a tie, NaN where the judge could not be read.
        """
        if not self.judge.sees_order:
            once = self.judge.verdicts(fields, ours, theirs)
            return once, list(once)
        second = self.judge.verdicts(fields, theirs, ours)
        return self.judge.verdicts(fields, ours, theirs), [1 - verdict for verdict in second]

    def scores(self, fields: Sequence[Fields], ours: Sequence[str], theirs: Sequence[str]) -> list[float]:
        """One verdict from both orders; so a judge without a taste for a position. What could not be read is a tie."""
        both = outcomes(*self.verdicts(fields, ours, theirs))
        return [0.5 if math.isnan(outcome) else outcome for outcome in both]

    def announce(self, fields: Sequence[Fields], ours: Sequence[str], theirs: Sequence[str]) -> None:
        """Says what both orders will cost; see `fedlight.evaluation.judge.Judge.announce`."""
        if not self.judge.sees_order:
            self.judge.announce(fields, ours, theirs)
        else:
            self.judge.announce([*fields, *fields], [*ours, *theirs], [*theirs, *ours])
