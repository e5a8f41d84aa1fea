import re
from itertools import combinations

import numpy as np
import pytest
import torch
from plain_lightning import assert_equal, federate, weights
from refusals import refusal
from scipy.optimize import minimize
from tastes import Adapters, run
from thread_team import on_team
from updates import bits, update
from written_out import assert_close, local, recorded

from fedlight import FedAvg, FedBiscuit, Limits
from fedlight.federation import aggregation
from fedlight.federation.byzantine import Bulyan, FLTrust, GeometricMedian, Krum
from fedlight.processes import current_team

KINDS = {
    "krum": lambda: Krum(0.2),
    "multi": lambda: Krum(0.2, multi=True),
    "bulyan": lambda: Bulyan(0.2),
    "geometric": GeometricMedian,
}


def updates_of(values):
    return [update(f"{i:03}", weight=i + 1.0, w=value) for i, value in enumerate(values)]


def result(aggregation, updates):
    for each in updates:
        aggregation.add(each)
    return {name: value.numpy() for name, value in aggregation.result().items()}


def scores(values, liars):
    """Krum's, from the formula: the least sum of squared distances over all choices of n - f - 2 other updates."""
    others = [[np.sum((v - w) ** 2) for j, w in enumerate(values) if j != i] for i, v in enumerate(values)]
    number = max(1, len(values) - liars - 2)
    return [min(map(sum, combinations(of, number)), default=0.0) for of in others]


def krum(values, liars):
    return values[int(np.argmin(scores(values, liars)))]


def multi_krum(values, liars):
    return values[np.argsort(scores(values, liars))[: len(values) - liars - 2]].mean(axis=0)


def bulyan(values, liars):
    left, chosen = list(values), []
    for _ in range(len(values) - 2 * liars):
        place = int(np.argmin(scores(left, liars)))
        chosen.append(left.pop(place))
    total = np.zeros_like(values[0])
    for k in range(len(total)):
        column = [value[k] for value in chosen]
        near = sorted(column, key=lambda value: abs(value - np.median(column)))
        total[k] = np.mean(near[: len(chosen) - 2 * liars])
    return total


def geometric(values, liars):
    """The minimum of a convex function, by another method than Weiszfeld's."""
    distances = lambda z: np.sqrt(np.sum((values - z) ** 2, axis=1)).sum()  # noqa: E731
    return minimize(distances, values.mean(axis=0), method="BFGS", options={"gtol": 1e-10}).x


def trusted(values, liars=0):
    """FLTrust's step with the first row as the server's, from the formula."""
    root, total, weight = values[0], np.zeros_like(values[0]), 0.0
    for value in values[1:]:
        cosine = value @ root / np.linalg.norm(value) / np.linalg.norm(root)
        total = total + max(0.0, cosine) * value * np.linalg.norm(root) / np.linalg.norm(value)
        weight += max(0.0, cosine)
    return total / weight


WRITTEN_OUT = {"krum": krum, "multi": multi_krum, "bulyan": bulyan, "geometric": geometric, "trust": trusted}


@pytest.mark.filterwarnings("ignore:.*precision loss")
@pytest.mark.parametrize("number", [3, 7, 10, 12])
@pytest.mark.parametrize("kind", WRITTEN_OUT)
def test_equal_to_the_formula(kind, number):
    liars = int(0.2 * number)
    if kind == "bulyan" and number in (7, 10):
        number, liars = number + 4, 2
    values = np.random.default_rng(number).normal(size=(number, 6))
    values[:liars] *= 5
    make = KINDS.get(kind, lambda: FLTrust("000"))
    found = result(make(), updates_of(values))["w"]
    near = {"atol": 2e-5} if kind == "geometric" else {"rtol": 1e-12}
    np.testing.assert_allclose(found, WRITTEN_OUT[kind](values, liars), **near)


@pytest.mark.parametrize("kind", ["krum", "multi", "bulyan"])
def test_equal_to_flower(kind):
    flower = pytest.importorskip("flwr.server.strategy.aggregate")
    values = np.random.default_rng(5).normal(size=(12, 30))
    given = [([value[:20].reshape(4, 5), value[20:]], 1) for value in values]
    expected = {
        "krum": lambda: flower.aggregate_krum(given, 2, 0),
        "multi": lambda: flower.aggregate_krum(given, 2, 12 - 2 - 2),
        "bulyan": lambda: flower.aggregate_bulyan(given, 2, flower.aggregate_krum, to_keep=0),
    }[kind]()
    updates = [update(f"{i:02}", a=value[:20].reshape(4, 5), b=value[20:]) for i, value in enumerate(values)]
    found = result(KINDS[kind](), updates)
    for name, value in zip("ab", expected, strict=True):
        np.testing.assert_allclose(found[name], value, rtol=1e-12)


