"""benchmarks/wire.py at a tiny size: its shares by hand, its errors against what rounding can lose."""

import pytest
import torch


@pytest.fixture(scope="module")
def report(measured):
    return measured("--hidden", "256", "--layers", "2")


def test_shares(report):
    """Eight tensors of 2,048 values, with at most 160 bytes of header."""
    values, shares = 8 * 2048, {row["codec"]: row["share"] for row in report["rows"]}
    payloads = {
        "fp16": 2 * values + 2 * 8,
        "int8": values + 4 * 8 * 8,
        "nf4": values // 2 + 4 * 8 * 32,
        "top 10 %": 8 * 8 * 205,
        "top 10 %, nf4": 8 * (4 * 205 + 103 + 4 * 4),
    }
    for name, num_bytes in payloads.items():
        assert 0 < shares[name] * report["bytes"] - num_bytes < 240


def test_errors(report):
    rows = {row["codec"]: row for row in report["rows"]}
    assert rows["fp16"]["worst"] < 2**-11 < rows["bf16"]["worst"] < 2**-8 < rows["int8"]["worst"]
    errors = [rows[codec]["error"] for codec in ("int8", "nf4", "top 10 %", "top 1 %, nf4")]
    assert errors == sorted(errors)
    assert errors[-1] < 1
    assert rows["clip, int8"]["error"] == rows["int8"]["error"]
    assert all(row["error"] <= row["worst"] and 0 < row["cosine"] <= 1 for row in report["rows"])


def test_what_is_lost_by_hand(benchmark):
    state = {"v": torch.tensor([3.0, 4.0]), "w": torch.tensor([0.0, 2.0])}
    decoded = {"v": torch.tensor([3.0, 0.0]), "w": torch.tensor([0.0, 2.0])}
    lost = benchmark.lost(state, decoded)
    assert lost["error"] == pytest.approx(0.4)  # the mean of 0.8 and 0
    assert lost["worst"] == pytest.approx(0.8)
    assert lost["cosine"] == pytest.approx(13 / (29 * 13) ** 0.5)
