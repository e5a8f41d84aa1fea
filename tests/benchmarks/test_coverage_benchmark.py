"""benchmarks/coverage.py on made-up texts and a tiny encoder: what it counts, and that it does nothing twice."""

import json

import numpy as np
import pytest
import tiny_world
import torch
from sentence_transformers import SentenceTransformer

WORDS = {"letters": ("a", "b", "one"), "claims": ("claim", "other", "0")}


@pytest.fixture(scope="module")
def benchmark(benchmark):
    benchmark.PRIVATE = 4
    return benchmark


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    folder = tmp_path_factory.mktemp("coverage")
    encoder = str(folder / "encoder")
    SentenceTransformer(tiny_world.make_encoder(folder / "bert"), device="cpu").save(encoder)
    options = ["--encoder", encoder, "--cache", str(folder / "cache")]
    options += ["--numbers", "3", "--seeds", "0", "1", "--epochs", "1"]
    options += ["--similarities", str(folder / "x.svg"), "--folder", str(folder / "results")]
    for name, words in WORDS.items():
        texts = [f"{words[i % 3]} {i % 7} {words[i // 20 % 3]} {i // 10 % 10} {i % 10}" for i in range(200)]
        file = tiny_world.write_rows(folder / f"{name}.jsonl", [{"question": text} for text in texts])
        options += ["--domain", name, file, "question"]
    return options, folder


@pytest.fixture(scope="module")
def rows(benchmark, arguments):
    benchmark.main(arguments[0])
    assert (arguments[1] / "x.svg").is_file()
    return [json.loads((arguments[1] / "results" / f"seed{seed}.json").read_text()) for seed in (0, 1)]


def test_coverage_of_each_way(rows):
    for row in [row for of_seed in rows for row in of_seed["coverage"]]:
        assert row["rows_in_domain"] <= 30
        if row["method"] == "none":
            none = row["coverage"]
            assert row["distinct"] == 0
        else:
            assert none <= row["coverage"] <= 1
        if row["method"] == "in domain at random":
            assert row["in_domain"] == 1


def test_words_is_the_mean_of_word_embeddings(benchmark, arguments):
    model = benchmark.words(arguments[0][1])
    weights, texts = model[0].embedding.weight.detach(), ["one other claim", "a b 1 2 3"]
    ids = [model.tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    by_hand = torch.stack([weights[own].mean(dim=0) for own in ids]).numpy()
    np.testing.assert_allclose(model.encode(texts), by_hand, atol=1e-6)


def test_what_is_done_is_not_done_again(benchmark, arguments, rows, monkeypatch, capsys):
    monkeypatch.setattr(benchmark, "run_seed", None)
    benchmark.main(arguments[0])
    out = capsys.readouterr().out
    assert "3 rows for each client" in out
    assert "| FedDCA* (words) | " in out
    with pytest.raises(ValueError, match=r"seed0\.json was made with other options: give another folder"):
        benchmark.main([*arguments[0], "--points", "9"])


def test_a_score_by_hand(benchmark):
    """Of four points at right angles one is private, one is given, and one that is given is of another domain."""
    texts = benchmark.Texts(np.eye(5, dtype=np.float32), np.eye(0), {}, {}, np.arange(0))
    clients, given = {"u": np.array([0])}, {"u": np.array([1, 4])}
    domain = np.arange(4)
    expected = {"coverage": 0.5, "distinct": 1.0, "in_domain": 0.5}
    expected |= {"rows_in_domain": 1.0, "nearly_private": 0.0}
    assert benchmark.score(texts, domain, domain, clients, given) == expected
