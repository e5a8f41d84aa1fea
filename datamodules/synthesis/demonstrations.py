"""Which of a client's own rows a prompt shows."""

from collections.abc import Sequence
from itertools import chain, zip_longest

import numpy as np

from fedlight.support.types import Fields


def drawn(rng: np.random.Generator, rows: Sequence[Fields], number: int) -> list[Fields]:
    """So many of the rows, or all, in random order.

    Args:
        rng: draws.
        rows: to draw from.
        number: how many, if there are as many.

    Example:
        >>> [row["input"] for row in drawn(np.random.default_rng(0), [{"input": "a"}], 8)]
        ['a']
    """
    return [rows[index] for index in rng.permutation(len(rows))[:number]]


def alternately(rng: np.random.Generator, rows: Sequence[Fields], number: int) -> list[Fields]:
    """Rows drawn at random, alternately with and without an input; more of one kind where there are not enough of the other.

    Args:
        rng: draws.
        rows: to draw from.
        number: how many, if there are as many.

    Example:
        >>> rows = [{"input": text} for text in ("", "", "", "a", "")]
        >>> [row["input"] for row in alternately(np.random.default_rng(0), rows, 4)]
        ['a', '', '', '']
    """
    with_input = [row for row in rows if row["input"]]
    without = [row for row in rows if not row["input"]]
    half = min(len(with_input), (number + 1) // 2)
    rest = min(len(without), number - half)
    pairs = zip_longest(drawn(rng, with_input, number - rest), drawn(rng, without, rest))
    return [row for row in chain.from_iterable(pairs) if row is not None]
