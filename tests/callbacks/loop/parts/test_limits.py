import itertools
import math
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from fleets import make_fleet, rounds_of, with_buffer
from plain_lightning import Numbers, Regression, assert_equal, ten_clients, trainer, weights
from refusals import refusal

from fedlight import CoordinateMedian, FederatedLoop, FederatedWrapper, PrivateMean, Update
from fedlight.callbacks.loop.parts.limits import LimitedRounds, Limits
from fedlight.callbacks.loop.parts.part import Part
from fedlight.callbacks.loop.run import round_metrics
from fedlight.federation import WeightedSum
from fedlight.federation.asynchronous import FedBuff
from fedlight.federation.byzantine import Krum
from fedlight.federation.lora.products import ProductSums

FIVE = {"a": 1.0, "b": 2.0, "c": 2.0, "d": 3.0, "e": 2.0**62}
"""Norm of each update; the median is 2."""


def updates(norms, heavy=None):
    """Return updates of two tensors with these norms, and weight 1 unless ``heavy`` names another one."""
    heavy = heavy or {}
    v, w = (torch.tensor([part], dtype=torch.float64) for part in (0.6, 0.8))
    return [Update(name, {"v": n * v, "w": n * w}, heavy.get(name, 1.0)) for name, n in norms.items()]


def collect(limits, given, aggregation=None, round_idx=0, wrapped=False, algorithms=False):
    """Return the aggregation after a round, and the reason of each client.

    ``wrapped`` as `ProductError` does, ``algorithms`` where the loop has none and the algorithm gives it.
    """
    run = limits if isinstance(limits, LimitedRounds) else LimitedRounds(limits, deployed=True)
    inner = aggregation or WeightedSum("weight")
    inner = ProductSums(inner, WeightedSum("weight"), []) if wrapped else inner
    watched = run.aggregation(
        SimpleNamespace(norm=None, aggregation=None if algorithms else aggregation), inner, 0
    )
    for one in given:
        watched.add(one)
    rows = [{"client": one.client_id, "reason": ""} for one in given]
    run.end_visits(
        SimpleNamespace(records=rows, round_idx=round_idx, gather=lambda value, what: [value]), None
    )
    return watched, {row["client"]: row["reason"] for row in rows}


def settle(*given, **settings):
    """Return the movement of w, and the reason of each client."""
    watched, reasons = collect(*given, **settings)
    return watched.result()["w"].item() / 0.8, reasons


def test_a_larger_update_is_scaled_down_to_the_multiple_of_the_median():
    found, reasons = settle(Limits(share=None, norm=3.0), updates(FIVE))
    assert found == pytest.approx((1 + 2 + 2 + 3 + 6) / 5)
    assert reasons == {"a": "", "b": "", "c": "", "d": "", "e": "clipped"}


def test_a_larger_update_is_left_out():
    found, reasons = settle(Limits(share=None, norm=3.0, action="leave_out"), updates(FIVE))
    assert found == pytest.approx((1 + 2 + 2 + 3) / 4)
    assert reasons["e"] == "left_out"


@pytest.mark.parametrize("weight", [2.0, 1000.0])
def test_a_share_is_of_the_clients_that_are_not_left_out(weight):
    """Eight of weight 1 and one of 8, beside one whose update is too large."""
    norms = dict.fromkeys("abcdefgh", 1.0) | {"i": 2.0, "j": 100.0}
    limits = Limits(share=0.3, norm=3.0, action="leave_out")
    found, reasons = settle(limits, updates(norms, {"i": 8.0, "j": weight}))
    assert found == pytest.approx(0.7 * 1 + 0.3 * 2)
    assert (reasons["i"], reasons["j"]) == ("capped", "left_out")


def test_a_client_that_claims_too_much_and_is_left_out_is_not_counted():
    limits = LimitedRounds(Limits(action="leave_out"), deployed=True)
    limits.claims = {"e": 10**9}
    _, reasons = settle(limits, updates(FIVE))
    assert reasons["e"] == "capped+left_out"
    row = {"split": "train", "loss": 1.0, "bytes_down": 0, "bytes_up": 0}
    rows = [{**row, "client": name, "reason": reason} for name, reason in reasons.items()]
    assert round_metrics(rows, 5)["clients"] == 4


