"""Compute the recorded differences over seeds again, from the rows of the single seeds in the same record.

A recipe's stage under ``over_seeds`` has either ``pairs``, a label -> the method and the one that is subtracted, with one
``column``, or ``against``, the method that is subtracted from every other, in each of its columns.
"""

import math
import shlex
from collections.abc import Iterator, Mapping
from statistics import mean
from typing import Any

import yaml

from fedlight.conf import path as config_file
from fedlight.evaluation.bootstrap import student_interval
from published.measurements import Measurement, Row


def differing(measurement: Measurement) -> Iterator[str]:
    """Name each recorded difference that the seeds do not give, with both values."""
    if not measurement.over_seeds:
        return
    by_seed: dict[int, dict[str, Row]] = {}
    for row in measurement.rows:
        if "seed" in row:
            by_seed.setdefault(row["seed"], {})[row["method"]] = row
    for row in measurement.rows:
        stage, separator, name = str(row.get("method")).partition(": ")
        if "seed" in row or not separator or stage not in measurement.over_seeds:
            continue
        told = _arguments(measurement, stage)
        if "pairs" in told:
            columns, methods = {told.get("column", "utility"): "difference"}, told["pairs"][name]
        else:
            columns, methods = {one: one for one in told["columns"] if one in row}, (name, told["against"])
        for column, said in columns.items():
            gaps = [
                rows[methods[0]][column]
                - (rows[methods[1]][column] if methods[1] in rows else rows[methods[0]][methods[1]])
                for rows in by_seed.values()
            ]
            ends = ("low", "high") if "pairs" in told else (f"{said} low", f"{said} high")
            recorded = [row[said], *(row[end] for end in ends)]
            made = [mean(gaps), *student_interval(gaps)]
            if not all(
                math.isclose(one, other, abs_tol=1e-9) for one, other in zip(recorded, made, strict=True)
            ):
                yield f"{measurement.name}: {row['method']}, {column}: recorded {recorded}, its seeds give {made}"


def _arguments(measurement: Measurement, stage: str) -> Mapping[str, Any]:
    """Return the arguments of a stage, from the recipe or from a recipe that it extends."""
    names = [f"recipes/{shlex.split(measurement.command)[2]}.yaml"]
    for name in names:
        told = yaml.safe_load(config_file(name).read_text(encoding="utf-8"))
        if "with" in told.get("over_seeds", {}).get(stage, {}):
            arguments: Mapping[str, Any] = told["over_seeds"][stage]["with"]
            return arguments
        bases = told.get("extends", [])
        names += [f"recipes/{base}" for base in ([bases] if isinstance(bases, str) else bases)]
    raise ValueError(
        f"docs/results.toml: measurements.{measurement.name}: no recipe has the stage {stage} over seeds"
    )
