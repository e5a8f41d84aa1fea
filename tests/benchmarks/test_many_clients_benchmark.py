"""benchmarks/many_clients.py at a tiny size."""

import json

import pytest


@pytest.fixture
def benchmark(benchmark, monkeypatch):
    for name, value in {"WIDTH": 8, "RANK": 2, "EXAMPLES": 64, "BATCH": 4, "LIMIT_MIB": 0}.items():
        monkeypatch.setattr(benchmark, name, value)
    return benchmark


@pytest.mark.parametrize("method", ["scaffold", "fedbiscuit"])
def test_what_is_measured(benchmark, method, capsys):
    benchmark.main([f"--only={method}", "--clients=8", "--rounds=3"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["peak_mib"] > 50
    assert min(found["round"], found["checkpoint_mib"], found["tables_mib"]) > 0
    if method == "scaffold":
        bytes_of_all = 8 * 4 * benchmark.LAYERS * 2 * benchmark.WIDTH * benchmark.RANK
        assert found["memories_mib"] * 2**20 > bytes_of_all
    else:
        assert 0 < found["grouping"] < found["round"]
        assert found["memories_mib"] == 0