def test_of_two_updates_the_smaller_one_is_the_median():
    assert settle(Limits(share=None, norm=2.0), updates({"a": 1.0, "b": 100.0}))[0] == pytest.approx(1.5)


def test_a_majority_that_has_not_moved_holds_the_model():
    found, reasons = settle(Limits(), updates({"a": 0.0, "b": 0.0, "c": 9.0}))
    assert (found, reasons["c"]) == (0.0, "clipped")


def test_a_heavier_client_has_the_share_of_the_limit():
    """Nine of weight 1 and one of 1000: with 0.3 of the sum it weighs 9 * 0.3 / 0.7."""
    norms = dict.fromkeys("abcdefghi", 1.0) | {"j": 2.0}
    found, reasons = settle(Limits(share=0.3), updates(norms, {"j": 1000.0}))
    assert found == pytest.approx(0.7 * 1 + 0.3 * 2)
    assert reasons["j"] == "capped"
    assert {*reasons.values()} == {"", "capped"}


@pytest.mark.parametrize(("clients", "share"), [(2, 1000 / 1001), (3, 2 / 3), (4, 0.5), (5, 0.4)])
def test_a_small_round_has_twice_an_even_share(clients, share):
    norms = {f"c{i}": 1.0 for i in range(clients - 1)} | {"heavy": 2.0}
    found, _ = settle(Limits(share=0.3), updates(norms, {"heavy": 1000.0 * (clients - 1)}))
    assert found == pytest.approx(1 + share)


def test_updates_of_other_tensors_have_shares_of_their_own():
    """Of two clients that send the first tensor alone, none can have less than the other."""
    first, second = ({name: torch.ones(1).double()} for name in ("first", "second"))
    given = [Update("a", first, 1.0), Update("b", first, 50.0)]
    given += [Update(name, second, 50.0) for name in "cdef"]
    _, reasons = collect(Limits(share=0.3), given)
    assert reasons == dict.fromkeys("abcdef", "")


def test_the_order_of_the_clients_changes_no_bit():
    found = {settle(Limits(), order)[0] for order in itertools.permutations(updates(FIVE, {"b": 20.0}))}
    assert len(found) == 1


@pytest.mark.parametrize("where", [{}, {"wrapped": True}, {"algorithms": True}])
def test_a_robust_aggregation_has_no_weights_to_limit_and_a_private_one_no_limits(where):
    _, reasons = settle(Limits(), updates(FIVE, {"b": 1e9}), aggregation=CoordinateMedian(), **where)
    assert reasons == {"a": "", "b": "", "c": "", "d": "", "e": "clipped"}
    given = dict.fromkeys("abcd", 5.0) | {"e": 90.0}
    found, reasons = settle(Limits(norm=2.0), updates(given), aggregation=PrivateMean(1.0, 0.0), **where)
    assert found == pytest.approx(1.0)
    assert not any(reasons.values())


def test_a_run_that_warns_adds_up_the_same_bits_and_holds_nothing(caplog):
    run = LimitedRounds(Limits(norm=3.0), deployed=False)
    given = updates(FIVE, {"a": 40.0})
    plain = WeightedSum("weight")
    for one in given:
        plain.add(one)
    found, reasons = settle(run, given)
    assert found == plain.result()["w"].item() / 0.8
    assert reasons == {"a": "large_share", "b": "", "c": "", "d": "", "e": "large_norm"}
    settle(run, given, round_idx=1)
    assert len(caplog.records) == 2
    said = (
        "round 1: the update of client e has 2.31e+18 times the median norm of the round; it counts as it is"
    )
    assert said in caplog.text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("share", 0),
        ("share", 1.5),
        ("norm", 0.9),
        ("norm", math.inf),
        ("action", "drop"),
        ("empty_rounds", 0),
    ],
)
def test_values_out_of_their_range_are_refused(name, value):
    with refusal(rf"\b{name}="):
        Limits(**{name: value})


