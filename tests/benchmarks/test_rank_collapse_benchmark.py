"""benchmarks/rank_collapse.py with few rounds: what collapses, and what does not."""

import pytest


@pytest.fixture(scope="module")
def rows(measured):
    """The last round of each method."""
    return {row["method"]: row for row in measured("--rounds", "3")["rows"] if row["round"] == "3"}


def test_averages_over_all_collapse_to_the_smallest_rank_and_those_over_holders_do_not(rows):
    """Three quarters of what is looked for lie beyond it."""
    for method in ("zero-padding", "HetLoRA", "FlexLoRA, smallest rank"):
        assert rows[method]["energy"] < 0.05
        assert rows[method]["loss"] > 0.7
    assert rows["HetLoRA"]["energy"] < rows["FlexLoRA"]["energy"] < 0.2
    for method in ("zero-padding, over holders", "FlexLoRA, over holders"):
        assert 0.4 < rows[method]["energy"] < rows["FlexLoRA, largest rank"]["energy"] < 0.75
        assert rows["FlexLoRA, largest rank"]["loss"] < rows[method]["loss"] < 0.5 * rows["FlexLoRA"]["loss"]