@pytest.mark.parametrize("lie", [1e3, -1e30, 1e200, float("inf"), float("nan")])
@pytest.mark.parametrize("kind", ["krum", "multi", "bulyan"])
def test_as_many_liars_as_allowed_do_not_leave_the_honest(kind, lie):
    honest, liars = (9, 2) if kind == "bulyan" else (7, 4)  # 4 f + 3, 2 f + 3
    aggregation = Bulyan(0.2) if kind == "bulyan" else Krum(0.4, multi=kind == "multi")
    values = np.random.default_rng(0).uniform(-1, 1, size=(honest, 4))
    value = result(aggregation, updates_of([*np.full((liars, 4), lie), *values]))["w"]
    assert (abs(value) <= 1).all()


@pytest.mark.parametrize("lie", [1e3, -1e30, 1e200])
def test_a_minority_does_not_move_the_geometric_median_far(lie):
    """Four of nine: the bound of its paper, with C = 2 (1 - a) / (1 - 2 a) = 10 times the largest distance."""
    values = np.random.default_rng(0).uniform(-1, 1, size=(5, 4))
    value = result(GeometricMedian(), updates_of([*np.full((4, 4), lie), *values]))["w"]
    assert np.linalg.norm(value) <= 10 * np.linalg.norm(values, axis=1).max()
    honest = result(GeometricMedian(), updates_of([*values, *values[:4]]))["w"]
    assert np.linalg.norm(value - honest) < 3


@pytest.mark.parametrize("kind", KINDS)
def test_processes_change_no_bit(kind, monkeypatch):
    monkeypatch.setattr(aggregation, "BLOCK", 8)  # of 49 numbers
    make = KINDS[kind] if kind != "bulyan" else lambda: Bulyan(0.15)

    def body(rank):
        assert current_team().size == (3 if rank is not None else 1)
        return weights(federate(clients_per_round=8, aggregation=make())[0])

    whole = body(None)
    for each in on_team(monkeypatch, 3, body):
        assert_equal(each, whole)


@pytest.mark.parametrize("make", [*KINDS.values(), lambda: FLTrust("000")], ids=[*KINDS, "trust"])
def test_shares_of_the_coordinates_change_no_bit(make, monkeypatch):
    """One process has no update, and the last one of a short update no coordinate."""
    monkeypatch.setattr(aggregation, "BLOCK", 64)
    values = np.random.default_rng(4).normal(size=(11, 1000)) ** 5
    short = [] if make not in KINDS.values() else [update(f"{i}", n=v[:70]) for i, v in enumerate(values)]
    updates = [*updates_of(values), *short]
    whole = bits(make(), *updates)

    def body(rank):
        aggregation = make()
        for each in updates[rank::2] if rank < 2 else []:
            aggregation.add(each)
        aggregation.add_up(current_team())
        assert aggregation.partial() == {"updates": []}
        return bits(aggregation)

    assert on_team(monkeypatch, 3, body) == [whole] * 3
    assert {*whole} == ({"w", "n"} if short else {"w"})


def test_the_number_of_threads_changes_no_bit():
    values = np.random.default_rng(3).normal(size=(11, 50_000))
    before = torch.get_num_threads()
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found.append([result(make(), updates_of(values))["w"].tobytes() for make in KINDS.values()])
    torch.set_num_threads(before)
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("kind", "aggregation", "rounds", "cohort"),
    [
        ("krum", Krum(0.15), 3, 7),
        ("multi", Krum(0.15, multi=True), 3, 7),
        ("bulyan", Bulyan(0.15), 3, 7),
        ("trust", FLTrust("c0"), 2, 10),  # c0 comes first by its name
    ],
)
def test_a_federation_equals_a_loop_written_out(kind, aggregation, rounds, cohort):
    start, end, rounds = recorded(rounds=rounds, clients_per_round=cohort, aggregation=aggregation)
    state = start
    for of_clients in rounds:
        ends = [local(state, of_clients[client]) for client in sorted(of_clients)]
        moved = [np.concatenate([(one[n] - state[n]).numpy().ravel() for n in sorted(state)]) for one in ends]
        movement, at = torch.from_numpy(WRITTEN_OUT[kind](np.stack(moved), 1)), 0
        for name in sorted(state):
            size = state[name].numel()
            state = state | {name: state[name] + movement[at : at + size].reshape(state[name].shape)}
            at += size
    assert_close(end, state)


