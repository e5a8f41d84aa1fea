"""Result of a task: a score with its interval, also by group, and every answer.

The interval of 95 % is that of E. B. Wilson, "Probable Inference, the Law of Succession, and Statistical Inference", JASA
1927: it holds for few rows too, and for scores of 0 and 1.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean
from types import MappingProxyType
from typing import Any, NamedTuple

TOO_LONG = "the prompt does not fit into the model"
"""Note of a verdict on a prompt that was not given to the model; it counts as wrong."""


class Verdict(NamedTuple):
    """Score of one answer."""

    score: float  # in [0, 1]
    read: str | None  # the part of the answer that was read; None where none could be, which counts as wrong
    note: str = ""  # reason of the score, where it is not obvious


class Outcome(NamedTuple):
    """Row of a task with the model's answers."""

    row: int  # index of the row in the source, from 0
    prompt: str  # as given to the model
    target: str  # the right answer
    group: str  # subject, domain or the like; "" without groups
    answers: list[str]  # as the model gave them, ``(samples,)``
    verdicts: list[Verdict]  # one for each answer
    score: float  # of the row, in [0, 1]
    fields: Mapping[str, str] = MappingProxyType({})  # texts of the prompt by slot

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
        >>> result.mean, result.by_group, result.group_mean, str(result)
        (0.75, {'a': 0.5, 'b': 1.0}, 0.75, '0.7500 [0.3006, 0.9544] of 4 rows')
    """

    outcomes: Sequence[Outcome]  # one for each row
    # whether the rows have choices: then the last answer of each is its likeliest choice, the others are written
    choices: bool = False

    def __str__(self) -> str:
        """Return a sentence with the score."""
        low, high = self.interval
        unread = f", {self.unread:.1%} of the answers could not be read" if self.unread else ""
        long = f", {self.too_long:,} prompts too long for the model" if self.too_long else ""
        ways = "".join(
            f"; {way} {fmean(verdict.score for verdict in verdicts):.4f} ({_describe(shares_of(verdicts))})"
            for way, verdicts in self.by_way.items()
        )
        return f"{self.mean:.4f} [{low:.4f}, {high:.4f}] of {len(self.outcomes):,} rows{unread}{long}{ways}"

    @property
    def mean(self) -> float:
        """Mean score of the rows."""
        return fmean(outcome.score for outcome in self.outcomes)

    @property
    def interval(self) -> tuple[float, float]:
        """Ends of the mean's interval of 95 %; see `wilson_interval`."""
        return wilson_interval(self.mean, len(self.outcomes))

    @property
    def by_way(self) -> dict[str, list[Verdict]]:
        """Verdicts on the choices that the model has written (``generated``) and finds likeliest (``likelihood``)."""
        if not self.choices:
            return {}
        # The last one of each is on the likeliest choice.
        asked = [outcome.verdicts for outcome in self.outcomes]
        written = [verdict for verdicts in asked for verdict in verdicts[:-1]]
        return ({"generated": written} if written else {}) | {
            "likelihood": [verdicts[-1] for verdicts in asked]
        }

    @property
    def by_group(self) -> dict[str, float]:
        """Group -> mean score of its rows; empty with fewer than two groups."""
        scores: dict[str, list[float]] = {}
        for outcome in self.outcomes:
            scores.setdefault(outcome.group, []).append(outcome.score)
        return {group: fmean(values) for group, values in sorted(scores.items())} if len(scores) > 1 else {}

    @property
    def group_mean(self) -> float:
        """Mean of the groups' means: all groups have the same weight, whatever their number of rows."""
        return fmean(self.by_group.values()) if self.by_group else self.mean

    @property
    def unread(self) -> float:
        """Share of written answers that could not be read, in [0, 1]; 0 where none were written."""
        # The last verdict is on the likeliest choice, which was not written.
        written = [outcome.verdicts[:-1] if self.choices else outcome.verdicts for outcome in self.outcomes]
        unread = [verdict.read is None for verdicts in written for verdict in verdicts]
        return fmean(unread) if unread else 0.0

    @property
    def too_long(self) -> int:
        """Number of rows whose prompts are too long for the model; they count as wrong and unread."""
        return sum(outcome.verdicts[0].note == TOO_LONG for outcome in self.outcomes)

    def metrics(self, name: str) -> Mapping[str, float]:
        """Return the numbers to log.

        It is ``score|low|high|unread/NAME``, with groups ``score/NAME/GROUP`` and ``group_mean/NAME``, and with choices
        ``generated|likelihood/NAME`` (accuracy) and ``share/NAME/generated|likelihood/CHOICE``.
        """
        rates = {f"score/{name}": self.mean, f"unread/{name}": self.unread}
        rates[f"low/{name}"], rates[f"high/{name}"] = self.interval
        for way, verdicts in self.by_way.items():
            rates[f"{way}/{name}"] = fmean(verdict.score for verdict in verdicts)
            rates |= {f"share/{name}/{way}/{choice}": share for choice, share in shares_of(verdicts).items()}
        if self.by_group:
            rates[f"group_mean/{name}"] = self.group_mean
        return {**rates, **{f"score/{name}/{group}": score for group, score in self.by_group.items()}}


def wilson_interval(share: float, number: int) -> tuple[float, float]:
    """Return the ends of Wilson's 95 % interval of a mean score in [0, 1] of ``number`` rows.

    Scores between 0 and 1 vary less than zeros and ones, so their interval is at most too wide.

    Examples:
        >>> [round(end, 4) for end in wilson_interval(0.0, 12)]
        [0.0, 0.2425]
        >>> [round(end, 4) for end in wilson_interval(0.5, 10)]
        [0.2366, 0.7634]
    """
    z = NormalDist().inv_cdf(0.975)
    middle = (share + z * z / (2 * number)) / (1 + z * z / number)
    half = z * math.sqrt(share * (1 - share) / number + z * z / (4 * number**2)) / (1 + z * z / number)
    low, high = min(share, middle - half), max(share, middle + half)  # rounding may pass the share, 0 and 1
    return max(0.0, low), min(1.0, high)


def shares_of(verdicts: Sequence[Verdict]) -> dict[str, float]:
    """Return the share of each choice that was read, without those that were not, in the order of the choices.

    Examples:
        >>> shares_of([Verdict(1.0, "A"), Verdict(0.0, "A"), Verdict(0.0, None), Verdict(0.0, "C")])
        {'A': 0.5, 'C': 0.25}
    """
    counts = Counter(verdict.read for verdict in verdicts if verdict.read is not None)
    return {choice: counts[choice] / len(verdicts) for choice in sorted(counts)}


def _describe(shares: Mapping[str, float]) -> str:
    return ", ".join(f"{choice} {share:.0%}" for choice, share in shares.items()) or "none read"
