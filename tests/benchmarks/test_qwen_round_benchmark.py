"""benchmarks/qwen_round.py at a tiny size."""

import pytest
import torch

TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.fixture(scope="module")
def benchmark(benchmark):
    benchmark.SHAPE |= {**TINY, "vocab_size": 600}
    benchmark.TOKENS = 16
    return benchmark


@pytest.fixture(scope="module")
def folder(benchmark, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("qwen"))
    benchmark.save_model(folder)
    return folder


@pytest.mark.filterwarnings("ignore")
def test_every_form_trains_a_round(benchmark, folder):
    rows = {form: benchmark.measure(folder, form) for form in benchmark.FORMS}
    layers = 2 * (64 * 64 * 2 + 2 * 64 * 32 + 3 * 64 * 128)
    others = 600 * 64 + 5 * 64 + 2 * (64 + 2 * 32)  # embeddings, norms, biases of q, k and v
    bits = {"fp32": 32, "bf16": 16, "int8": 8, "nf4": 4.5}
    for form, row in rows.items():
        scales = 4 * 2 * (2 * 64 + 2 * 32 + 2 * 128 + 64) if form == "int8" else 0
        base = layers * bits[form] / 8 + scales + others * (4 if form == "fp32" else 2)
        assert row["plan_base_gib"] == pytest.approx(base / 2**30)
        assert row["plan_gib"] > row["plan_base_gib"]
        # The kernel counts resident pages in batches of 64 a thread, so the highest number may seem to fall by a few.
        assert row["peak_gib"] >= row["loading_gib"] >= -64 * 4096 * torch.get_num_threads() / 2**30
        assert row["round_seconds"] > 0
        assert row["load_seconds"] > 0
    alone = benchmark.measure(folder, "bf16", "forward")
    whole = rows["bf16"]
    assert whole["plan_base_gib"] == alone["plan_base_gib"] < alone["plan_gib"] < whole["plan_gib"]
