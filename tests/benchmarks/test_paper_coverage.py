"""The page on the coverage of the papers is complete, and every place that it names exists."""

import re

import pytest
import yaml
from published import papers
from published.measurements import ROOT

from fedlight.conf import path as config_file

RECORD = papers.load()
KINDS = ("system", "table", "figure", "algorithm")


def test_the_page_is_as_the_record_has_it():
    assert papers.PAGE.read_text(encoding="utf-8") == papers.page(), "python benchmarks/reproduce.py render"


@pytest.mark.parametrize("paper", RECORD)
def test_no_table_figure_or_algorithm_is_missing(paper):
    told = RECORD[paper]
    for kind in KINDS[1:]:
        assert [row[0] for row in told[kind]] == list(range(1, told[f"{kind}s"] + 1)), kind
    for kind in ("system", "setting"):
        assert len({row[0] for row in told[kind]}) == len(told[kind]), kind


def test_what_is_named_is_there():
    for row in (row for told in RECORD.values() for kind in KINDS for row in told[kind]):
        _, _, where, state, deviation = row
        assert state in papers.STATES, row
        assert deviation or state != "left out", row
        assert where != "-" or state == "left out", row
        for place in where.split(", "):
            command, _, recipe = place.partition(" run ")
            found = config_file(f"recipes/{recipe}.yaml") if command == "fedlight" else ROOT / place
            assert place == "-" or found.exists(), place


def test_a_value_that_is_not_the_papers_is_explained():
    """On the page for the runs of the paper's size, and at its line in the config of the method alone."""
    for _, paper, large, small, deviation in (row for told in RECORD.values() for row in told["setting"]):
        found = papers.value(large)
        values = (paper, *(paper if isinstance(paper, list) else []))
        assert deviation or found in values or str(found).startswith(f"{paper},"), large
        if (key := papers.KEY.fullmatch(small)) and papers.value(small) != paper:
            assert re.search(r"#.*paper", line_of(key["file"], key["key"])), small


def line_of(file, key):
    """Return the line of a config with a key."""
    text = (ROOT / file).read_text(encoding="utf-8")
    node = yaml.compose(text)
    for piece in key.split("."):
        mark, node = next((k.start_mark, v) for k, v in node.value if k.value == piece)
    return text.splitlines()[mark.line]
