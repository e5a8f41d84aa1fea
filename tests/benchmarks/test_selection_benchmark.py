"""benchmarks/selection.py at a tiny size: the paper's way chooses the same, and the fitted exponent is right."""

import pytest


def test_growth(benchmark):
    assert benchmark.growth([10, 100, 200, 400], [9.0, 1.0, 4.0, 16.0]) == pytest.approx(2)  # 10 is too small
    assert benchmark.growth([100, 1000], [1.0, 10.0]) == pytest.approx(1)
    assert benchmark.growth([10, 100], [1.0, 10.0]) != benchmark.growth([10, 100], [1.0, 10.0])  # nan


def test_rows(benchmark, measured, capsys):
    sizes = ["--clients", "10", "100", "200", "--paper_limit", "100", "--dimension", "8", "--centers", "4"]
    *rows, growth = measured(*sizes)["rows"]
    assert [(row["clients"], row["same"]) for row in rows] == [(10, 1.0), (100, 1.0), (200, None)]
    assert all(row["seconds"] > 0 for row in rows)
    assert growth["clients"] == "growth"
    assert growth["exponent"] == benchmark.growth([100, 200], [rows[1]["seconds"], rows[2]["seconds"]])
    assert "| 200 |" in capsys.readouterr().out
