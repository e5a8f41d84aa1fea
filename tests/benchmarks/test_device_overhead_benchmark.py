"""benchmarks/device_overhead.py at a tiny size: it runs, and refuses runs that cannot be compared."""

import time

import pytest
import torch

INSIDE = ("inside_seconds", "inside_ratio")


def arguments(model):
    source = "toy:votes?num_clients=6&votes_per_client=10"
    settings = {"model": model, "source": source, "rounds": 2, "pairs": 1}
    settings |= {"clients-per-round": 2, "local-steps": 1, "batch-size": 4, "steps": 1}
    return [text for name, value in settings.items() for text in (f"--{name}", str(value))]


def test_both_tables(measured, tiny_model, capsys):
    found = measured(*arguments(tiny_model))
    emulation = found["emulation"]
    assert emulation.keys() == {"run_seconds", "round_seconds", "run_ratio", "round_ratio", *INSIDE}
    assert 0 < emulation["round_seconds"] < emulation["run_seconds"]
    run = emulation["inside_seconds"] / (1 - 1 / emulation["inside_ratio"])  # with one pair, the very run
    assert 0 < emulation["inside_seconds"] < run
    assert run == pytest.approx(emulation["run_ratio"] * emulation["run_seconds"])
    assert all(0.1 < emulation[name] < 10 for name in ("run_ratio", "round_ratio"))
    assert [row["bits"] for row in found["base"]] == [16, 8, 4]
    assert found["base"][0]["step_ratio"] == 1
    assert all(row["first_seconds"] > 1e-6 * row["switch_microseconds"] for row in found["base"][1:])
    out = capsys.readouterr().out
    assert f"run      {emulation['run_seconds']:27.2f}   {emulation['run_ratio']:.3f}" in out


def test_dropouts_and_other_weights_cannot_be_compared(benchmark, tiny_model, monkeypatch):
    monkeypatch.setitem(benchmark.DEVICE, "memory_gib", 0.0001)
    with pytest.raises(RuntimeError, match="a device dropped out"):
        benchmark.main(arguments(tiny_model))
    with pytest.raises(RuntimeError, match="bit for bit"):
        benchmark.check_equal({"a": torch.ones(2)}, {"a": torch.tensor([1.0, 1.0000001])})


def test_time_inside(benchmark):
    class Worker:
        def __init__(self):
            self._burn()

        def work(self):
            self._burn()

        def _burn(self):
            end = time.process_time() + 0.02
            while time.process_time() < end:
                pass

    with benchmark.time_inside(Worker) as seconds:
        worker = Worker()
        worker.work()
    worker.work()
    assert len(seconds) == 2
    assert all(0.02 <= each < 1 for each in seconds)
