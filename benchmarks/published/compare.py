"""Rows of a rerun against those that were recorded: how far each published figure is off, in parts of its tolerance.

Tolerances are words: ``exact``, half a unit of the last digit that is printed; ``absolute 0.02``; ``relative 0.05``;
``factor 3``, for times and their ratios; ``none``, where nothing can be said.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from published.figures import Figure, unit
from published.measurements import Measurement, Row, identity


@dataclass
class Comparison:
    """Comparison of a rerun.

    Attributes:
        compared: how many figures.
        partly: of these, the ones that were rerun with some of their seeds alone.
        off: the largest deviation as a part of its tolerance, 0 where all are equal.
        worst: the figure that it is, with both values.
        differences: figures that are further off than their tolerance allows, or missing.
    """

    compared: int = 0
    partly: int = 0
    off: float = 0.0
    worst: str = ""
    differences: list[str] = field(default_factory=list)


def compare(
    measurement: Measurement, figures: Sequence[Figure], rows: Sequence[Mapping[str, Any]], here: bool = True
) -> Comparison:
    """Compares the rows of a rerun.

    Args:
        measurement: the rerun one.
        figures: its published ones.
        rows: of the rerun: all that were recorded, or with a ``rerun_command`` some of them.
        here: the machine is of the class where the figures were recorded.
    """
    found = Comparison()
    recorded = {identity(measurement, row): number for number, row in enumerate(measurement.rows)}
    again = {recorded.get(identity(measurement, row)): row for row in rows}
    unknown = [row for row in rows if identity(measurement, row) not in recorded]
    found.differences += [f"{_name(measurement, row)}: not recorded" for row in unknown]
    if not measurement.rerun_command:
        lost = (row for number, row in enumerate(measurement.rows) if number not in again)
        found.differences += [f"{_name(measurement, row)}: the rerun has no such row" for row in lost]
    given = 0
    for figure in figures:
        tolerance = measurement.tolerance_of(figure.column, here)
        numbers = [number for number in figure.rows if number in again]
        if measurement.rerun_command:  # it may give some of the columns; rerun_figures says how many figures
            numbers = [number for number in numbers if figure.column in again[number]]
        if not numbers or not figure.values:
            continue
        given += 1
        if tolerance == "none":
            continue
        found.compared += 1
        found.partly += len(numbers) < len(figure.rows)
        for number in numbers:
            row = measurement.rows[number]
            old, new = row.get(figure.column), again[number].get(figure.column)
            part = deviation(old, new, tolerance, figure.format)
            said = f"{_name(measurement, row)}: {figure.column} {_short(old)}, now {_short(new)}"
            if part > found.off:
                found.off, found.worst = part, said
            if part > 1:
                found.differences.append(f"{said} (tolerance: {tolerance})")
    if measurement.rerun_command and given != measurement.rerun_figures:
        found.differences.append(
            f"the rerun gives {given} of the published figures; rerun_figures={measurement.rerun_figures} were expected"
        )
    if not found.compared and not found.differences:
        found.differences.append("the rerun has none of the published figures")
    return found


def deviation(old: Any, new: Any, tolerance: str, form: str) -> float:
    """How far a value is off, in parts of its tolerance: up to 1 is allowed.

    Raises:
        ValueError: the tolerance is none of the known ones.

    Example:
        >>> deviation(0.5, 0.51, "absolute 0.02", ".3f"), deviation(0.1234, 0.1233, "exact", ".3f") < 1
        (0.5000000000000004, True)
    """
    if isinstance(old, str) or old is None or new is None or isinstance(new, str):
        return 0.0 if old == new else math.inf
    if math.isnan(old) or math.isnan(new):
        return 0.0 if math.isnan(old) and math.isnan(new) else math.inf
    kind, _, amount = tolerance.partition(" ")
    if kind == "factor":
        if old == new:
            return 0.0
        return abs(math.log(new / old)) / math.log(float(amount)) if old > 0 < new else math.inf
    allowed = {"exact": unit(form, old) / 2, "absolute": amount, "relative": 0.0}.get(kind)
    if allowed is None or (kind != "exact" and not amount):
        raise ValueError(
            f"tolerance {tolerance!r}: write exact, absolute X, relative X, factor X or none, with a number for X"
        )
    allowed = abs(old) * float(amount) if kind == "relative" else float(allowed)
    off = abs(new - old)
    return 0.0 if off == 0 else off / allowed if allowed else math.inf


def _name(measurement: Measurement, row: Row | Mapping[str, Any]) -> str:
    seed = [f"seed {row['seed']}"] if "seed" in row else []
    return ", ".join([*(str(row.get(column)) for column in measurement.key), *seed])


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
