from fractions import Fraction

import numpy as np
import pytest
import torch
from thread_team import on_team
from updates import assert_parts_change_no_bit, result, update

from fedlight import CoordinateMedian, PrivateMean, TrimmedMean, Update
from fedlight.federation import WeightedSum
from fedlight.federation.byzantine import Bulyan, GeometricMedian, Krum
from fedlight.processes import current_team

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("share", "expected"),
    [(0.0, 22.0), (0.19, 22.0), (0.2, 3.0), (0.39, 3.0), (0.4, 3.0), (0.49999999999, 3.0)],
)
def test_trimmed_mean_by_hand(share, expected):
    """Of 1, 2, 3, 4, 100: nothing, the outer two, then all but the middle."""
    updates = [update(str(i), w=[v]) for i, v in enumerate((100.0, 3.0, 1.0, 4.0, 2.0))]
    assert result(TrimmedMean(share), *updates) == {"w": [expected]}


def test_share_of_a_hundred_is_what_one_reads():
    updates = [update(str(i), w=[float(i**2)]) for i in range(100)]
    kept = [float(i**2) for i in range(29, 71)]
    assert 0.29 * 100 < 29  # in floating point
    assert result(TrimmedMean(0.29), *updates)["w"][0] == pytest.approx(sum(kept) / len(kept))
    assert result(TrimmedMean(), *updates)["w"][0] == pytest.approx(sum(i**2 for i in range(10, 90)) / 80)


@pytest.mark.parametrize("num_clients", [1, 2, 7, 10])
def test_equal_to_numpy(num_clients):
    values = np.random.default_rng(num_clients).normal(size=(num_clients, 4, 3))
    updates = [update(str(i), weight=i + 1.0, w=v.tolist()) for i, v in enumerate(values)]
    median, cut = result(CoordinateMedian(), *updates)["w"], int(0.3 * num_clients)
    np.testing.assert_allclose(median, np.median(values, axis=0), rtol=1e-14)
    expected = np.sort(values, axis=0)[cut : num_clients - cut].mean(axis=0)
    np.testing.assert_allclose(result(TrimmedMean(0.3), *updates)["w"], expected, rtol=1e-14)


@pytest.mark.parametrize("lie", [1e30, -1e30, INF, -INF, NAN])
def test_two_of_seven_that_lie_change_little(lie):
    honest = [update(str(i), w=[float(i)]) for i in range(5)]
    liars = [update("x", weight=1e6, w=[lie]), update("y", weight=1e6, w=[lie])]
    for aggregation in (CoordinateMedian(), TrimmedMean(0.3)):
        assert 0.0 <= result(aggregation, *liars, *honest)["w"][0] <= 4.0
    assert not 0.0 <= result(WeightedSum("weight"), *liars, *honest)["w"][0] <= 4.0


@pytest.mark.parametrize(
    "make", [CoordinateMedian, TrimmedMean, lambda: WeightedSum("weight"), lambda: PrivateMean(10.0, 0.0)]
)
def test_a_tensor_is_combined_over_those_who_sent_it_and_a_round_starts_anew(make):
    aggregation = make()
    both = [update("a", x=[2.0]), update("b", x=[4.0], y=[7.0])]
    assert result(aggregation, *both) == {"x": [3.0], "y": [7.0]}
    assert result(aggregation, update("c", y=[1.0])) == {"y": [1.0]}
    assert result(aggregation) == {}
    assert both[0].movement["x"].item() == 2.0  # what was given is not changed


def test_scale_by_name():
    updates = [update("a", x=[2.0], y=[2.0]), update("b", weight=3.0, x=[4.0], y=[4.0])]
    assert result(WeightedSum("count", scale={"x": 1.0, "y": 0.5}), *updates) == {"x": [7.0], "y": [3.5]}
    assert result(WeightedSum("one", scale={"x": 1.0, "y": 0.5}), *updates) == {"x": [14.0], "y": [7.0]}
    with pytest.raises(KeyError, match="y"):
        result(WeightedSum("one", scale={"x": 1.0}), *updates)


