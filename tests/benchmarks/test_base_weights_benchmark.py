"""benchmarks/base_weights.py: 16 bits are two bytes for each weight of the architecture."""

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

ROOT = Path(__file__).resolve().parents[2]


def test_bytes_of_the_weights(measured):
    (row,) = measured("--shapes", "qwen2_0.5b")["rows"]
    shape = AutoConfig.from_pretrained(ROOT / "conf/shapes/qwen2_0.5b")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16)
    assert row["bits_16"] == sum(weight.nbytes for weight in model.parameters()) / 2**30
    assert row["bits_16"] > row["bits_8"] > row["bits_16"] / 2  # embeddings stay as they are
    assert row["bits_8"] > row["bits_4"] > row["bits_16"] / 4
