"""benchmarks/encoder_cost.py: the size of its shapes, and what it measures of tiny ones."""

import tiny_world
import torch


def test_the_shapes_are_as_large_as_the_papers_encoders(benchmark):
    """Table 4 of FedDCA has 335 M and 22.7 M parameters; a vector is the mean over a text's own tokens."""
    with torch.device("meta"):
        sizes = {
            name: sum(weight.numel() for weight in benchmark.Shape(*shape).parameters())
            for name, shape in benchmark.SHAPES.items()
        }
    assert sizes == {"bge-large-en-v1.5": 335_141_888, "all-MiniLM-L6-v2": 22_713_216}
    asked = []
    tiny = benchmark.Shape(8, 1, 2)
    tiny.network.register_forward_pre_hook(lambda _, given, named: asked.append(named), with_kwargs=True)
    assert tiny.encode(["one two.", "a b c d e"], batch_size=2).shape == (2, 8)
    assert asked[0]["attention_mask"].sum(dim=1).tolist() == [5, 7]


def test_shapes_are_measured(benchmark, measured, monkeypatch, tmp_path):
    rows = tiny_world.write_rows(tmp_path / "rows.jsonl", [{"question": f"claim {i}"} for i in range(10)])
    monkeypatch.setattr(benchmark, "SHAPES", {"large": (16, 2, 2), "small": (8, 1, 2)})
    large, small = measured("--source", rows, "--repetitions", "1")["rows"]
    assert (large["dimension"], small["dimension"], large["speed_ratio"]) == (16, 8, 1)
    assert small["parameters_ratio"] == large["parameters"] / small["parameters"]
