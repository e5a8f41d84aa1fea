"""Rows and prompts of an evaluation task; see `fedlight.evaluation.tasks.task`."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedlight.datamodules.rows.columns import check_columns, check_names, find_value
from fedlight.datamodules.rows.rows import RowsError, load_rows
from fedlight.datamodules.text.templates import Template
from fedlight.support.checks import Checked
from fedlight.support.types import Fields


class TaskRows(Checked):
    """Source of a task's rows, and the template of its prompts.

    Args:
        source: file, folder or data set of the rows; see `fedlight.datamodules.rows.rows`.
        split: split of a hub dataset.
        columns: the task's name -> column; a name left out is a column of the same name.
        template: a name or a text with slots, as in training; see `fedlight.datamodules.text.templates`.
        where: column -> values; only rows with one of these values are kept, such as ``{domain: [math]}``.
        share: size of the test part of a split that is kept, in (0, 1), as by ``train_test_split(test_size=share)`` of the
            package ``datasets``, which often splits benchmarks without a test set; None: all rows.
        share_seed: ``seed`` of that split.

    Raises:
        ValueError: the template does not exist, or ``share`` is out of range.
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
        self._named = self.template  # of the settings; for_tokenizer starts from it
        self.where, self.share, self.share_seed = where or {}, share, share_seed

    @property
    def stops(self) -> tuple[str, ...]:
        """Beginnings of another question, before which an answer ends."""
        return self.template.stops

    def rows(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """Return the values of these names in each row; None where a row other than the first has no such column.

        Raises:
            RowsError: the rows cannot be read, a column does not exist, or no row is left.
            ValueError: a name of ``columns`` is misspelled.
        """
        check_names(self.columns, names)
        rows = load_rows(self.source, self.split)
        if self.share is not None:
            rows = [rows[row] for row in draw_test_rows(len(rows), self.share, self.share_seed)]
        columns = {name: self.columns.get(name, name) for name in names}
        wanted_columns = {**columns, **{column: column for column in self.where}}
        # Tests of code and choices are lists of objects.
        check_columns(rows, wanted_columns, self.source, texts=False)
        kept = [
            row for row in rows if all(str(find_value(row, c)) in wanted for c, wanted in self.where.items())
        ]
        if not kept:
            raise RowsError(f"{self.source}: no row has {self.where}. Check where.")
        return [{name: find_value(row, path) for name, path in columns.items()} for row in kept]

    def for_tokenizer(self, tokenizer: Any) -> None:
        """Write prompts in the tokenizer's chat template, if that is the template.

        Raises:
            ValueError: it is, and the tokenizer has none.
        """
        self.template = self._named.for_tokenizer(tokenizer)

    def prompt(self, fields: Fields, shots: Sequence[tuple[Fields, str]] = ()) -> str:
        """Return the prompt with these fields after examples with their answers.

        Raises:
            ValueError: the task has no text for a slot of the template.
        """
        if missing := [slot for slot in self.template.slots if slot not in fields]:
            raise ValueError(
                f"the template has a slot {{{missing[0]}}}, but the task fills {', '.join(fields)}: use these alone."
            )
        return self.template.show(fields, shots)

    def continuation(self, response: str, closed: bool = False) -> str:
        """Return an answer as it follows its prompt in training, with ``closed`` up to the end token of a chat template."""
        return self.template.continuation(response, closed)


def draw_test_rows(number: int, share: float, seed: int) -> list[int]:
    """Return the test rows of ``datasets.Dataset.train_test_split(test_size=share, seed=seed)``, in its order.

    Examples:
        >>> draw_test_rows(10, 0.25, seed=42)
        [5, 6, 0]
    """
    order = np.random.default_rng(seed).permutation(number)  # as `datasets` draws
    return order[: math.ceil(share * number)].tolist()  # datasets takes the first part, rounded up
