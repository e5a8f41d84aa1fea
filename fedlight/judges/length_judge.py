"""The longer answer wins: what a judge has to beat before its verdicts say anything about quality."""

from collections.abc import Sequence

from fedlight.evaluation.judge import Fields, Judge
from fedlight.evaluation.win_rate import win_rate


class LengthJudge(Judge):
    """Prefers the answer with more characters; equally long ones tie.

    Example:
        >>> LengthJudge().verdicts([{}] * 3, ["long", "no", "same "], ["no", "long", "size"])
        [1.0, 0.0, 0.5]
    """

    sees_order = False

    def verdicts(self, fields: Sequence[Fields], ours: Sequence[str], theirs: Sequence[str]) -> list[float]:
        """Which answer is longer; see `fedlight.evaluation.judge`."""
        return [
            win_rate([len(a.strip())], [len(b.strip())]) for _, a, b in zip(fields, ours, theirs, strict=True)
        ]
