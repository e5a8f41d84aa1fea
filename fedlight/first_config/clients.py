"""Which column says whose row it is.

Its name speaks for it; else it has several values, each in several rows, and does not merely follow from the question.
"""

from collections.abc import Sequence

import numpy as np

from fedlight.first_config.columns import Column, Guess, GuessError, ambiguous, score_name
from fedlight.support.words import count_noun

NOBODY = "none"  # --client of rows without an owner, which are dealt out at random
SHARES = 10  # most clients among whom such rows are dealt out
FEWEST_ROWS = 4  # of such a client, at least


def find_client(columns: Sequence[Column], taken: Sequence[str], given: str | None) -> Guess:
    """Return the column of the clients; its value is None where there is none, and rows are dealt out.

    Columns in ``taken`` have another role; ``given`` is the one that the user named, or ``"none"``. Raises GuessError where
    several columns could be it, and no name speaks for one.

    Examples:
        >>> from fedlight.first_config.columns import describe
        >>> rows = [{"q": q, "worker": w, "id": q} for q in "abc" for w in "uv"]
        >>> find_client(describe(rows), ["q"], None).value
        'worker'
    """
    if given == NOBODY:
        return Guess("client", None, "--client none: rows are dealt out at random")
    if given is not None:
        return Guess("client", given, "given with --client")
    asked = [column for column in columns if column.name in taken]
    # Neither an id of each row nor a text.
    likely = [
        column
        for column in columns
        if column.name not in taken and 2 <= column.distinct <= column.filled.sum() / 2 and column.words < 0.9
    ]
    scores = [score_name(column.name, "client") for column in likely]
    best = max(scores, default=0)
    if best:
        could_be = [column for column, score in zip(likely, scores, strict=True) if score == best]
    else:  # an id of a question has one value wherever the question is; a voter has not
        could_be = [column for column in likely if not follows(column, asked)]
    if len(could_be) > 1:
        names = ambiguous("client", [column.name for column in could_be])
        raise GuessError(f"{names}, or --client none where rows are nobody's")
    if not could_be:
        reason = "no column says whose row it is: rows are dealt out at random; --client COLUMN names one"
        return Guess("client", None, reason, sure=False)
    (column,) = could_be
    low, high = min(column.counts), max(column.counts)
    rows = f"{f'{low:,} to ' if low < high else ''}{count_noun(high, 'row')} each"
    has = f"{column.distinct:,} values with {rows}"
    reason = f"its name, and {has}" if best else f"it has {has}, and does not follow from the text"
    # A score of 2 is that of a weak word, such as source.
    return Guess("client", column.name, reason, sure=best > 2)


def follows(column: Column, asked: Sequence[Column]) -> bool:
    """Return whether a column has one value wherever the asked columns are the same; False if these hardly repeat.

    Examples:
        >>> q, u = Column.of("q", list("aabb")), Column.of("u", list("1212"))
        >>> follows(q, [q]), follows(u, [q])
        (True, False)
    """
    rows = len(column.codes)
    index = {text: place for place, text in enumerate({text for other in asked for text in other.different})}
    # The same text has the same number in all columns; [asked columns][rows].
    codes = [np.array([index[text] for text in other.different])[other.codes] for other in asked]
    keys = np.zeros(rows, dtype=np.int64)
    # Sorted in each row, since the same two answers in the other order are the same comparison.
    for codes_in_order in np.sort(np.array(codes, dtype=np.int64).reshape(len(asked), rows), axis=0):
        # Numbered anew after each column, so that the product does not overflow.
        keys = np.unique(keys * len(index) + codes_in_order, return_inverse=True)[1]
    different = int(keys.max()) + 1
    with_values = np.unique(keys * len(column.different) + column.codes)
    # Where hardly any question is asked twice, every column follows from it, and that says nothing.
    return len(with_values) == different and (rows - different) * 10 >= rows
