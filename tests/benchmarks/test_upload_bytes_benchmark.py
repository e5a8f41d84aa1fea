"""benchmarks/upload_bytes.py: fp32 is the adapter as a safetensors file, and coarser numbers take their part of it."""

import pytest


def test_bytes_of_the_selectors_adapter(benchmark, measured, monkeypatch):
    wires = {name: benchmark.WIRES[name] for name in ("fp32", "fp16", "NF4, and int8 down")}
    monkeypatch.setattr(benchmark, "WIRES", wires)
    whole, half, both = measured()["rows"]
    header = 20_000  # bytes at most: names and places of the tensors
    assert 2 * half["bytes"] == pytest.approx(whole["bytes"], abs=header)
    assert half["bytes_down"] == whole["bytes_down"] == whole["bytes"]
    assert both["bytes"] < both["bytes_down"] < half["bytes"]
    assert whole["times_less"] == 1
    assert half["times_less"] == whole["bytes"] / half["bytes"]
