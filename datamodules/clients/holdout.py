"""Whole debates, subreddits, subjects kept out of training and used for the test alone."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedlight.datamodules.rows.columns import check_columns, text_at
from fedlight.datamodules.rows.rows import RowsError
from fedlight.support.types import Rows


@dataclass(frozen=True)
class Holdout:
    """Which rows are held out; in YAML ``holdout: {column: topic, values: ["tv-is-better-than-books_*"]}``.

    Args:
        column: path of the raw column.
        values: values of that column; one that ends in ``*`` stands for all that begin so (both stances of a debate).
    """

    column: str
    values: list[str]

    def mask(self, rows: Rows, source: str) -> np.ndarray:
        """Whether each row is held out, ``(rows,)``.

        Raises:
            RowsError: the column does not exist, or a value occurs in no row.

        Example:
            >>> rows = [{"topic": "tv_yes"}, {"topic": "tv_no"}, {"topic": "tvs"}]
            >>> Holdout("topic", ["tv_*"]).mask(rows, "rows").tolist()
            [True, True, False]
        """
        check_columns(rows, {"column": self.column}, source, "holdout")
        texts = [text_at(row, self.column) for row in rows]
        existing = sorted(set(texts))
        held: set[str] = set()
        for value in self.values:
            held |= self._matching(value, existing, source)
        return np.array([text in held for text in texts])

    def side(self, rows: Rows, source: str, held_out: bool) -> Rows:
        """The rows that are held out, or the others.

        Raises:
            RowsError: as `mask`, or no row is left.
        """
        mask = self.mask(rows, source)
        wanted = [row for row, held in zip(rows, mask, strict=True) if held == held_out]
        if not wanted:
            raise RowsError(
                f"{source}: holdout.values cover every row: none is left to train on. Name fewer."
            )
        return wanted

    def _matching(self, value: str, existing: Sequence[str], source: str) -> set[str]:
        if value.endswith("*"):
            found = {text for text in existing if text.startswith(value[:-1])}
        else:
            found = {value} & set(existing)
        if not found:
            shown = ", ".join(existing[:30]) + (", ..." if len(existing) > 30 else "")
            raise RowsError(
                f"{source}: holdout value {value!r} occurs in no row. {self.column} has: {shown}."
            )
        return found
