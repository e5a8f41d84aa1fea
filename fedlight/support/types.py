"""Types that several rooms share."""

from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
"""Row of a data set as it was read: column -> value, nested or not."""

Rows = Sequence[Row]

Fields = Mapping[str, str]
"""Texts of one example: slot of the template, or ``response``, -> text."""

FieldsByClient = Mapping[str, Sequence[Fields]]
"""Client id -> its examples."""
