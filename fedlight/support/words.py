"""Numbers, times and errors as text for tables, sentences and axes; numbers in texts, beginnings, names and near misses."""

import difflib
from collections.abc import Iterable, Sequence
from typing import Any

UNITS = ((3600, "hours"), (60, "minutes"), (1, "seconds"))
"""Units of time: seconds, and the name."""


def number(text: Any) -> float | None:
    """Return a text as a number; None where it is empty, not a number or not finite.

    Examples:
        >>> number("0.5"), number(""), number("nan"), number("train")
        (0.5, None, None, None)
    """
    try:
        value = float(text)
    except (TypeError, ValueError):
        return None
    return value if abs(value) < float("inf") else None  # NaN is not below it either


def three_digits(value: float) -> str:
    """Return a number of at least 0 with three digits, or all before the point.

    Examples:
        >>> three_digits(0.00012345), three_digits(1.0), three_digits(999.7), three_digits(12345.6)
        ('0.000123', '1', '1,000', '12,346')
    """
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def in_largest_unit(seconds: float) -> str:
    """Return a time of at least 0 in the largest unit that is not longer.

    Examples:
        >>> in_largest_unit(0.25), in_largest_unit(150), in_largest_unit(3600)
        ('0.25 seconds', '2.5 minutes', '1 hour')
    """
    scale, unit = time_unit(seconds)
    number = three_digits(seconds / scale)
    return f"{number} {unit.removesuffix('s') if number == '1' else unit}"


def time_unit(seconds: float) -> tuple[int, str]:
    """Return seconds and name of the largest unit that is not longer than a time, else of the second."""
    return next((pair for pair in UNITS if seconds >= pair[0]), UNITS[-1])


def ends_of(metric: str) -> tuple[str, str]:
    """Return the names of the metrics with the ends of a metric's interval, if it has one.

    Examples:
        >>> ends_of("win_rate/oracle"), ends_of("score/domain")
        (('win_rate_low/oracle', 'win_rate_high/oracle'), ('low/domain', 'high/domain'))
        >>> ends_of("val/accuracy")
        ('val/accuracy_low', 'val/accuracy_high')
    """
    rate, slash, name = metric.partition("/")
    if rate == "win_rate":
        return f"{rate}_low{slash}{name}", f"{rate}_high{slash}{name}"
    if rate == "score":
        return f"low/{name}", f"high/{name}"
    return f"{metric}_low", f"{metric}_high"


def first_line(error: BaseException) -> str:
    r"""Return the first line of an error's message, or the name of its class where the message is empty.

    Examples:
        >>> first_line(OSError("no such file\nat line 3")), first_line(KeyError())
        ('no such file', 'KeyError')
    """
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def count_noun(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless the number is 1.

    Examples:
        >>> count_noun(1, "client"), count_noun(1200, "client")
        ('1 client', '1,200 clients')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def near(word: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` if a known word is similar, else an empty text."""
    names = list(known)
    matches = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    matches = matches or [name for name in names if name.lower().startswith(word.lower())]
    return f"; did you mean {matches[0]!r}?" if matches else ""


def cut_at(text: str, stop: Sequence[str]) -> str:
    r"""Return the text before the first stop text.

    Examples:
        >>> cut_at("4\n\nQuestion: 5", ["Question:", "\n\n"]), cut_at("4", ["\n\n"])
        ('4', '4')
    """
    return text[: min((at for ending in stop if (at := text.find(ending)) >= 0), default=len(text))]
