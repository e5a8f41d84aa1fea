import shutil

import numpy as np
import pytest
import tiny_world
import torch

from fedlight.datamodules.vectors import HashedEncoder, SentenceEncoder
from fedlight.datamodules.vectors import encoders as encoders_file

TEXTS = ["one claim 7 b a 3", "one", "one claim or other 5 6 7 8 9", "", "other 4"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny random BERT as a sentence-transformers model."""
    from sentence_transformers import SentenceTransformer

    base = tmp_path_factory.mktemp("encoder")
    SentenceTransformer(tiny_world.make_encoder(base / "bert"), device="cpu").save(str(base / "sentences"))
    return base / "sentences"


@pytest.fixture
def encoded(monkeypatch):
    """Batches that reach the model, in order."""
    batches, encode = [], SentenceEncoder._encode_batch
    monkeypatch.setattr(
        SentenceEncoder, "_encode_batch", lambda own, texts: batches.append(list(texts)) or encode(own, texts)
    )
    return batches


@pytest.fixture
def make(folder, tmp_path):
    return lambda **settings: SentenceEncoder(str(folder), **{"cache": str(tmp_path / "cache"), **settings})


def test_vectors_are_the_models_own(make, folder):
    from sentence_transformers import SentenceTransformer

    expected = SentenceTransformer(str(folder), device="cpu").encode(TEXTS, normalize_embeddings=True)
    vectors = make(batch_size=2).encode(TEXTS)
    np.testing.assert_allclose(vectors, expected, atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)
    assert vectors.dtype == np.float32
    assert not np.allclose(vectors[0], vectors[1], atol=1e-3)


def test_each_text_once_and_batches_by_length(make, encoded):
    encoder = make(batch_size=2, cache=None)
    vectors = encoder.encode([*TEXTS, *reversed(TEXTS)])
    assert encoded == [[TEXTS[2], TEXTS[0]], [TEXTS[4], TEXTS[1]], [TEXTS[3]]]
    np.testing.assert_array_equal(vectors[:5], vectors[:4:-1])


def test_a_second_run_encodes_nothing_and_loads_no_model(make, encoded, folder, tmp_path):
    first = make().encode(TEXTS)
    encoded.clear()
    moved = shutil.copytree(folder, tmp_path / "elsewhere" / "other name")
    for encoder in (make(), SentenceEncoder(str(moved), cache=str(tmp_path / "cache"), batch_size=1)):
        np.testing.assert_array_equal(encoder.encode(TEXTS[::-1]), first[::-1])
        assert encoder.dimension == first.shape[1]
        assert encoder._network is None
    assert encoded == []


def test_an_interrupted_encoding_goes_on(make, monkeypatch):
    monkeypatch.setattr(encoders_file, "CACHED_AT_ONCE", 4)
    texts = [f"one claim {number} a" for number in range(10)]
    original, done = SentenceEncoder._encode_batch, []

    def stops(self, batch):
        if len(done) == 8:
            raise KeyboardInterrupt
        done.extend(batch)
        return original(self, batch)

    monkeypatch.setattr(SentenceEncoder, "_encode_batch", stops)
    with pytest.raises(KeyboardInterrupt):
        make(batch_size=2).encode(texts)
    assert len(done) == 8
    done.clear()
    vectors = make(batch_size=2).encode(texts)
    assert sorted(done) == texts[8:]
    monkeypatch.undo()
    np.testing.assert_allclose(vectors, make(cache=None).encode(texts), atol=1e-6)


def test_what_was_damaged_is_said_and_encoded_again(make, encoded):
    encoder = make()
    first = encoder.encode(TEXTS)
    (file,) = encoder._cache.folder.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1])
    encoded.clear()
    with pytest.warns(UserWarning, match=r"1 damaged files .* were removed; their texts are encoded again"):
        np.testing.assert_allclose(make().encode(TEXTS), first, atol=1e-6)
    assert sum(map(len, encoded)) == 5


def test_identity_is_of_the_content_and_of_what_is_read(make, folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    assert SentenceEncoder(str(copy)).identity == make().identity
    assert make(max_tokens=5).identity != make().identity
    (copy / "README.md").write_text("other words")
    assert SentenceEncoder(str(copy)).identity == make().identity
    weights = copy / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert SentenceEncoder(str(copy)).identity != make().identity


def test_max_tokens_cuts(make):
    short, long = make(max_tokens=4, cache=None).encode(["one claim 4 5", "one claim 6 7 8 9"])
    np.testing.assert_allclose(short, long, atol=1e-6)  # [CLS] one claim [SEP]


def test_loading_draws_no_random_numbers_and_release_forgets_the_model(make):
    state = torch.random.get_rng_state()
    encoder = make(cache=None)
    vectors = encoder.encode(TEXTS)
    assert torch.equal(state, torch.random.get_rng_state())
    encoder.release()
    assert encoder._network is None
    np.testing.assert_array_equal(encoder.encode(TEXTS), vectors)


def test_no_texts(make):
    assert make().encode([]).shape == (0, make().dimension)


def test_nothing_is_written_to_a_log(make, capfd):
    make(cache=None).encode(TEXTS)
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")


def test_settings_that_are_refused(make, folder, tmp_path):
    with pytest.raises(ValueError, match="batch_size=0"):
        make(batch_size=0)
    with pytest.raises(ValueError, match="max_tokens=2"):
        make(max_tokens=2)
    with pytest.raises(ValueError, match=r"max_tokens=100000: model=.* reads \d+ tokens at most"):
        make(max_tokens=100_000).encode(TEXTS)
    with pytest.raises(ValueError, match="dimension=0"):
        HashedEncoder(dimension=0)
    for place, complaint in (("none/where", "there is no such folder"), ("", r"has no modules\.json")):
        with pytest.raises(FileNotFoundError, match=complaint):
            SentenceEncoder(str(tmp_path / place)).encode(TEXTS)
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(OSError, match="cannot be loaded"):
        SentenceEncoder(str(copy), cache=None).encode(TEXTS)
    (copy / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no \.safetensors file"):
        SentenceEncoder(str(copy), cache=None).encode(TEXTS)


def test_an_unreachable_hub_is_one_line(monkeypatch, tmp_path):
    def unreachable(name, local_files_only=False, **_):
        raise FileNotFoundError("not cached") if local_files_only else ConnectionError("no route\nto host")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    with pytest.raises(OSError, match=r"no folder here, .* reached \(ConnectionError\)") as caught:
        SentenceEncoder("owner/name", cache=str(tmp_path)).encode(TEXTS)
    assert "\n" not in str(caught.value)


def test_a_cached_hub_model_is_found_without_the_hub(folder, monkeypatch):
    def cached(name, local_files_only=False, **_):
        assert local_files_only
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", cached)
    assert SentenceEncoder("owner/name").identity == SentenceEncoder(str(folder)).identity


def counted_features(text):
    """Words and pairs by a loop, weighted 1 + ln(count)."""
    words = text.lower().replace(".", " ").split()
    features = [*words, *(f"{words[place]} {words[place + 1]}" for place in range(len(words) - 1))]
    return {feature: 1 + np.log(features.count(feature)) for feature in features}


def test_hashed_similarity_is_that_of_the_counts():
    """With many more dimensions than words hardly any collide, so a cosine is that of the plain counts."""
    one, other = "the cat and the dog saw the cat.", "The Dog saw nothing"
    first, second = counted_features(one), counted_features(other)
    dot = sum(value * second.get(feature, 0) for feature, value in first.items())
    lengths = [np.sqrt(sum(value**2 for value in counts.values())) for counts in (first, second)]
    vectors = HashedEncoder(dimension=2**20).encode([one, other])
    assert vectors[0] @ vectors[1] == pytest.approx(dot / np.prod(lengths), abs=1e-6)
    assert dot > 0


def test_hashed_vectors_are_unit_and_signed():
    texts = [" ".join(f"w{(3 * number + step) % 500}" for step in range(12)) for number in range(300)]
    vectors = HashedEncoder(dimension=64).encode([*texts, "", "?!", "x" * 5000])
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)
    np.testing.assert_array_equal(vectors[300], vectors[301])
    assert abs(vectors[:300].mean()) < 0.02  # signs cancel
    np.testing.assert_array_equal(vectors[0], HashedEncoder(dimension=64).encode(texts[:1])[0])


def test_words_that_cancel_have_a_vector_too():
    texts = [f"w{a} w{b}" for a in range(9) for b in range(a)]
    np.testing.assert_array_equal(np.abs(HashedEncoder(1, word_pairs=False).encode(texts)), 1)


def test_settings_of_the_hash_are_its_identity():
    settings = [{}, {"seed": 1}, {"dimension": 100}, {"word_pairs": False}]
    encoders = [HashedEncoder(**setting) for setting in settings]
    assert len({encoder.identity for encoder in encoders}) == 4
    assert [encoder.dimension for encoder in encoders] == [384, 384, 100, 384]
    one, other = (encoder.encode(["the cat sat"])[0] for encoder in encoders[:2])
    assert not np.allclose(one, other)
    plain, turned = HashedEncoder(word_pairs=False).encode(["cat sat", "sat cat"])
    np.testing.assert_array_equal(plain, turned)


def test_hashes_are_the_same_in_every_process():
    """Python's own hash of a text is another one in each, so also in each run of this test."""
    vector = HashedEncoder(8).encode(["the cat sat"])[0]
    assert vector.tolist() == pytest.approx([-0.378, 0, -0.378, 0, -0.378, 0, -0.756, 0], abs=1e-3)
