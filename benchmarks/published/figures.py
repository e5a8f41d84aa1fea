"""Fields such as ``{accuracy[FedBis]:.3f}``: which figures they mean, and how these are printed.

A field is ``{column[words]:format}``. The words tell the rows, with semicolons between them: each has to be the value of one
of the measurement's key columns, or ``seed N``. The format is Python's for a number; over several seeds it is the mean ± the
standard deviation, with ``mean`` in front of the format the mean alone. ``{name.column[...]}`` is of another measurement.

``{column[words minus words]:format}`` is the difference of two rows, and ``{column minus column[words]:format}`` of two
columns, paired by seed: its mean over the seeds and the interval of 95 % by Student's t, as ``+0.167 [+0.017, +0.316]``. So
an interval follows from the recorded seeds alone.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean, stdev

from fedlight.evaluation.bootstrap import student_interval
from published.measurements import Measurement, Row

FIELD = re.compile(
    r"\{(?:(?P<of>\w+)\.)?(?P<column>[^{}\[\]:.]+)(?:\[(?P<rows>[^\]]*)\])?(?::(?P<spec>[^{}]*))?\}"
)


@dataclass(frozen=True)
class Figure:
    """A published figure: a column of the row, or of a row for each seed, of a measurement.

    Attributes:
        measurement: that has the rows.
        column: of the rows.
        rows: their numbers, one for each seed.
        spec: how it is printed.
        subtracted: the figure that is subtracted, of the same seeds; None where this one is no difference.
    """

    measurement: Measurement
    column: str
    rows: tuple[int, ...]
    spec: str
    subtracted: "Figure | None" = None

    @property
    def sides(self) -> list["Figure"]:
        """The two figures of a difference, or the figure itself."""
        return [replace(self, subtracted=None), self.subtracted] if self.subtracted else [self]

    @property
    def values(self) -> list[float | str]:
        """One for each row that has one; of a difference none where a side lacks one."""
        if self.subtracted:
            first, second = (side.values for side in self.sides)
            if len(first) != len(second):
                return []
            return [float(one) - float(other) for one, other in zip(first, second, strict=True)]
        found = (self.measurement.rows[row].get(self.column) for row in self.rows)
        return [one for one in found if one is not None and not (isinstance(one, float) and math.isnan(one))]

    @property
    def text(self) -> str:
        """As it is printed, empty where there is none."""
        if self.subtracted and (numbers := [float(value) for value in self.values]):
            low, high = student_interval(numbers)
            return f"{mean(numbers):{self.format}} [{low:{self.format}}, {high:{self.format}}]"
        return printed(self.values, self.spec)

    @property
    def format(self) -> str:
        """The format of a number."""
        return self.spec.removeprefix("mean").strip()

    @property
    def unit(self) -> float:
        """One unit of the last digit that is printed of it; 0 where all digits are."""
        return unit(self.format)


def unit(form: str) -> float:
    """One unit of the last digit that a format prints.

    Example:
        >>> unit(".3f"), unit(",.0f"), unit(".1%"), unit("")
        (0.001, 1.0, 0.001, 0.0)
    """
    digits = re.search(r"\.(\d+)([f%])$", form)
    return float(f"1e{-int(digits[1]) - 2 * (digits[2] == '%')}") if digits else 0.0


def printed(values: Sequence[float | str], spec: str) -> str:
    """Values of several seeds in the form ``mean ± standard deviation``.

    Example:
        >>> printed([1.0, 2.0], ".2f"), printed([1.0, 2.0], "mean .1f"), printed([0.5], ".0%"), printed(["4 ± 1"], "mean")
        ('1.50 ± 0.71', '1.5', '50 %', '4')
    """
    alone, form = spec.startswith("mean"), spec.removeprefix("mean").strip()
    texts = [value for value in values if isinstance(value, str)]
    if texts:
        return texts[0].partition(" ± ")[0] if alone else texts[0]
    numbers = [float(value) for value in values]
    if not numbers:
        return ""
    shown = [mean(numbers)] if alone or len(numbers) == 1 else [mean(numbers), stdev(numbers)]
    return " ± ".join(f"{0.0 if number == 0 else number:{form}}".replace("%", " %") for number in shown)


def selected(measurement: Measurement, words: Sequence[str]) -> tuple[int, ...]:
    """Numbers of the rows that have all the words in their key columns, ordered by seed.

    Raises:
        ValueError: there is no such row, or there are several of one seed.
    """

    def names(row: Row) -> set[str]:
        of = {str(row[column]) for column in measurement.key if row.get(column) is not None}
        return of | ({f"seed {row['seed']}"} if "seed" in row else set())

    found = [number for number, row in enumerate(measurement.rows) if set(words) <= names(row)]
    seeds = [measurement.rows[number].get("seed", 0) for number in found]
    at = f"measurements.{measurement.name}: [{'; '.join(words)}]"
    if not found:
        known = sorted({name for row in measurement.rows for name in names(row)})
        raise ValueError(f"{at} is no row; rows have {', '.join(known)}")
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"{at} is {len(found)} rows, {len(set(seeds))} seeds: say which row is meant")
    return tuple(number for _, number in sorted(zip(seeds, found, strict=True)))


def figure(
    field: re.Match[str],
    measurements: Mapping[str, Measurement],
    own: Measurement | None,
    words: Sequence[str] = (),
) -> Figure:
    """Meaning of a field.

    Args:
        field: a match of `FIELD`.
        measurements: by name.
        own: the measurement of fields that name none.
        words: of the table and of its row, besides the field's own.

    Raises:
        ValueError: there is no such measurement, row or column.
    """
    measurement = measurements.get(field["of"]) if field["of"] else own
    if measurement is None:
        raise ValueError(f"{field[0]}: there is no measurement {field['of']!r}")
    columns = field["column"].split(" minus ")
    known = sorted({column for row in measurement.rows for column in row})
    if lost := set(columns) - set(known):
        raise ValueError(
            f"{field[0]}: measurements.{measurement.name} has no column {min(lost)!r}; it has {', '.join(known)}"
        )
    rows = [
        selected(measurement, [word.strip() for word in side.split(";") if word.strip()])
        for side in "; ".join([*words, field["rows"] or ""]).split(" minus ")
    ]
    spec = field["spec"] or ""
    if len(columns) == len(rows) == 1:
        return Figure(measurement, columns[0], rows[0], spec)
    seeds = [[measurement.rows[row].get("seed") for row in side] for side in (rows[0], rows[-1])]
    if seeds[0] != seeds[1] or len(seeds[0]) < 2:
        raise ValueError(f"{field[0]}: a difference needs the same two seeds or more; they are {seeds}")
    return Figure(measurement, columns[0], rows[0], spec, Figure(measurement, columns[-1], rows[-1], spec))


def filled(
    text: str,
    measurements: Mapping[str, Measurement],
    own: Measurement | None,
    words: Sequence[str] = (),
) -> tuple[str, list[Figure]]:
    """A text with its fields printed, and their figures; the text is empty where a figure is not there."""
    figures = [figure(found, measurements, own, words) for found in FIELD.finditer(text)]
    texts = [one.text for one in figures]
    if not all(texts):
        return "", []
    following = iter(texts)
    return FIELD.sub(lambda _: next(following), text), figures
