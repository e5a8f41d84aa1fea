"""Rows of a rerun against those that were recorded: how far each published figure is off, in parts of its tolerance.

Tolerances are words: ``exact``, half a unit of the last digit that is printed; ``absolute 0.02``; ``relative 0.05``.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from published.figures import Figure, unit
from published.measurements import Measurement, identity


def compare(
    measurement: Measurement, figures: Sequence[Figure], rows: Sequence[Mapping[str, Any]], tolerance: str
) -> tuple[int, list[str]]:
    """Compares the rows of a rerun.

    Args:
        measurement: the rerun one.
        figures: its published ones.
        rows: of the rerun: all that were recorded, or with a ``rerun_command`` some of them, or of their columns.
        tolerance: how far they may be off.

    Returns:
        How many figures were compared, and those that are further off than the tolerance allows, or missing.
    """
    recorded = {identity(measurement, row): number for number, row in enumerate(measurement.rows)}
    again = {recorded.get(identity(measurement, row)): row for row in rows}
    names = {identity(measurement, row) for row in rows}
    differences = [f"{', '.join(name)}: not recorded" for name in sorted(names - set(recorded))]
    if not measurement.rerun_command:
        lost = sorted(set(recorded) - names)
        differences += [f"{', '.join(name)}: the rerun has no such row" for name in lost]
    compared = 0
    for figure in figures:
        numbers = [number for number in figure.rows if number in again]
        if measurement.rerun_command:
            numbers = [number for number in numbers if figure.column in again[number]]
        compared += bool(numbers and figure.values)
        for number in numbers:
            old, new = measurement.rows[number].get(figure.column), again[number].get(figure.column)
            if deviation(old, new, tolerance, figure.format) > 1:
                name = ", ".join(identity(measurement, measurement.rows[number]))
                differences.append(
                    f"{name}: {figure.column} {_short(old)}, now {_short(new)} (tolerance: {tolerance})"
                )
    if not compared and not differences:
        differences.append("the rerun has none of the published figures")
    return compared, differences


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
    match tolerance.split():
        case ["exact"]:
            allowed = unit(form) / 2
        case ["absolute", amount]:
            allowed = float(amount)
        case ["relative", amount]:
            allowed = float(amount) * abs(old)
        case _:
            raise ValueError(
                f"tolerance {tolerance!r}: write exact, absolute X or relative X, with a number for X"
            )
    return 0.0 if new == old else abs(new - old) / allowed if allowed else math.inf


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