class Exploding(Regression):
    """The loss of one client is a million times as large; numbers stay finite."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * 1e6 if self.loop.visit.client_id == "c4" else loss


def run(rounds, **loop):
    torch.manual_seed(0)
    module = Exploding(dropout=0.0, optimizer="SGD", lr=1e-3)
    module.loop = FederatedLoop(**{"clients_per_round": 10, "local_steps": 1} | loop)
    fit = trainer(rounds, [module.loop])
    fit.fit(module, FederatedWrapper(Numbers(), ten_clients))
    return module, module.loop.visit_records, fit


def test_an_emulated_client_whose_loss_explodes_gets_a_reason_and_a_word(caplog):
    module, rows, fit = run(1)
    off, _, _ = run(1, limits=Limits(share=None, norm=None))
    assert_equal(weights(module), weights(off))
    assert {row["client"]: row["reason"] for row in rows if row["reason"]} == {"c4": "large_norm"}
    assert caplog.text.count("the update of client c4 has") == 1
    assert fit.callback_metrics["fed/clients"] == 10


def test_limits_can_be_enforced_in_the_emulator():
    _, rows, fit = run(1, limits=Limits(action="leave_out", enforce=True))
    assert {row["client"]: row["reason"] for row in rows if row["reason"]} == {"c4": "left_out"}
    assert fit.callback_metrics["fed/clients"] == 9


@pytest.mark.parametrize("enforce", [False, True])
def test_a_round_with_too_few_updates_for_krum_makes_no_step_and_ends_no_run(enforce, tmp_path, caplog):
    fleet = make_fleet(tmp_path, phone={}, tiny={"memory_gib": "0.000000001"})
    after = [{}]

    class Watch(Part):
        def after_round(self, run, metrics):
            after.append(weights(run.lightning_module))

    more = {"fleet": fleet, "clients_per_round": 4, "aggregation": Krum(0.0), "parts": [Watch()]}
    rows, _, _, fit = rounds_of(6, limits=Limits(enforce=enforce), **more)
    reasons = [{row["reason"] for row in rows if row["round"] == idx} - {"out_of_memory"} for idx in range(6)]
    assert {*map(frozenset, reasons)} >= {frozenset({"too_few"}), frozenset({""})}
    for reason, (before, now) in zip(reasons[1:], pairwise(after[1:]), strict=True):
        same = all(torch.equal(before[name], now[name]) for name in now)
        assert same == (reason != {""})
    assert fit.callback_metrics["fed/clients"] == sum(
        row["reason"] == "" for row in rows if row["round"] == 5
    )
    assert "updates are left out: Krum needs 2 f + 3 = 3 updates" in caplog.text


def test_buffered_rounds_are_limited_as_others(tmp_path):
    more = {"fleet": with_buffer(make_fleet(tmp_path, phone={}), FedBuff(4))}
    rows, *_ = rounds_of(3, clients_per_round=6, limits=Limits(norm=1.0, enforce=True), **more)
    for idx in range(3):
        assert "clipped" in {row["reason"] for row in rows if row["round"] == idx}


def test_rounds_without_a_client_end_the_run(tmp_path):
    tiny = make_fleet(tmp_path, tiny={"memory_gib": "0.000000001"})
    with refusal(r"5 rounds in a row, the last of them round 5.*out_of_memory \(15\)"):
        rounds_of(6, fleet=tiny)
    _, _, loop, _ = rounds_of(6, fleet=tiny, limits=Limits(empty_rounds=None))
    assert loop.rounds_done == 6
    with refusal(r"2 rounds in a row, the last of them round 2"):
        rounds_of(6, fleet=tiny, limits=Limits(empty_rounds=2))


def test_devices_that_are_absent_are_waited_for_a_day():
    run = LimitedRounds(Limits(), deployed=False)
    rows = [{"client": "a", "reason": "absent"}]
    for done in range(1, 145):  # ten minutes each
        run.count(done, rows, {"clients": 0.0}, 600.0 * done)
    with refusal(r"145 rounds in a row.*absent \(145\)"):
        run.count(145, rows, {"clients": 0.0}, 600.0 * 145)


def test_a_client_in_between_counts_anew():
    run = LimitedRounds(Limits(empty_rounds=2), deployed=True)
    rows = [{"client": "a", "reason": "late"}]
    for done in range(1, 10):
        run.count(done, rows, {"clients": float(done % 2)}, 0.0)
    with refusal(r"2 rounds in a row.*late \(2\)"):
        [run.count(done, rows, {"clients": 0.0}, 0.0) for done in (10, 11)]
