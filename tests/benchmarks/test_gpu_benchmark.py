"""benchmarks/gpu.py at a tiny size, on any processor."""

import pytest
import torch

pytestmark = pytest.mark.slow  # a whole benchmark


@pytest.mark.filterwarnings("ignore")
def test_all_numbers_of_clients_are_measured(benchmark, measured, monkeypatch, capsys):
    precision = torch.get_float32_matmul_precision()
    monkeypatch.setattr(benchmark, "peak_tflops", lambda: 1e-3)
    found = measured("--tiny")
    torch.set_float32_matmul_precision(precision)
    rows = {row["at_once"]: row for row in found["rows"]}
    assert list(rows) == [1, 2, 4]
    assert rows[1]["speed"] == 1
    assert rows[1]["difference"] == 0
    for row in rows.values():
        assert row["low"] <= row["visits"] <= row["high"]
        assert row["speed"] == row["visits"] / rows[1]["visits"]
        assert row["mfu"] == pytest.approx(row["flops"] * row["visits"] / 1e9)
        assert row["difference"] < 1e-3
    assert "MFU" in capsys.readouterr().out


def test_operations_of_a_visit(benchmark, tmp_path):
    benchmark.save_model(str(tmp_path), benchmark.TINY.shape)
    work, layers = benchmark.TINY, 2
    attention, mlp = [(32, 32), (32, 16), (32, 16), (32, 32)], [(32, 64), (32, 64), (64, 32)]
    texts = work.batch * work.tokens
    base = layers * texts * sum(a * b for a, b in attention + mlp)
    lora = layers * texts * sum(8 * (a + b) for a, b in attention + mlp)
    head = work.batch * (work.tokens // 2) * 32 * 600
    # Forward, and backward of the inputs; of the adapter also of the weights. The first layer's inputs need no gradient.
    least = 2 * (2 * base + 3 * lora + 2 * head) * work.steps
    found = benchmark.visit_flops(str(tmp_path), work)
    assert 0.9 * least < found < 1.2 * least  # attention comes on top
