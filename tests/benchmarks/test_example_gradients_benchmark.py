"""benchmarks/example_gradients.py at a tiny size."""

import pytest


@pytest.mark.parametrize("base", ["plain", "nf4"])
def test_both_ways_find_what_the_loop_finds(benchmark, measured, monkeypatch, base):
    """The memory is left out: a process of its own for each way takes half a minute."""
    monkeypatch.setattr(benchmark, "_elsewhere", lambda *_: 1.0)
    sizes = {"hidden": 64, "vocabulary": 200, "layers": 1, "rank": 2, "batch": 3, "repeats": 1}
    sizes["dimension"] = 64
    options = [text for name, value in sizes.items() for text in (f"--{name}", str(value))]
    rows = {row["way"]: row for row in measured("--tokens", "12", "--base", base, *options)["rows"]}
    func = {"func"} if base == "plain" else set()
    assert rows.keys() == {"loop", "layers", "training", "projection"} | func
    # LoRA of rank 2 on four square layers and three of the feed-forward network.
    assert rows["loop"]["weights"] == 2 * (4 * 2 * 64 + 3 * (64 + 64 * 8 // 3))
    assert all(row["seconds"] > 0 for row in rows.values())
    for way in ("layers", *func):
        assert 0 < rows[way]["error"] < 1e-4
