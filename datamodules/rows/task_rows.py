"""Rows of a task and the template in which they are asked; see :mod:`fedlight.evaluation.tasks.task`."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedlight.datamodules.rows.columns import check_columns, value_at
from fedlight.datamodules.rows.rows import RowsError, load_rows
from fedlight.datamodules.text.templates import Template


class TaskRows:
    """Where a task's rows are, and how its prompts look.

    Args:
        source: where the rows are; see `fedlight.datamodules.rows.rows`.
        split: split of a hub dataset.
        columns: where the rows have what the task asks for, by its name there; a name that is left out stands in the
            column of the same name.
        template: a name or a text with slots, as in training; see `fedlight.datamodules.text.templates`.
        where: keep the rows alone in which these columns have one of these values, such as ``{domain: [math]}``.
        share: keep the test part of a split alone, in (0, 1): that of ``train_test_split(test_size=share)`` in the
            package ``datasets``, by which benchmarks without a test set of their own are often split.
        share_seed: the ``seed`` of that split.

    Raises:
        ValueError: there is no such template, or a share is out of range.
    """

    def __init__(
        self,
        source: str,
        split: str = "test",
        columns: dict[str, str] | None = None,
        template: str = "alpaca",
        where: dict[str, list[str]] | None = None,
        share: float | None = None,
        share_seed: int = 42,
    ) -> None:
        if share is not None and not 0 < share < 1:
            raise ValueError(f"share={share} must be in (0, 1), or null for all rows.")
        self.source, self.split = source, split
        self.columns, self.template = columns or {}, Template.named(template)
        self.where, self.share, self.share_seed = where or {}, share, share_seed

    def rows(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """The values of these names in each row; None where a later row has none.

        Raises:
            RowsError: the rows cannot be read, a column does not exist, or no row is left.
        """
        rows = load_rows(self.source, self.split)
        if self.share is not None:
            rows = [rows[row] for row in held_out_rows(len(rows), self.share, self.share_seed)]
        columns = {name: self.columns.get(name, name) for name in names}
        check_columns(rows, {**columns, **{column: column for column in self.where}}, self.source)
        kept = [row for row in rows if all(str(_value(row, c)) in wanted for c, wanted in self.where.items())]
        if not kept:
            raise RowsError(f"{self.source}: no row has {self.where}. Check where.")
        return [{name: _value(row, path) for name, path in columns.items()} for row in kept]

    def prompt(self, fields: Mapping[str, str]) -> str:
        """The template, filled.

        Raises:
            ValueError: the template has a slot that the task has no text for.
        """
        if missing := [slot for slot in self.template.slots if slot not in fields]:
            raise ValueError(
                f"the template has a slot {{{missing[0]}}}, but the task fills {', '.join(fields)}: use these alone."
            )
        return self.template.render(fields).text


def held_out_rows(number: int, share: float, seed: int) -> list[int]:
    """Which rows ``datasets.Dataset.train_test_split(test_size=share, seed=seed)`` has for testing, in its order.

    Args:
        number: of rows.
        share: in (0, 1).
        seed: of the shuffle.

    Example:
        >>> held_out_rows(10, 0.25, seed=42)
        [5, 6, 0]
    """
    order = np.random.default_rng(seed).permutation(number)
    return order[: math.ceil(share * number)].tolist()


def _value(row: Mapping[str, Any], path: str) -> Any:
    try:
        return value_at(row, path)
    except (KeyError, IndexError, TypeError, ValueError):
        return None
