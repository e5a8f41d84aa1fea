import errno
import json
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from safetensors.numpy import load, save

from fedlight.datamodules.vectors import embedding_cache as cache_file
from fedlight.datamodules.vectors.embedding_cache import EmbeddingCache, text_keys

TEXTS = [f"text {number}" for number in range(10)]
VECTORS = np.random.default_rng(0).normal(size=(10, 4)).astype(np.float32)


@pytest.fixture
def cache(tmp_path):
    """Two files, of six and of four texts."""
    cache = EmbeddingCache(tmp_path, "model x")
    cache.add(TEXTS[:6], VECTORS[:6])
    cache.add(TEXTS[6:], VECTORS[6:])
    return cache


def again(cache):
    """The same cache, as another process sees it."""
    return EmbeddingCache(cache.folder.parent, cache.identity)


def files(cache):
    return sorted(cache.folder.glob("*.safetensors"), key=lambda file: -file.stat().st_size)


def test_what_was_added_is_found_bit_for_bit_in_any_order(cache):
    order = np.random.default_rng(1).permutation(10)
    vectors, known = again(cache).find([TEXTS[row] for row in order])
    assert known.all()
    np.testing.assert_array_equal(vectors, VECTORS[order])
    assert vectors.dtype == np.float32


def test_known_and_unknown_texts(cache):
    vectors, known = cache.find(["new", TEXTS[7], "", TEXTS[0]])
    assert known.tolist() == [False, True, False, True]
    np.testing.assert_array_equal(vectors[known], VECTORS[[7, 0]])
    assert cache.find(["new", "newer"]) is None
    assert cache.find([]) is None


def test_another_identity_sees_nothing(cache):
    other = EmbeddingCache(cache.folder.parent, "model y")
    assert other.find(TEXTS) is None
    assert other.dimension() is None
    assert again(cache).dimension() == 4
    assert (cache.folder / "encoder.txt").read_text() == "model x\n"


def test_identities_that_look_alike_in_a_file_name_are_kept_apart(tmp_path):
    names = ("a b", "a/b", "a?b", "x" * 50, "x" * 51)
    assert len({EmbeddingCache(tmp_path, name).folder for name in names}) == 5


def test_nothing_is_made_before_something_is_added(tmp_path):
    assert EmbeddingCache(tmp_path / "none", "x").find(TEXTS) is None
    assert not (tmp_path / "none").exists()


def place(content, name):
    """Where a tensor of a safetensors file begins."""
    header = 8 + int.from_bytes(content[:8], "little")
    return header + json.loads(content[8:header])[name]["data_offsets"][0]


def turned(content, at):
    return content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :]


def turned_vector(content):
    return turned(content, place(content, "vectors") + 7)


def zeros(content):
    begin, end = place(content, "vectors"), place(content, "vectors") + 6 * 4 * 4
    return content[:begin] + bytes(end - begin) + content[end:]


HARMS = {
    "cut in vectors": lambda content: content[: place(content, "vectors") + 5],
    "cut in keys": lambda content: content[: place(content, "keys") + 5],
    "cut in header": lambda content: content[:10],
    "empty": lambda content: b"",
    "longer": lambda content: content + b"\0",
    "turned vector": turned_vector,
    "turned key": lambda content: turned(content, place(content, "keys") + 3),
    "another checksum": lambda content: turned(content, content.index(b'"vectors":"') + 11),
    "no checksum": lambda content: save(load(content)),
    "zeros": zeros,
}


@pytest.mark.parametrize("harm", HARMS.values(), ids=HARMS)
def test_damage_costs_the_texts_of_one_file(cache, harm):
    large, _ = files(cache)
    large.write_bytes(harm(large.read_bytes()))
    fresh = again(cache)
    vectors, known = fresh.find(TEXTS)
    assert known.tolist() == [False] * 6 + [True] * 4
    np.testing.assert_array_equal(vectors[6:], VECTORS[6:])
    assert fresh.damaged == 1
    assert not large.exists()
    fresh.add(TEXTS[:6], VECTORS[:6])
    np.testing.assert_array_equal(again(cache).find(TEXTS)[0], VECTORS)


def test_a_file_that_was_opened_and_is_damaged_or_gone_afterwards(cache):
    large, small = files(cache)
    cache.find(TEXTS)
    small.unlink()
    large.write_bytes(turned_vector(large.read_bytes()))
    assert cache.find(TEXTS) is None
    assert cache.damaged == 1
    assert cache.find(TEXTS) is None


def test_what_another_process_adds_is_seen(cache):
    assert cache.find(["new"]) is None
    again(cache).add(["new"], VECTORS[:1])
    np.testing.assert_array_equal(cache.find(["new"])[0], VECTORS[:1])


def test_the_same_texts_are_kept_once(cache):
    before = files(cache)
    again(cache).add(TEXTS[:6], VECTORS[:6])
    assert files(cache) == before


def test_many_at_once_lose_nothing(tmp_path):
    texts = [f"t{number}" for number in range(400)]
    vectors = np.arange(800, dtype=np.float32).reshape(400, 2)

    def work(start):
        own = EmbeddingCache(tmp_path, "x")
        for first in range(start, start + 200, 20):
            own.add(texts[first : first + 20], vectors[first : first + 20])
            found, known = own.find(texts)
            np.testing.assert_array_equal(found[known], vectors[known])

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, [0, 100, 200]))
    found, known = EmbeddingCache(tmp_path, "x").find(texts)
    assert known.all()
    np.testing.assert_array_equal(found, vectors)
    assert not list(tmp_path.rglob("*.new"))


def test_a_full_disk_is_named_and_keeps_what_was_there(cache, monkeypatch):
    def full(source, target):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match=r"embedding cache cannot be written \(No space left .*free") as caught:
        cache.add(["new"], VECTORS[:1])
    assert caught.value.errno == errno.ENOSPC
    assert str(cache.folder) in str(caught.value)
    monkeypatch.undo()
    assert not list(cache.folder.glob("*.new"))
    np.testing.assert_array_equal(again(cache).find(TEXTS)[0], VECTORS)


def test_a_folder_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="set the encoder's `cache` to another folder"):
        EmbeddingCache(tmp_path / "file", "x").add(["new"], VECTORS[:1])


def test_keys_end_with_any_byte():
    """Keys are compared as strings of fixed length, of which numpy hides zeros at the end."""
    keys = text_keys([f"text {number}" for number in range(3000)])
    zero_at_the_end = [number for number, key in enumerate(keys) if len(key) < cache_file.KEY_BYTES]
    assert zero_at_the_end
    assert len(set(keys.tolist())) == 3000
    assert text_keys(["\ud800"]).shape == (1,)  # a lone surrogate, as broken data has them