@pytest.mark.parametrize("share", [-0.1, 0.5, NAN])
def test_share_out_of_range(share):
    with pytest.raises(ValueError, match=r"must be in \[0, 0.5\)"):
        TrimmedMean(share)


AGGREGATIONS = {
    "weight": lambda: WeightedSum("weight"),
    "count": lambda: WeightedSum("count", scale=53),
    "one": lambda: WeightedSum("one"),
    "median": CoordinateMedian,
    "trimmed": lambda: TrimmedMean(0.2),
    "private": lambda: PrivateMean(3.0, noise_multiplier=0.5),
    "krum": lambda: Krum(0.2),
    "multi": lambda: Krum(0.2, multi=True),
    "bulyan": lambda: Bulyan(0.2),
    "geometric": GeometricMedian,
}


@pytest.mark.parametrize("kind", AGGREGATIONS)
def test_neither_order_nor_partial_results_change_a_bit(kind):
    """Also with tensors that others send, of which one is empty, and clients that are as near to the others."""
    rng, reach = np.random.default_rng(0), 8 if kind in ("krum", "multi", "bulyan", "geometric") else 30
    values = rng.normal(size=(11, 200)) * 10.0 ** rng.uniform(-reach, reach, (11, 200))
    values[:, :20] = rng.choice([-0.0, 0.0], (11, 20))  # as numbers they are equal, as bits they are not
    values[4] = values[3]
    updates = [update(f"{i:02}", rng.uniform(), w=v) for i, v in enumerate(values)]
    updates += [update(f"{i}", rng.uniform(), n=i, e=torch.zeros(0, 2)) for i in range(3)]
    assert_parts_change_no_bit(AGGREGATIONS[kind], updates, rng)


@pytest.mark.parametrize("kind", ["weight", "count", "one"])
def test_a_weighted_sum_is_rounded_once(kind):
    """Products, their sum and the sum of weights in fractions, each rounded to fp64; then one factor."""
    rng = np.random.default_rng(1)
    values = rng.normal(size=(7, 100)) * 10.0 ** rng.uniform(-30, 30, (7, 100))
    given = rng.uniform(size=7)
    expected = []
    for column in values.T.tolist():
        total = sum(Fraction(w * v) for w, v in zip(given.tolist(), column, strict=True))
        divisor = {"weight": sum(map(Fraction, given.tolist())), "count": 7, "one": 1}[kind]
        expected.append(float(total) * ((53 if kind == "count" else 1) / float(divisor)))
    updates = [update(str(i), weight=float(given[i]), w=v.tolist()) for i, v in enumerate(values)]
    assert result(AGGREGATIONS[kind](), *updates) == {"w": expected}


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("kind", ["median", "trimmed"])
def test_shares_of_the_coordinates_change_no_bit(kind, size, monkeypatch):
    """With tensors that some clients or processes lack, a number, no elements, NaN, and more processes than coordinates."""
    stream = torch.Generator().manual_seed(0)
    updates = []
    for client in range(13):
        scale = 10.0 ** torch.randint(-8, 8, (40, 5), generator=stream)  # the order of addends changes bits
        movement = {"w": scale * torch.randn(40, 5, generator=stream).double(), "none": torch.zeros(0, 2)}
        movement["n"] = torch.randn((), generator=stream)
        if client % 4 == 1:
            movement["b"] = torch.randn(7, generator=stream)
        movement["w"][0, :2] = torch.tensor([NAN if client < 3 else 1.0, -0.0])
        updates.append(Update(str(client), movement, weight=1.0))
    whole = AGGREGATIONS[kind]()
    for each in updates:
        whole.add(each)
    expected = whole.result()

    def body(rank):
        part = AGGREGATIONS[kind]()
        for number, each in enumerate(updates):
            if number % (size - 1) == rank:  # the last process has trained none
                part.add(each)
        part.sums.add_up(current_team())
        assert part.partial() == {"updates": []}
        return part.result()

    for found in on_team(monkeypatch, size, body):
        assert found.keys() == expected.keys()
        for name, value in found.items():
            assert value.shape == expected[name].shape
            assert value.double().numpy().tobytes() == expected[name].double().numpy().tobytes(), name
