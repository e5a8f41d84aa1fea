"""Exclusion of rows from training, by held-out values of a column or by texts that other rows hold.

Wu et al., "Towards Federated RLHF with Aggregated Client Preference for LLMs", https://arxiv.org/abs/2407.03038, section 6,
after Ouyang et al. 2022: the clients' preference data and the server's prompts share no post.
"""

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fedlight.datamodules.rows.columns import check_columns, text_at
from fedlight.datamodules.rows.rows import RowsError, load_rows
from fedlight.support.checks import Settings
from fedlight.support.types import Fields, Rows

MARKS = "".join(chr(code) for code in range(0x300, 0x1F000) if unicodedata.category(chr(code))[0] == "M")
"""Signs that are part of the letter before them, such as the vowels of Devanagari; for ``re`` they are no letters."""
WORD = re.compile(f"[^\\W_](?:[^\\W_]|[{MARKS}])*")


@dataclass(frozen=True)
class Holdout(Settings):
    """Rows held out for the test by values of a column; in YAML ``holdout: {column: topic, values: ["tv-is-better_*"]}``.

    Args:
        column: path of the raw column.
        values: held-out values of that column; a final ``*`` matches any ending (both stances of a debate).
    """

    column: str
    values: list[str]

    def mask(self, rows: Rows, source: str) -> np.ndarray:
        """Return whether each row is held out, ``(rows,)``.

        Raises:
            RowsError: the column does not exist, or a value occurs in no row.

        Examples:
            >>> rows = [{"topic": "tv_yes"}, {"topic": "tv_no"}, {"topic": "tvs"}]
            >>> Holdout("topic", ["tv_*"]).mask(rows, "rows").tolist()
            [True, True, False]
        """
        check_columns(rows, {"column": self.column}, source, "holdout")
        texts = [text_at(row, self.column) for row in rows]
        existing = sorted(set(texts))
        held: set[str] = set()
        for value in self.values:
            held |= self._match(value, existing, source)
        return np.array([text in held for text in texts])

    def side(self, rows: Rows, source: str, held_out: bool) -> Rows:
        """Return the rows that are held out, or the others; RowsError if none is left."""
        mask = self.mask(rows, source)
        wanted = [row for row, held in zip(rows, mask, strict=True) if held == held_out]
        if not wanted:
            raise RowsError(
                f"{source}: holdout.values cover every row: none is left to train on. Name fewer."
            )
        return wanted

    def _match(self, value: str, existing: Sequence[str], source: str) -> set[str]:
        if value.endswith("*"):  # such as both stances of a debate
            matched = {text for text in existing if text.startswith(value[:-1])}
        else:
            matched = {value} & set(existing)
        if not matched:
            shown = ", ".join(existing[:30]) + (", ..." if len(existing) > 30 else "")
            raise RowsError(
                f"{source}: holdout value {value!r} occurs in no row. {self.column} has: {shown}."
            )
        return matched


@dataclass(frozen=True)
class Excluded(Settings):
    """Rows whose texts no prompt may have; in YAML ``{source: votes.jsonl, column: info.post, slot: post}``.

    Args:
        source: file, folder or data set of the rows; see `fedlight.datamodules.rows.rows`.
        column: path of the text in a row; see `fedlight.datamodules.rows.columns`.
        slot: slot of a prompt that is compared with it.
        split: split of a hub data set.
    """

    source: str
    column: str
    slot: str
    split: str = "train"

    def texts(self) -> set[str]:
        """Return the rows' normalized texts without the empty one."""
        rows = load_rows(self.source, self.split)
        check_columns(rows, {"column": self.column}, self.source, "exclude")
        return {normalize_text(text_at(row, self.column)) for row in rows} - {""}


def normalize_text(text: str) -> str:
    r"""Return the words of a text in lower case, joined by blanks: equal for copies that differ in form only.

    Examples:
        >>> normalize_text(" My  DOG's\nshoes... (2 pairs)! ")
        'my dog s shoes 2 pairs'
    """
    # NFKC makes full-width letters and ligatures equal to the plain ones.
    return " ".join(WORD.findall(unicodedata.normalize("NFKC", text).casefold()))


def exclude_prompts(
    prompts: Sequence[Fields], exclude: Mapping[str, Excluded | None]
) -> tuple[list[Fields], dict[str, int]]:
    """Return the prompts that no other rows hold, in order, and for each name the number of prompts that its rows hold.

    A prompt that several hold is counted for each. In ``exclude`` None excludes nothing.
    """
    held: set[int] = set()
    counts = {}
    for name, rows in exclude.items():
        if rows is not None:
            texts = rows.texts()
            hits = {index for index, row in enumerate(prompts) if normalize_text(row[rows.slot]) in texts}
            counts[name] = len(hits)  # a prompt that several hold counts for each
            held |= hits
    return [prompt for index, prompt in enumerate(prompts) if index not in held], counts