def test_each_selector_is_combined_over_its_group():
    module, _ = run(
        FedBiscuit(0, 30), module=Adapters(3), rounds=4, clients_per_round=9, aggregation=Krum(0.0)
    )
    assert all(torch.isfinite(value).all() for value in weights(module).values())


@pytest.mark.parametrize(
    ("aggregation", "number", "message"),
    [
        (Krum(0.4), 5, r"Krum needs 2 f \+ 3 = 7 updates in a round .* this round has 5: .*buffer_size"),
        (Krum(0.0), 2, r"Krum needs 2 f \+ 3 = 3 .* this round has 2"),
        (Bulyan(0.2), 10, r"Bulyan needs 4 f \+ 3 = 11 .* this round has 10: raise federated.clients_per_ro"),
    ],
)
def test_a_small_round_is_refused_and_one_that_is_just_large_enough_is_not(aggregation, number, message):
    least = int(re.search(r"3 = (\d+)", message)[1])
    assert result(aggregation, updates_of(np.eye(least))).keys() == {"w"}
    with refusal(message):
        result(aggregation, updates_of(np.eye(number)))


@pytest.mark.parametrize(
    ("aggregation", "cohort", "message"),
    [
        (Bulyan(0.2), 5, "Bulyan needs 4 f"),
        (FLTrust("nobody"), 10, "some would lack it"),
        (FLTrust("c0"), 9, "some would lack it"),
    ],
)
def test_a_round_that_is_too_small_or_would_lack_its_root_is_refused_before_it_trains(
    aggregation, cohort, message
):
    seen = []

    class Seen(FedAvg):
        def start_visit(self, *args):
            seen.append(args)
            return super().start_visit(*args)

    with refusal(message):
        federate(algorithm=Seen(), clients_per_round=cohort, aggregation=aggregation)
    assert not seen


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Krum(0.5), r"Krum: share=0.5 of liars must be in \[0, 0.5\)"),
        (lambda: Bulyan(0.25), r"Bulyan: share=0.25 of liars must be in \[0, 0.25\), as it needs 4 f \+ 3"),
        (lambda: Krum(float("nan")), "must be in"),
        (lambda: GeometricMedian(0.0), "smoothing=0.0 must be above 0, and steps=100 at least 1"),
        (lambda: GeometricMedian(steps=0), "steps=0 at least 1"),
    ],
)
def test_settings_out_of_range(make, message):
    with refusal(message):
        make()


def test_a_tensor_beside_different_others_is_refused():
    updates = [update("a", x=[1.0]), update("b", x=[1.0], y=[1.0])]
    with refusal("GeometricMedian compares whole updates, and clients have sent x beside"):
        result(GeometricMedian(), updates)


def test_limits_leave_their_weights_alone():
    """One client of all examples: they count alike, so no share of the weights is too large."""
    limits = Limits(share=0.3, norm=None, enforce=True)
    limited, loop = federate(1, clients_per_round=6, aggregation=GeometricMedian(), limits=limits)
    plain, _ = federate(1, clients_per_round=6, aggregation=GeometricMedian())
    assert_equal(weights(limited), weights(plain))
    assert not any(row["reason"] for row in loop.visit_records)


@pytest.mark.parametrize("lie", [1e3, 1e30, 1e200, float("inf"), float("nan")])
def test_fltrust_takes_nearly_any_number_of_liars(lie):
    honest = np.array([[1.0, 0.0], [3.0, 0.0], [0.5, 0.0]])
    values = [*honest, *np.full((20, 2), lie) * [-1, 1]]
    moved = result(FLTrust("000"), updates_of(values))["w"]
    assert moved.tolist() == [1.0, 0.0]


@pytest.mark.parametrize(
    "values",
    [
        [[1.0, 0.0], [0.0, 0.0]],
        [[1.0, 0.0], [-1.0, 0.0]],
        [[1.0, 0.0], [0.0, 1.0], [-2.0, 1.0]],
        [[0.0, 0.0], [1.0, 2.0]],  # the server has not moved
    ],
)
def test_fltrust_stays_where_nobody_is_trusted(values):
    assert result(FLTrust("000"), updates_of(values))["w"].tolist() == [0.0, 0.0]


@pytest.mark.parametrize(("root", "number"), [("other", 3), ("000", 1)])
def test_fltrust_without_its_root_or_others_is_refused(root, number):
    message = f"aggregation.root='{root}' in every round, and some would lack it, or others: set root"
    with refusal(re.escape(message)):
        result(FLTrust(root), updates_of(np.eye(number)))
