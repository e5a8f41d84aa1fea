import numpy as np
import pytest
import torch
from safetensors.torch import load, save

from fedlight.federation.channel import pack, unpack
from fedlight.federation.codecs import Quantize, TopK

# The 16 levels of QLoRA (https://arxiv.org/abs/2305.14314), appendix E.
BELOW = [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635]
BELOW += [-0.18477343022823334, -0.09105003625154495, 0.0]
ABOVE = [0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224]
ABOVE += [0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0]
NF4, INT8 = np.array(BELOW + ABOVE), np.arange(-127, 128) / 127
SIZES = [1, 63, 64, 65, 1000, 2]
CODECS = [Quantize(to) for to in ("fp16", "bf16", "int8", "nf4")] + [
    Quantize("int8", block=64),
    Quantize("nf4", block=1024),
    TopK(0.1),
    TopK(1.0),
]


def numbers(size, seed=0):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def state():
    """Six tensors whose magnitudes differ by ten orders."""
    return {f"w{i}": numbers(size, i) * 100.0 ** (i - 3) for i, size in enumerate(SIZES)}


def there_and_back(values, *codecs):
    """Decoded from the bytes of a real file, in which nothing is but what was packed."""
    packed = pack(values, codecs)
    arrived = load(save(packed))
    assert arrived.keys() == packed.keys()
    return unpack(arrived, {name: value.shape for name, value in values.items()}, codecs)


def nearest(values, levels, block):
    """Blockwise rounding to the nearest level, in fp64; half the gap that each value fell into."""
    rounded, gaps = [], []
    for start in range(0, len(values), block):
        part = values[start : start + block].double().numpy()
        largest = np.abs(part).max() or 1.0
        distances = np.abs(part[:, None] / largest - levels)
        rounded.append(levels[distances.argmin(axis=1)] * largest)
        gaps.append(distances.min(axis=1) * largest)
    return np.concatenate(rounded), np.concatenate(gaps)


@pytest.mark.parametrize(
    ("to", "block", "levels"), [("nf4", 64, NF4), ("nf4", 256, NF4), ("int8", 256, INT8), ("int8", 64, INT8)]
)
def test_blockwise_is_the_nearest_level_of_each_tensors_own_blocks(to, block, levels):
    before = state()
    after = there_and_back(before, Quantize(to, block))
    for name, value in before.items():
        expected, gaps = nearest(value, levels, block)
        error = np.abs(after[name].numpy() - value.numpy())
        np.testing.assert_allclose(error, gaps, rtol=1e-3, atol=0.01 * max(gaps))
        agree = np.isclose(after[name].numpy(), expected, rtol=1e-6, atol=0)
        assert (~agree).sum() <= 1 + len(agree) // 200  # bitsandbytes looks borders up in a table


@pytest.mark.parametrize(("to", "error"), [("fp16", 2**-11), ("bf16", 2**-8)])
def test_sixteen_bits_keep_their_digits_at_any_magnitude(to, error):
    before = {"large": 3e38 * torch.tensor([1.0, -0.3, 0.01]), "small": 1e-30 * numbers(1000), **state()}
    after = there_and_back(before, Quantize(to))
    for name, value in before.items():
        assert torch.isfinite(after[name]).all()
        assert ((after[name] - value).abs() <= error * value.abs()).float().mean() > 0.999
        assert (after[name] - value).abs().max() <= error * value.abs().max()
    assert torch.tensor([7e4]).half().isinf()  # what is prevented


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: str(vars(codec)))
def test_zeros_stay_zeros_and_an_empty_tensor_empty(codec):
    before = {"a": torch.zeros(300), "b": torch.zeros(2, 3), "c": torch.zeros(0), "d": torch.ones(3)}
    after = there_and_back(before, codec)
    assert {name: value.shape for name, value in after.items()} == {k: v.shape for k, v in before.items()}
    assert not any(after[name].any() for name in "abc")
    mixed = torch.zeros(256)
    mixed[::100] = torch.tensor([1.0, -2.0, 0.5])
    assert not there_and_back({"w": mixed}, codec)["w"][mixed == 0].any()


@pytest.mark.parametrize(
    ("codec", "num_bytes"),
    [
        (Quantize("fp16"), 2 * 1195 + 2 * 6),
        (Quantize("int8"), 1195 + 4 * (1 + 1 + 1 + 1 + 4 + 1)),
        (Quantize("nf4"), (1 + 32 + 32 + 33 + 500 + 1) + 4 * (1 + 1 + 1 + 2 + 16 + 1)),
        (TopK(0.1), 8 * (1 + 7 + 7 + 7 + 100 + 1)),
        (TopK(0.001), 8 * 6),
    ],
    ids=lambda value: str(vars(value)) if isinstance(value, Quantize | TopK) else "",
)
def test_bytes_by_hand(codec, num_bytes):
    """Values, and what goes with them; the filling of blocks is not sent."""
    packed = pack(state(), [codec])
    assert sum(value.nbytes for value in packed.values()) == num_bytes
    assert 0 < len(save(packed)) - num_bytes < 160


def test_largest_by_hand():
    before = {"v": torch.tensor([[0.5, -4.0], [3.0, 1.0]]), "w": torch.tensor([0.1, 0.0, -0.2])}
    packed = pack(before, [TopK(0.5)])
    assert packed["0.positions"].dtype == torch.int32
    assert packed["0.positions"].tolist() == [1, 2, 0, 2]
    assert packed["values"].tolist() == pytest.approx([-4.0, 3.0, 0.1, -0.2])
    after = there_and_back(before, TopK(0.5))
    assert after["v"].tolist() == [[0.0, -4.0], [3.0, 0.0]]
    assert torch.equal(after["w"], before["w"])
    assert TopK(0.07).encoded_sizes([100, 1]) == [7, 1]
    assert 0.07 * 100 > 7  # in floating point


def test_a_chain_is_each_codec_on_what_the_one_before_left():
    before = state()
    kept = there_and_back(before, TopK(0.1))
    after = there_and_back(before, TopK(0.1), Quantize("int8", block=64))
    packed = pack(before, [TopK(0.1), Quantize("int8", block=64)])
    assert sorted(packed) == ["0.positions", "1.scales", "values"]
    assert packed["values"].shape == (123,)
    for name, value in kept.items():
        chosen = value != 0
        assert not after[name][~chosen].any()
        alone = there_and_back({name: value[chosen]}, Quantize("int8", block=64))[name]
        assert torch.equal(after[name][chosen], alone)


def test_the_order_of_the_names_does_not_matter():
    before = state()
    turned = dict(reversed(before.items()))
    codecs = [TopK(0.3), Quantize("nf4")]
    assert save(pack(before, codecs)) == save(pack(turned, codecs))
    after, other = there_and_back(before, *codecs), there_and_back(turned, *codecs)
    assert all(torch.equal(after[name], other[name]) for name in before)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Quantize("int4"), "Quantize: to='int4' is not one of fp16"),
        (lambda: Quantize("fp16", block=64), "block=64 has no meaning for fp16"),
        (lambda: Quantize("nf4", block=100), "block=100 must be 64 or 128 or 256"),
        (lambda: TopK(0.0), r"TopK.share=0.0 .* must be in \(0, 1\]"),
        (lambda: TopK(1.5), "TopK.share=1.5"),
    ],
)
def test_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
