"""Instruction rows by the names of a column map: read, checked and told apart by what they ask."""

from collections.abc import Iterable
from typing import Any

import numpy as np
from lightning.pytorch.utilities import rank_zero_info

from fedlight.datamodules.rows.columns import Columns, check_columns, text_at
from fedlight.datamodules.rows.rows import RowsError
from fedlight.datamodules.text.templates import Template
from fedlight.support.types import Rows

ALPACA_COLUMNS = {"instruction": "instruction", "input": "input", "response": "output"}
OWNERS = ("client", "category")


def read_instructions(
    raw: Rows, columns: Columns, template: Template, source: str, setting: str = "columns"
) -> list[dict[str, str]]:
    """Rows by the names of the column map; those with a missing value and exact repetitions are left out and counted.

    Args:
        raw: rows as their source has them.
        columns: where they have ``response``, the template's slots and what else is wanted; "" where they have it not.
        template: says without which slots a row says nothing.
        source: its name, for messages.
        setting: that gave the column map, likewise.

    Raises:
        RowsError: a column does not exist, or no row is whole.
    """
    columns = {name: columns[name] for name in (*template.slots, *columns)}  # all sources in one order
    check_columns(raw, {name: path for name, path in columns.items() if path}, source, setting)
    needed = {*template.required, "response", *OWNERS} & set(columns)
    rows = [{name: text_at(row, path) if path else "" for name, path in columns.items()} for row in raw]
    whole = [row for row in rows if all(row[name] for name in needed)]
    unique = list({tuple(row.values()): row for row in whole}.values())
    rank_zero_info(
        f"{source}: {len(rows):,} rows, {len(unique):,} examples; left out: {len(rows) - len(whole):,} missing, "
        f"{len(whole) - len(unique):,} duplicates"
    )
    if not unique:
        empty = {name: sum(not row[name] for row in rows) for name in sorted(needed)}
        found = ", ".join(
            f"{setting}.{name}={columns[name]} in {count:,}" for name, count in empty.items() if count
        )
        raise RowsError(
            f"{source}: each of the {len(rows):,} rows has an empty value: {found}. Map these to other columns."
        )
    return unique


def check_slots(columns: Columns, template: Template, setting: str = "columns") -> None:
    """A column map names every slot of the template and the response; "" only for what a row can do without.

    Raises:
        ValueError: one is missing.
    """
    for name in (*template.slots, "response"):
        needed = name == "response" or name in template.required
        if name not in columns or (needed and not columns[name]):
            raise ValueError(
                f"{setting} has no {name!r}. Set {setting}.{name} to the column that holds it"
                + ("." if needed else ', or to "" where there is none.')
            )


def check_words(tokenizer: Any, texts: Iterable[str], setting: str) -> None:
    """Made-up texts are of words that the tokenizer has a token for: all others are one and the same to the model.

    Args:
        tokenizer: one that knows every text, by its letters or bytes, refuses none.
        texts: made of such words.
        setting: that they come from.

    Raises:
        ValueError: one is not.
    """
    words = sorted({word for text in texts for word in text.split()})
    unknown = [
        word
        for word in words
        if tokenizer.unk_token_id in tokenizer(word, add_special_tokens=False)["input_ids"]
    ]
    if unknown:
        raise ValueError(
            f"{setting}: the tokenizer knows {len(unknown)} of {len(words)} words not, such as {unknown[0]!r}, so a model "
            "cannot tell them apart. Set words that it knows."
        )


def prompt_numbers(rows: list[dict[str, str]]) -> np.ndarray:
    """Per row the number of its prompt: equal where all but response, client and category are equal.

    Example:
        >>> rows = [{"prompt": p, "response": r} for p, r in (("x", "1"), ("y", "1"), ("x", "2"))]
        >>> prompt_numbers(rows).tolist()
        [0, 1, 0]
    """
    numbers: dict[tuple, int] = {}
    prompts = [
        tuple(value for name, value in row.items() if name not in ("response", *OWNERS)) for row in rows
    ]
    return np.array([numbers.setdefault(prompt, len(numbers)) for prompt in prompts])
