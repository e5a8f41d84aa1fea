"""Prompts that must not be used, as other rows hold the same text: posts that clients have voted on, or that a test asks.

Wu et al., "Towards Federated RLHF with Aggregated Client Preference for LLMs", https://arxiv.org/abs/2407.03038, section 6,
after Ouyang et al. 2022: no post is in both the clients' preference data and what the server completes.
"""

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedlight.datamodules.rows.columns import check_columns, text_at
from fedlight.datamodules.rows.rows import load_rows
from fedlight.support.types import Fields


@dataclass(frozen=True)
class Excluded:
    """Rows whose texts no prompt may have; in YAML ``{source: votes.jsonl, column: info.post, slot: post}``.

    Args:
        source: where the rows are; see `fedlight.datamodules.rows.rows`.
        column: where a row has the text; see `fedlight.datamodules.rows.columns`.
        slot: the slot of a prompt that it is compared with.
        split: of a hub data set.
    """

    source: str
    column: str
    slot: str
    split: str = "train"

    def texts(self) -> set[str]:
        """What the rows hold, as `same_text` writes it; empty texts are left out, so they exclude nothing.

        Raises:
            RowsError: the rows cannot be had, or have no such column.
        """
        rows = load_rows(self.source, self.split)
        check_columns(rows, {"column": self.column}, self.source, "exclude")
        return {same_text(text_at(row, self.column)) for row in rows} - {""}


MARKS = "".join(chr(code) for code in range(0x300, 0x1F000) if unicodedata.category(chr(code))[0] == "M")
"""Signs that are part of the letter before them, such as the vowels of Devanagari; for ``re`` they are no letters."""
WORD = re.compile(f"[^\\W_](?:[^\\W_]|[{MARKS}])*")


def same_text(text: str) -> str:
    r"""Letters and digits in small, one blank for anything between them: equal for copies that differ in form alone.

    Example:
        >>> same_text(" My  DOG's\nshoes... (2 pairs)! ")
        'my dog s shoes 2 pairs'
    """
    return " ".join(WORD.findall(unicodedata.normalize("NFKC", text).casefold()))


def without(
    prompts: Sequence[Fields], exclude: Mapping[str, Excluded | None]
) -> tuple[list[Fields], dict[str, int]]:
    """Prompts that none of the rows hold, and how many each of them has.

    Args:
        prompts: slots' texts of each.
        exclude: name -> rows; None: they exclude nothing.

    Returns:
        The others, in their order, and name -> prompts that these rows hold. One that several hold is counted for each.

    Raises:
        RowsError: rows cannot be had.
    """
    held: set[int] = set()
    counts = {}
    for name, rows in exclude.items():
        if rows is not None:
            texts = rows.texts()
            found = {index for index, own in enumerate(prompts) if same_text(own[rows.slot]) in texts}
            counts[name] = len(found)
            held |= found
    return [own for index, own in enumerate(prompts) if index not in held], counts
