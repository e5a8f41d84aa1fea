"""benchmarks/long_runs.py over few rounds."""

import pytest


@pytest.fixture
def benchmark(benchmark, monkeypatch):
    monkeypatch.setattr(benchmark, "MARKS", (3, 6, 9))
    return benchmark


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_each_mark_has_its_costs_and_all_logs_are_on(benchmark, tmp_path):
    rows = benchmark.measure(6, 2, tmp_path)
    assert [row["round"] for row in rows] == [3, 6]
    costs = {"milliseconds", "cpu_milliseconds", "checkpoint_kb", "descriptors", "resident_mib"}
    assert rows[0].keys() == {"round", *costs}
    assert all(value > 0 for row in rows for value in row.values())
    assert rows[0]["descriptors"] == rows[1]["descriptors"]
    for name in ("visits.csv", "groups.csv", "clients.csv", "attacks/attacks.csv"):
        assert (tmp_path / name).read_text().splitlines()[-1].startswith(("7,", "8,", "val,7")), name
