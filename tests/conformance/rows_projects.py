"""Rows."""

from matrix import Row

ROWS: list[Row] = []
