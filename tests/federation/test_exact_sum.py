import io
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from thread_team import on_team

from fedlight.federation.exact_sum import CHUNK, MOST_ADDENDS, ExactSum, ExactSums
from fedlight.processes import current_team

NAN, INF = float("nan"), float("inf")


def doubles(values):
    return torch.tensor(values, dtype=torch.float64)


def added(values):
    total = ExactSum(values[0].shape)
    for value in values:
        total.add(value)
    return total


def summed(values):
    return added(values).rounded()


def bits(tensor):
    return tensor.contiguous().view(torch.int64).tolist()


def addends(kind, count, size, seed=0):
    """Tensors ``(count, size)`` that a running sum in fp64 gets wrong."""
    rng = np.random.default_rng(seed)
    signed = rng.normal(size=(count, size))
    if kind == "1e-30..1e30":
        signed *= 10.0 ** rng.uniform(-30, 30, signed.shape)
    elif kind == "all of fp64":
        signed = np.ldexp(signed, rng.integers(-1080, 1010, signed.shape))
    elif kind == "cancelling":
        signed *= 10.0 ** rng.uniform(-30, 30, signed.shape)
        signed[count // 2 :] = -signed[: count - count // 2]
        signed[0] += rng.normal(size=size) * 1e-25
    elif kind == "half way":  # 1 + 2^-53 lies between two numbers, and what is added decides
        signed = np.zeros_like(signed)
        signed[0], signed[1] = 1.0, 2.0**-53
        signed[2] = rng.choice([-1.0, 0.0, 1.0], size) * 2.0 ** rng.integers(-1074, -54, size)
        signed *= rng.choice([-1.0, 1.0], size)
    elif kind == "subnormal":
        signed = rng.integers(-(2**52), 2**52, signed.shape) * 5e-324
    rng.shuffle(signed)
    return torch.from_numpy(signed)


KINDS = ("movements", "1e-30..1e30", "all of fp64", "cancelling", "half way", "subnormal")


@pytest.mark.parametrize("kind", KINDS)
def test_correctly_rounded(kind):
    values = addends(kind, count=11, size=300)
    expected = [float(sum(map(Fraction, column), Fraction(0))) for column in values.T.tolist()]
    assert expected == [math.fsum(column) for column in values.T.tolist()]
    assert summed(values).tolist() == expected
    if kind != "subnormal":  # whose sums fp64 holds exactly
        assert values.sum(0).tolist() != expected


@pytest.mark.parametrize("kind", KINDS)
def test_no_order_and_no_split_changes_a_bit(kind):
    values, rng = addends(kind, count=12, size=50, seed=1), np.random.default_rng(2)
    expected = bits(summed(values))
    for _ in range(10):
        parts = [ExactSum((50,)) for _ in range(int(rng.integers(1, 6)))]
        for row in rng.permutation(len(values)):
            parts[rng.integers(len(parts))].add(values[row])
        while len(parts) > 1:
            rng.shuffle(parts)
            parts[0].merge(parts.pop().partial())
        assert bits(parts[0].rounded()) == expected


def test_a_sum_of_many_carries():
    """More addends than a digit holds, all of one sign, in one sum and in merged ones."""
    count = 5 * MOST_ADDENDS + 3
    value = doubles([1.0 - 2**-53, -(1.0 - 2**-53), 1e300, 2.0**-1074, 0.1])
    total, other = ExactSum((5,)), ExactSum((5,))
    for _ in range(count):
        total.add(value)
    for _ in range(MOST_ADDENDS):
        other.add(value)
    total.merge(other.partial())
    times = count + MOST_ADDENDS
    assert total.rounded().tolist() == [float(Fraction(v) * times) for v in value.tolist()]


def test_a_sum_far_above_the_range_leaves_its_neighbours_alone():
    """Of 2^1038, which is more than the digits of any addend hold; on the way it may leave the range."""
    top = 1.7976931348623157e308
    assert summed([doubles([top])] * 3 + [doubles([-top])] * 2).item() == top
    total = ExactSum((4,))
    total.add(doubles([top, -top, 2.0**-1074, 1.0]))
    for _ in range(14):
        total.merge(total.partial())
    assert total.rounded().tolist() == [INF, -INF, 2.0**-1060, 2.0**14]


def test_numbers_of_several_types_are_joined_in_fp64():
    """2^24 + 1 is no fp32 number."""
    total = ExactSum((3,))
    total.add_joined([torch.tensor([2**24 + 1]), torch.tensor([0.5, 0.25])], times=3.0)
    assert total.rounded().tolist() == [3.0 * (2**24 + 1), 1.5, 0.75]


def test_what_is_not_finite_adds_up_as_in_fp64_in_any_order():
    rows = [1.0, INF, INF, NAN, 5.0], [2.0, 1.0, -INF, 1.0, 0.25], [NAN] + [0.5] * 4
    values = [*map(doubles, rows)]
    forward, backward = summed(values), summed(values[::-1])
    assert bits(forward) == bits(backward)
    assert str(forward.tolist()) == str([NAN, INF, NAN, NAN, 5.75])
    merged = ExactSum((5,))
    for value in values:
        merged.merge(added([value]).partial())
    assert bits(merged.rounded()) == bits(forward)


def test_shapes_types_and_zeros():
    cut = torch.arange(12.0).view(3, 4).T  # not contiguous
    assert torch.equal(summed([cut, cut.double()]), 2.0 * cut.double())
    assert summed([torch.tensor(3), torch.tensor(2.5)]).item() == 5.5
    assert summed([torch.ones(0, 2)]).shape == (0, 2)
    assert bits(summed([doubles([-0.0]), doubles([-0.0])])) == bits(doubles([0.0]))
    rows = torch.randn(3, CHUNK + 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert summed(rows).tolist() == [math.fsum(column) for column in rows.T.tolist()]
    total, other = ExactSum((6,)), ExactSum((2, 3))
    total.add(torch.ones(6))
    other.add(torch.zeros(2, 3))
    for refused in (lambda: total.add(torch.ones(2, 3)), lambda: total.merge(other.partial())):
        with pytest.raises(ValueError, match=r"of shape \(2, 3\) cannot be added to a sum of shape \(6,\)"):
            refused()
    with pytest.raises(ValueError, match="real numbers, not torch"):
        ExactSum((1,)).add(torch.ones(1, dtype=torch.complex64))


def test_addends_and_partials_are_not_changed():
    value, total, other = doubles([0.1, 1e20]), ExactSum((2,)), ExactSum((2,))
    total.add(value)
    partial = total.partial()
    for _ in range(3):
        other.merge(partial)
    assert value.tolist() == [0.1, 1e20]
    assert total.rounded().tolist() == value.tolist()
    total.add(torch.ones(2))
    assert other.rounded().tolist() == [float(3 * Fraction(0.1)), 3e20]


def test_named_sums_start_anew_and_their_partials_can_be_saved():
    ours, theirs, file = ExactSums(), ExactSums(), io.BytesIO()
    ours.add({"x": doubles([1e16])})
    theirs.add({"x": doubles([1.0])})
    theirs.add({"y": doubles([INF])})
    torch.save(theirs.partial(), file)
    assert theirs.result() == {}
    file.seek(0)
    ours.merge(torch.load(file, weights_only=True))
    ours.add({"x": doubles([1.0])})
    assert {name: value.item() for name, value in ours.result().items()} == {"x": 1e16 + 2, "y": INF}
    assert ours.result() == {}


def test_digits_of_movements_take_no_more_than_two_times_fp64():
    """Differences of fp32 parameters times a share: about 90 bits."""
    generator = torch.Generator().manual_seed(0)
    received = torch.randn(1000, generator=generator) * 0.02
    trained = received + torch.randn(1000, generator=generator) * 1e-4
    total = ExactSum((1000,))
    for share in (0.3, 0.01, 1 / 53):
        total.add((trained.double() - received.double()) * share)
    assert sum(digit.nbytes for digit in total.partial()["digits"].values()) <= 2 * 8 * 1000


@pytest.mark.parametrize("exponent", [-1074, -1060, -1059, -1058, -1010, -60, -2, -1, 0, 100, 1000, 1022])
def test_digits_meet_without_a_gap(exponent):
    """Around the ends of digits: numbers of 53 bits, their neighbours, and what cancels all but the lowest bit."""
    rng = np.random.default_rng(0)
    top = np.ldexp(1.0, exponent)
    near = np.array([np.nextafter(top, 0), top, np.nextafter(top, np.inf), top * 1.5, top * (1 - 2.0**-30)])
    mixed = -rng.permutation(near)
    values = torch.from_numpy(np.stack([near, mixed, near * 2.0**-49, -near * 2.0**-97, near]))
    expected = [float(sum(map(Fraction, column), Fraction(0))) for column in values.T.tolist()]
    assert summed(values).tolist() == expected
    total = summed(torch.cat([values, -values[1:]]))
    assert total.tolist() == values[0].tolist()


def test_an_element_that_needs_a_third_digit_is_rounded_right_and_so_are_the_others():
    """One of more than two chunks; the sum has three digits, and most chunks read two."""
    draw = torch.Generator().manual_seed(0)
    values = torch.randn(3, 2 * CHUNK + 5, generator=draw, dtype=torch.float64) * 1e-3
    values[:, CHUNK + 1] = doubles([2.0**-10, 2.0**-63, 2.0**-120])
    total = added(values)
    assert len(total.partial()["digits"]) == 3
    assert total.rounded().tolist() == [math.fsum(column) for column in values.T.tolist()]


@pytest.mark.parametrize("whole", [True, False])
def test_sums_in_blocks_are_those_of_one_block(monkeypatch, whole):
    """Tensors that end inside of blocks, some in two layouts, values that are not finite, unlike digits in each block."""
    draw, shapes = torch.Generator().manual_seed(1), {"a": (7, 11), "b": (5,), "c": (90,), "none": (0, 3)}
    addends = []
    for scale in (1.0, 1e12, 1e24, 1e36):
        addends.append({n: torch.randn(s, generator=draw).double() * scale for n, s in shapes.items()})
    addends.append({"c": torch.full((90,), 1e-200)})
    addends.append({"b": doubles([1.0, NAN, INF, -INF, 2.0]), "a": torch.ones(7, 11)})
    expected = ExactSums()
    for addend in addends:
        expected.add(addend, times=0.3)
    monkeypatch.setattr("fedlight.federation.exact_sum.CHUNK", 8)
    monkeypatch.setattr("fedlight.federation.exact_sum.BLOCK", 32)
    parts = [ExactSums() for _ in range(3)]
    for number, addend in enumerate(addends):
        parts[number % 3].add(addend, times=0.3)
    partials = [part.partial() for part in parts]
    assert [*map(len, partials)] == [6, 9, 9]  # of 172, 90 and 82 elements in blocks of 32
    merged = ExactSums()
    for partial in partials:
        for block in [partial] if whole else [[one] for one in partial[::-1]]:
            merged.merge(block)
    with monkeypatch.context() as patched:
        patched.setattr("fedlight.federation.exact_sum.BLOCK", 2**19)
        first = expected.result()
    second = merged.result()
    assert {**first}.keys() == {**second}.keys() == shapes.keys()
    for name in shapes:
        assert bits(first[name]) == bits(second[name]), name


@pytest.mark.parametrize("size", [2, 3, 7])
def test_processes_add_up_to_the_bits_of_one(size, monkeypatch):
    """Tensors of unlike ranges, infinities, one that a single process has, and an addend that comes later."""
    monkeypatch.setattr("fedlight.federation.exact_sum.BLOCK", 2**15)
    stream = torch.Generator().manual_seed(0)
    wide = [10.0 ** torch.randint(-40, 40, (3, 4), generator=stream).double() for _ in range(40)]
    values = [{"a": scale * torch.randn(3, 4, generator=stream), "b": torch.randn(40_000)} for scale in wide]
    values[7]["a"][0, 0], values[9]["b"][1] = math.inf, math.nan
    own, later = {"c": torch.ones(2)}, {"a": torch.ones(3, 4), "b": torch.ones(40_000)}
    whole = ExactSums()
    for number, value in enumerate([*values, own, later]):
        whole.add(value, 0.1 * (number + 1))
    expected = whole.result()

    def work(rank):
        sums = ExactSums()
        for number, value in enumerate(values):
            if number % size == rank:
                sums.add(value, 0.1 * (number + 1))
        if rank == size - 1:
            sums.add(own, 0.1 * 41)
        sums.add_up(current_team())
        assert sums.partial() == []  # nothing is left to send
        sums.add(later, 0.1 * 42)
        return sums.result()

    for found in on_team(monkeypatch, size, work):
        assert found.keys() == expected.keys()
        assert all(bits(found[name]) == bits(expected[name]) for name in expected)
