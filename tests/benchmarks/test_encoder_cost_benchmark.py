"""benchmarks/encoder_cost.py on a tiny encoder: what the smaller ones are made of, and that their folders load."""

import numpy as np
import pytest
import tiny_world
import torch

from fedlight.datamodules.vectors.encoders import SentenceEncoder
from fedlight.evaluation.alignment import unit

TEXTS = ["one other claim", "a b 1 2 3", "claim 4"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_world.make_encoder(tmp_path_factory.mktemp("encoder"))


def test_it_makes_and_measures_smaller_encoders(measured, folder, tmp_path, capsys):
    texts = [{"question": f"claim {i} {j}"} for i in range(10) for j in range(2)]
    source = tiny_world.write_rows(tmp_path / "rows.jsonl", texts)
    options = ["--layers", "1", "--texts", "12", "--repetitions", "1", "--make", str(tmp_path / "made")]
    report = measured(*options, "--model", folder, "--source", source)
    whole, cut, words = report["rows"]
    assert report["texts"] == 12
    assert whole["parameters_ratio"] == whole["speed_ratio"] == 1
    assert words["parameters"] == 19 * 16  # of word embeddings alone
    of_layer = 4 * (16 * 16 + 16) + 2 * 16 * 32 + 32 + 16 + 4 * 16
    assert whole["parameters"] - cut["parameters"] == 5 * of_layer
    assert "| cut to 1 layers | 16 |" in capsys.readouterr().out
    for name in ("cut", "words"):
        vectors = SentenceEncoder(str(tmp_path / "made" / name), cache=None).encode(TEXTS)
        assert vectors.shape == (3, 16)
        np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)


def test_words_is_the_mean_of_word_embeddings(benchmark, folder):
    model = benchmark.load(folder)
    weights = model[0].auto_model.get_input_embeddings().weight.detach()
    ids = [model.tokenizer(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    by_hand = torch.stack([weights[own].mean(dim=0) for own in ids]).numpy()
    found = benchmark.words(folder).encode(TEXTS, show_progress_bar=False)
    np.testing.assert_allclose(unit(found), unit(by_hand), atol=1e-6)


def test_cut_stops_after_its_layers(benchmark, folder):
    whole, cut = benchmark.load(folder), benchmark.cut(folder, 2)
    batch = whole.tokenizer(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        states = whole[0].auto_model(**batch, output_hidden_states=True).hidden_states[2]
        torch.testing.assert_close(cut[0].auto_model(**batch).last_hidden_state, states)
    with pytest.raises(ValueError, match="--layers 6: the encoder has 6, give a number from 1 to 5"):
        benchmark.cut(folder, 6)


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
    large, small = measured("--shapes", "--source", rows, "--repetitions", "1")["rows"]
    assert (large["dimension"], small["dimension"], large["speed_ratio"]) == (16, 8, 1)
    assert small["parameters_ratio"] == large["parameters"] / small["parameters"]
