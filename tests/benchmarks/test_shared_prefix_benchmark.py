"""benchmarks/shared_prefix.py with a tiny model."""

import pytest
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from fedlight.toy import MODEL


@pytest.mark.slow
def test_both_ways_compute_the_same(benchmark, measured, tmp_path, monkeypatch):
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=len(tokenizer))).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    monkeypatch.setattr(benchmark, "VOCABULARY", len(tokenizer))
    few = ("--sizes=120x20", "--dtypes=fp32", "--steps=1")
    rows = measured(f"--model={tmp_path / 'model'}", *few)["rows"]
    assert [row["work"] for row in rows] == [f"{work}, 120 + 20" for work in benchmark.WORKS]
    for row in rows:
        assert row["apart"] < 1e-4
        assert row["ratio"] == pytest.approx(row["shared"] / row["plain"])
