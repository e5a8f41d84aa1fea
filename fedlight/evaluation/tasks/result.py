"""Result of a task: a score with its standard error, also by group, and every answer."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from types import MappingProxyType
from typing import Any, NamedTuple

TOO_LONG = "the prompt does not fit into the model"
"""Note of a verdict on a prompt that was not given to the model; it counts as wrong."""


class Verdict(NamedTuple):
    """Score of one answer.

    Attributes:
        score: in [0, 1].
        read: the part of the answer that was read; None where none could be, which counts as wrong.
        note: reason of the score, where it is not obvious.
    """

    score: float
    read: str | None
    note: str = ""


class Outcome(NamedTuple):
    """Row of a task with the model's answers.

    Attributes:
        row: index of the row in the source, from 0.
        prompt: as given to the model.
        target: the right answer.
        group: subject, domain or the like; "" without groups.
        answers: as the model gave them, ``(samples,)``.
        verdicts: one for each answer.
        score: of the row, in [0, 1].
        fields: texts of the prompt by slot.
    """

    row: int
    prompt: str
    target: str
    group: str
    answers: list[str]
    verdicts: list[Verdict]
    score: float
    fields: Mapping[str, str] = MappingProxyType({})

    def record(self) -> dict[str, Any]:
        """Return plain values, for a line of JSON."""
        return {
            **self._asdict(),
            "verdicts": [verdict._asdict() for verdict in self.verdicts],
            "fields": dict(self.fields),
        }


@dataclass(frozen=True)
class Result:
    """Outcomes of a task, in the order of the rows, at least one.

    Examples:
        >>> def outcome(group, score):
        ...     return Outcome(0, "1+1=", "2", group, ["2"], [Verdict(score, "2")], score)
        >>> result = Result([outcome("a", 1.0), outcome("a", 0.0), outcome("b", 1.0), outcome("b", 1.0)])
        >>> result.mean, result.standard_error, result.by_group, result.group_mean
        (0.75, 0.25, {'a': 0.5, 'b': 1.0}, 0.75)
    """

    outcomes: Sequence[Outcome]

    def __str__(self) -> str:
        """Return a sentence with the score."""
        error = f" +- {self.standard_error:.4f}" if len(self.outcomes) > 1 else ""
        unread = f", {self.unread:.1%} of the answers could not be read" if self.unread else ""
        long = f", {self.too_long:,} prompts too long for the model" if self.too_long else ""
        return f"{self.mean:.4f}{error} of {len(self.outcomes):,} rows{unread}{long}"

    @property
    def mean(self) -> float:
        """Mean score of the rows."""
        return fmean(outcome.score for outcome in self.outcomes)

    @property
    def standard_error(self) -> float:
        """Standard error of the mean: the rows' sample deviation over the root of their number; NaN for one row."""
        scores = [outcome.score for outcome in self.outcomes]
        return stdev(scores) / math.sqrt(len(scores)) if len(scores) > 1 else math.nan

    @property
    def by_group(self) -> dict[str, float]:
        """Group -> mean score of its rows; empty with fewer than two groups."""
        scores: dict[str, list[float]] = {}
        for outcome in self.outcomes:
            scores.setdefault(outcome.group, []).append(outcome.score)
        return {group: fmean(found) for group, found in sorted(scores.items())} if len(scores) > 1 else {}

    @property
    def group_mean(self) -> float:
        """Mean of the groups' means: all groups have the same weight, whatever their number of rows."""
        return fmean(self.by_group.values()) if self.by_group else self.mean

    @property
    def unread(self) -> float:
        """Share of answers that could not be read, in [0, 1]."""
        return fmean(verdict.read is None for outcome in self.outcomes for verdict in outcome.verdicts)

    @property
    def too_long(self) -> int:
        """Number of rows whose prompts are too long for the model; they count as wrong and unread."""
        return sum(outcome.verdicts[0].note == TOO_LONG for outcome in self.outcomes)

    def metrics(self, name: str) -> Mapping[str, float]:
        """Return ``score|stderr|unread/NAME``, and with groups ``score/NAME/GROUP`` and ``group_mean/NAME``, to log."""
        found = {f"score/{name}": self.mean, f"unread/{name}": self.unread}
        if len(self.outcomes) > 1:
            found[f"stderr/{name}"] = self.standard_error
        if self.by_group:
            found[f"group_mean/{name}"] = self.group_mean
        return {**found, **{f"score/{name}/{group}": score for group, score in self.by_group.items()}}
