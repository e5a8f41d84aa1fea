import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from fedlight.devices import hardware
from fedlight.devices.quantization import QuantizedBase
from fedlight.modules.language import base_model

SIZES = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 16, "num_attention_heads": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    """A Llama of 55 M parameters in bf16, 110 MB."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("llama")
    config = LlamaConfig(vocab_size=1000, tie_word_embeddings=True, **SIZES)
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder, max_shard_size="60MB")
    return str(folder)


def load(folder: str, base: str, dtype: str = "bf16"):
    return base_model.load_base(folder, base=base, dtype=dtype, trust_remote_code=False)[0]


def values(network) -> dict[str, torch.Tensor]:
    """All weights, with the scales of quantized ones."""
    found = dict(network.state_dict())
    for name, weight in network.named_parameters():
        if getattr(weight, "quant_state", None) is not None:
            found[f"{name} absmax"] = weight.quant_state.absmax
        if getattr(weight, "SCB", None) is not None:
            found[f"{name} SCB"] = weight.SCB
    return found


@pytest.mark.parametrize(
    ("base", "dtype"), [("int8", "bf16"), ("nf4", "bf16"), ("nf4", "fp32"), ("plain", "fp32")]
)
def test_the_weights_are_those_that_transformers_loads(tiny_model, monkeypatch, base, dtype):
    monkeypatch.setattr(base_model, "PIECE", 1000)  # the embedding is read in pieces
    ours = values(load(tiny_model, base, dtype))
    monkeypatch.setattr(base_model, "_tensor_by_tensor", nullcontext)
    theirs = values(load(tiny_model, base, dtype))
    assert ours.keys() == theirs.keys()
    assert base == "plain" or any(name.endswith((" absmax", " SCB")) for name in ours)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_transformers_opens_files_as_before_afterwards():
    from safetensors import safe_open
    from transformers import modeling_utils

    with pytest.raises(KeyError), base_model._tensor_by_tensor():
        assert modeling_utils.safe_open is not safe_open
        raise KeyError
    assert modeling_utils.safe_open is safe_open


@pytest.mark.parametrize("bits", [8, 4])
def test_copies_that_are_freed_while_twins_are_made_go_back(monkeypatch, bits):
    trims = []
    monkeypatch.setattr(hardware, "TRIM_WEIGHTS", 3 * 64 * 64)
    monkeypatch.setattr(hardware, "return_freed_memory", lambda: trims.append(1))
    layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64).requires_grad_(False) for _ in range(9)))
    base = QuantizedBase(layers)
    base.use(bits)
    assert len(trims) == 2  # after the fourth and the eighth layer
    base.use(16)
    base.use(bits)
    assert len(trims) == 2


IN_A_FRESH_PROCESS = """
import gc, json, os, sys
from pathlib import Path
import torch
from fedlight.devices import hardware
from fedlight.modules.language.base_model import load_base

def memory(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))

def settle(*bases):
    for base in bases:
        load_base(small, base=base, dtype="bf16", trust_remote_code=False)
    gc.collect()
    hardware.return_freed_memory()

def measure(base):
    settle(base)  # a fork begins without the pages of libraries
    Path("/proc/self/clear_refs").write_text("5")  # from now on VmHWM is the peak
    before = memory("VmRSS")
    network = load_base(folder, base=base, dtype="fp32" if base == "plain" else "bf16", trust_remote_code=False)[0]
    peak = memory("VmHWM") - before
    linear = [layer for layer in network.modules() if hasattr(layer, "in_features")]
    weights = sum(layer.in_features * layer.out_features for layer in linear)
    return [base, peak, weights, folder in Path("/proc/self/maps").read_text()]

torch.set_num_threads(1)
small, folder, *bases = sys.argv[1:]
settle(*bases)  # imports
for base in bases:
    if not os.fork():  # each has a process that starts from the same memory
        print(json.dumps(measure(base)), flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.fixture(scope="module")
def peaks(folder, tiny_model) -> dict[str, list]:
    """In a process without memory that earlier tests freed, which would hold some of the weights unseen."""
    command = [sys.executable, "-c", IN_A_FRESH_PROCESS, str(tiny_model), folder, "nf4", "int8", "plain"]
    lines = subprocess.run(command, capture_output=True, check=True).stdout.splitlines()
    return {base: measured for base, *measured in map(json.loads, lines)}


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux, for the peak of memory")
@pytest.mark.parametrize(("base", "bytes_a_weight"), [("nf4", 0.5 + 4 / 64), ("int8", 1), ("plain", 4)])
def test_the_peak_is_the_base_and_a_few_tensors(peaks, base, bytes_a_weight):
    peak, weights, mapped = peaks[base]
    assert not mapped
    assert weights > 50e6
    assert 0.9 * weights * bytes_a_weight < peak < weights * bytes_a_weight + 75e6
    assert base == "plain" or peak < 2 * weights  # a plain base in bf16
