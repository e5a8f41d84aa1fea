"""Texts of rows as their source has them, fit for a tokenizer."""

import pytest

from fedlight.datamodules.rows.columns import text_at
from fedlight.support.hub import load_tokenizer


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("cut \ud83d", "cut \ufffd"),
        (["\ude00 cut", "whole"], "\ufffd cut\n\nwhole"),
        ("\ud83d\ude00", "\U0001f600"),
        (" gr\u00fc\u00df \U0001f600 ", "gr\u00fc\u00df \U0001f600"),
    ],
)
def test_half_characters_are_replaced(value, text, causal):
    assert text_at({"a": value}, "a") == text
    assert load_tokenizer(causal)(text_at({"a": value}, "a")).input_ids
