import json
import shutil
from pathlib import Path

import bitsandbytes
import pytest
import torch
from adapted import ready
from hub_stub import hub_stub
from huggingface_hub.utils import close_session
from transformers import DbrxConfig

from fedlight.modules.language import base_model, checkpoints
from fedlight.modules.language.adapters import Lora
from fedlight.modules.sft import SFTModule


def one_line(error: BaseException) -> None:
    assert "\n" not in str(error)
    assert error.__suppress_context__


@pytest.mark.parametrize(
    ("folder", "said"), [("nowhere", "there is no such folder"), ("", r"no config\.json")]
)
def test_a_folder_without_a_model(tmp_path, folder, said):
    with pytest.raises(FileNotFoundError, match=said):
        ready(SFTModule(str(tmp_path / folder)))


def test_a_name_that_the_hub_does_not_know(monkeypatch):
    """Of a hub that does not answer see tests/pretrained/test_hub_unreachable.py."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with hub_stub({}) as (address, _, _):
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
        close_session()
        with pytest.raises(OSError, match="neither a folder here nor a model on the hub; check") as raised:
            ready(SFTModule("nobody/no-such-model"))
        one_line(raised.value)
    close_session()


def test_damaged_and_missing_weights(llama, tmp_path):
    folder = Path(shutil.copytree(llama, tmp_path / "damaged"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 7}))
    with pytest.raises(
        ValueError, match=r"down_proj.weight is \(.*\) in its files, and \(.*, 7\) is needed: use"
    ):
        ready(SFTModule(str(folder)))
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(ValueError, match=r"lacks weights.*layers\.2"):
        ready(SFTModule(str(folder)))
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(OSError, match="cannot be loaded") as raised:
        ready(SFTModule(str(folder)))
    one_line(raised.value)


def test_a_misspelt_lora_target(llama):
    with pytest.raises(ValueError, match=r"lora\.targets='v_prj': did you mean 'v_proj'"):
        ready(SFTModule(llama, lora=Lora(targets=["q_proj", "v_prj"])))


def test_the_base_has_no_dropout(bert, tmp_path):
    network, new = base_model.load_base(
        bert, base="plain", dtype="fp32", trust_remote_code=False, num_labels=2
    )
    assert {part.p for part in network.modules() if isinstance(part, torch.nn.Dropout)} == {0.0}
    assert new == ["classifier.bias", "classifier.weight"]
    DbrxConfig(attn_config={"attn_pdrop": 0.5}, resid_pdrop=0.5).save_pretrained(tmp_path)
    config = base_model.read_config(str(tmp_path))
    assert (config.attn_config.attn_pdrop, config.resid_pdrop) == (0.0, 0.0)


def test_fingerprint_is_of_the_values(llama, other_llama):
    options = {"base": "plain", "trust_remote_code": False}
    one, _ = base_model.load_base(llama, dtype="fp32", **options)
    rounded, _ = base_model.load_base(llama, dtype="bf16", **options)
    other, _ = base_model.load_base(other_llama, dtype="fp32", **options)
    assert checkpoints.fingerprint(one, []) == checkpoints.fingerprint(rounded, [])
    assert checkpoints.fingerprint(one, []) != checkpoints.fingerprint(other, [])


def test_nf4_layers_can_be_trained_after_a_validation_on_any_cpu(llama, monkeypatch):
    """Where a CPU has AVX512-BF16, bitsandbytes would pack them for evaluation alone."""
    from bitsandbytes.nn import Linear4bit

    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: True)
    network, _ = base_model.load_base(llama, base="nf4", dtype="fp32", trust_remote_code=False)
    layers = [layer for layer in network.modules() if isinstance(layer, Linear4bit)]
    assert layers
    assert not any(layer.support_avx512bf16_for_cpu for layer in layers)


def test_int8_layers_compute_with_their_weights_after_a_move(llama):
    module = ready(SFTModule(llama, base="int8"))
    layer = next(part for part in module.modules() if isinstance(part, bitsandbytes.nn.Linear8bitLt))
    x = torch.ones(1, layer.in_features)
    before = layer(x)
    module._apply(torch.clone)  # as Module.cuda() and cpu(): the weight lies elsewhere
    assert layer.state.CB.data_ptr() == layer.weight.data_ptr()  # or both would take memory
    assert torch.equal(layer(x), before)
