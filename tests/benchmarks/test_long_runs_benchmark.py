"""benchmarks/long_runs.py over few rounds."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def benchmark(monkeypatch):
    spec = importlib.util.spec_from_file_location("long_runs", ROOT / "benchmarks" / "long_runs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "MARKS", (3, 6, 9))
    return module


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_each_mark_has_its_costs_and_all_logs_are_on(benchmark, tmp_path):
    rows = benchmark.measure(6, 2, tmp_path)
    assert [row["round"] for row in rows] == [3, 6]
    assert rows[0].keys() == {
        *("round", "milliseconds", "cpu_milliseconds", "checkpoint_kb", "descriptors", "resident_mib")
    }
    assert all(value > 0 for row in rows for value in row.values())
    assert rows[0]["descriptors"] == rows[1]["descriptors"]
    for name in ("visits.csv", "groups.csv", "clients.csv", "attacks/attacks.csv"):
        assert (tmp_path / name).read_text().splitlines()[-1].startswith(("7,", "8,", "val,7")), name
