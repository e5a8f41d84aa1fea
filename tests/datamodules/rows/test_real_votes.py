"""Measurements on the real votes; FEDLIGHT_SHARED names a folder that has data/ukpconvarg/."""

import os
from pathlib import Path

import pytest

from fedlight.datamodules.preferences.datamodule import PreferenceDataModule
from fedlight.datamodules.preferences.format import Format
from fedlight.datamodules.rows.exclusion import Holdout
from fedlight.datamodules.rows.rows import load_rows
from fedlight.datamodules.rows.split import Split
from fedlight.datamodules.rows.votes import read_votes

SHARED = os.environ.get("FEDLIGHT_SHARED")
FOLDER = Path(SHARED or "") / "data" / "ukpconvarg"
pytestmark = pytest.mark.skipif(not SHARED, reason="FEDLIGHT_SHARED is not set")
COLUMNS = {"client": "worker"}


def test_counts():
    columns = {name: name for name in ("prompt", "response_a", "response_b", "choice")} | COLUMNS
    values = {"a": "a", "b": "b", "tie": "tie"}
    votes = read_votes(load_rows(str(FOLDER / "votes.jsonl.gz")), columns, values, ("prompt",), "votes")
    counts = votes.counts
    assert (counts.rows, counts.ties, counts.missing) == (43715, 9832, 0)
    left_out = counts.ties + counts.missing + counts.identical + counts.duplicates
    assert counts.votes == counts.rows - left_out
    assert len(set(votes.clients)) == 320


def test_little_is_padded_and_debates_are_held_out(encoder, any_text):
    held = Holdout("topic", ["tv-is-better-than-books_*"])
    settings = {"split": Split(test_source=str(FOLDER / "gold.jsonl.gz"), holdout=held), "columns": COLUMNS}
    settings |= {"format": Format(form="pair"), "tokenizer": encoder, "batch_size": 16}
    module = PreferenceDataModule(str(FOLDER / "votes.jsonl.gz"), **settings)
    module.setup("fit")
    module.setup("test")
    assert len(module.client_indices) == 320
    assert module.report.padding < 0.10 < 0.30 < module.report.padding_unsorted
    assert min(module.client_sizes().values()) >= 2
