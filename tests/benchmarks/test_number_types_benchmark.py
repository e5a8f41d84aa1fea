"""benchmarks/number_types.py at a tiny size."""

import torch


def test_both_types_are_trained_on_the_same_batches(measured, capsys):
    sources = "toy:votes?num_clients=6&votes_per_client=10", "toy:heldout?num_clients=6&size=24"
    sizes = ("--steps=2", "--wide-steps=2", "--batch=4", "--wide=64")
    found = measured(f"--source={sources[0]}", f"--test-source={sources[1]}", *sizes)
    assert found["level"] == torch.backends.cpu.get_cpu_capability()
    toy, wide = found["bases"].values()
    assert toy.keys() == wide.keys() == {"fp32", "bf16"}
    assert toy["fp32"]["ratio"] == 1
    assert toy["bf16"]["ratio"] > 0
    assert 0 < abs(toy["fp32"]["loss"] - toy["bf16"]["loss"]) < 0.05
    assert "bf16: seconds" in capsys.readouterr().out
