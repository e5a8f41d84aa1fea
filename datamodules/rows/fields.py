"""Fields of an instruction row: the text of each template slot, the response, and the keys that compare rows."""

from collections.abc import Sequence

import numpy as np

from fedlight.datamodules.text.chat import read_turns
from fedlight.datamodules.text.templates import MESSAGES
from fedlight.support.types import Fields

OWNERS = ("client", "category")
"""Names of a row's client and category; no model reads them."""
NO_SLOTS = ("response", *OWNERS)


def instruction_text(fields: Fields) -> str:
    r"""Return the text of a row that encoders embed: its non-empty slots in order, without the response.

    Examples:
        >>> instruction_text({"instruction": "Add.", "input": "1 and 2", "response": "3"})
        'Add.\n1 and 2'
    """
    texts = [
        "\n".join(turn["content"] for turn in read_turns(text)) if name == MESSAGES else text
        for name, text in fields.items()
        if name not in NO_SLOTS and text
    ]
    return "\n".join(texts)


def make_question_key(row: Fields) -> tuple[str, ...]:
    """Return a key that is equal for rows with the same non-empty slots, whatever the order of their columns.

    Examples:
        >>> make_question_key({"input": "1 2", "instruction": "Add.", "response": "3", "category": "sums"})
        ('input', '1 2', 'instruction', 'Add.')
    """
    return tuple(
        part for name in sorted(row) if name not in NO_SLOTS and row[name] for part in (name, row[name])
    )


def make_row_key(row: Fields) -> tuple[str, ...]:
    """Return a key that is equal for rows with the same non-empty slots and the same response."""
    return (*make_question_key(row), row["response"])


def number_prompts(rows: Sequence[Fields]) -> np.ndarray:
    """Return the prompt number of each row, ``(rows,)``: equal where all but response, client and category are equal."""
    numbers: dict[tuple, int] = {}
    prompts = [tuple(value for name, value in row.items() if name not in NO_SLOTS) for row in rows]
    return np.array([numbers.setdefault(prompt, len(numbers)) for prompt in prompts])
