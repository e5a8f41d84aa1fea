"""Whole numbers stay whole where an argument takes whole numbers and fractions.

``limit_train_batches=1`` is one batch and ``1.0`` is all of them. jsonargparse tries the types of a union in their order.
That is not always the order of the source code: Python keeps one ``Optional[Union[int, float]]`` for a whole process, with
the order of the package that was imported first.
"""

from typing import Any

from jsonargparse import _typehints

RANK = "union_subtype_sort_key"
"""jsonargparse's rank of a type among those of a union, by which it tries them."""


def integers_before_fractions() -> None:
    """Make all parsers of this process try int before float."""
    theirs = getattr(_typehints, RANK)
    if isinstance(theirs(int), tuple):
        return

    def rank(subtype: Any) -> tuple[int, bool]:
        return theirs(subtype), subtype is float

    setattr(_typehints, RANK, rank)
