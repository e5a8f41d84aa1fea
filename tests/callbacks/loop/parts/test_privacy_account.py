import itertools
import logging
import math
from collections import Counter
from types import SimpleNamespace

import pytest
from budgets import budget
from fleets import make_fleet
from plain_lightning import Metrics, assert_equal, federate, module, weights
from refusals import refusal

from fedlight import Quantize, Wire
from fedlight.callbacks.loop.parts.privacy_account import PrivacyAccount
from fedlight.federation.asynchronous import FedBuff
from fedlight.federation.client import Identity, Update, cohort_in_turn, uniform_cohort
from fedlight.federation.privacy import (
    ClipAndNoise,
    PrivateMean,
    gaussian_epsilon,
    root_coefficients,
    sampled_epsilon,
)


def most_often_asked(rounds):
    """Return in how many rounds the client takes part that has the most of them."""
    cohorts = [uniform_cohort([f"c{i}" for i in range(10)], 3, 0, round_idx) for round_idx in range(rounds)]
    return max(Counter(itertools.chain(*cohorts)).values())


@pytest.mark.parametrize("delta", [1e-2, 1e-8])
def test_both_epsilons_are_logged_at_their_own_delta(delta):
    watch = Metrics("epsilon", "delta")
    federate(
        rounds=2,
        callbacks=[watch],
        aggregation=PrivateMean(1.0, 4.0, delta=delta),
        channel=Wire(up=[ClipAndNoise(1.0, 8.0, delta=delta / 2), Quantize("int8")]),
        clients_per_round=3,
    )
    for number, found in enumerate(watch.rounds, start=1):
        expected = {
            "fed/epsilon": sampled_epsilon(4.0, delta, [(3, 10)] * number),
            "fed/epsilon_local": gaussian_epsilon(8.0, delta / 2, most_often_asked(number)),
            "fed/delta": delta,
            "fed/delta_local": delta / 2,
        }
        assert found == pytest.approx(expected, rel=1e-5)
    assert watch.rounds[0]["fed/epsilon"] != pytest.approx(sampled_epsilon(4.0, 1e-5, [(3, 10)]), rel=0.01)


def test_a_run_without_privacy_says_nothing_of_it():
    watch = Metrics("epsilon", "delta")
    federate(rounds=1, callbacks=[watch], channel=Wire(up=[Quantize("int8")]))
    assert watch.rounds == [{}]
    assert not PrivacyAccount(None, Identity()).is_private


def test_a_delta_that_would_let_a_client_be_given_away_is_refused():
    """Ten clients: one of them whole, drawn by lot, would be private at a delta of 0.1."""
    message = "PrivateMean: delta=0.1 is not below one over the 10 clients.*: set it to 1e-02 or less"
    with refusal(message):
        federate(rounds=1, aggregation=PrivateMean(1.0, 1.0, delta=0.1))
    account = PrivacyAccount(None, Wire(up=[ClipAndNoise(1.0, 1.0)]))
    account.meet(SimpleNamespace(clients=range(99_999)))
    with refusal("ClipAndNoise: delta=1e-05 is not below one over the 100,000 clients"):
        account.meet(SimpleNamespace(clients=range(100_000)))


def test_without_noise_there_is_no_epsilon():
    account = PrivacyAccount(PrivateMean(1.0, 0.0), Identity())
    assert account.after("ab", 10) == {"epsilon": math.inf, "delta": 1e-5}


def central(epsilon=8.0):
    return PrivateMean(1.0, delta=0.01, epsilon=epsilon)


def test_the_noise_follows_from_an_epsilon_and_the_rounds(caplog):
    caplog.set_level(logging.INFO)
    mean = central()
    after, loop, logged = budget(3, aggregation=mean)
    assert mean.noise == loop.privacy.noise[""] == central().noise_for([(3, 10)] * 3)
    assert (
        f"noise_multiplier={mean.noise:.5g} keeps epsilon=8 at delta=0.01 for 3 rounds of 3 of 10"
        in caplog.text
    )
    assert 0.999 * 8 < logged[-1]["fed/epsilon"] <= 8
    assert "ends here" not in caplog.text
    given, _, _ = budget(3, aggregation=PrivateMean(1.0, mean.noise, delta=0.01))
    assert_equal(after, given)


def test_a_run_that_goes_on_keeps_its_noise_and_ends_at_its_budget(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    whole, _, _ = budget(3, aggregation=central())
    _, made, _ = budget(3, tmp_path / "two.ckpt", stops_after=2, aggregation=central())
    assert made.rounds_done == 2
    # More rounds than planned: the noise stays, and the budget ends the run where it was planned to end.
    longer, loop, logged = budget(7, tmp_path / "three.ckpt", tmp_path / "two.ckpt", aggregation=central())
    assert_equal(longer, whole)
    assert loop.rounds_done == 3
    assert loop.privacy.noise == made.privacy.noise
    assert len(logged) == 1
    [line] = [record.getMessage() for record in caplog.records if "ends here" in record.getMessage()]
    assert line.startswith("PrivateMean: round 4 would exceed epsilon=8, of which ")
    assert "for 7 rounds start a new run" in line
    # Once more: nothing is trained, and the same line says why.
    caplog.clear()
    again, loop, logged = budget(7, None, tmp_path / "three.ckpt", aggregation=central())
    assert_equal(again, whole)
    assert (loop.rounds_done, logged) == (3, [])
    assert sum("ends here" in record.getMessage() for record in caplog.records) == 1


def test_a_budget_is_not_exceeded_for_min_epochs(tmp_path):
    budget(2, tmp_path / "two.ckpt", aggregation=central())
    with refusal(r"round 3 would exceed epsilon=8.*: set trainer.min_epochs=2 or less"):
        budget(5, None, tmp_path / "two.ckpt", {"min_epochs": 4}, aggregation=central())


def test_a_budget_towards_the_server():
    """The server knows who takes part, so the rounds of one client count; the noise is that of the Gaussian mechanism."""
    noised = ClipAndNoise(1.0, delta=0.01, epsilon=20.0)
    times = most_often_asked(6)
    assert 1 < times < 6
    _, loop, logged = budget(6, channel=Wire(up=[noised, Quantize("int8")]))
    assert loop.privacy.noise == {"_local": noised.noise}
    assert 0.999 * 20 < logged[-1]["fed/epsilon_local"] <= 20
    expected = gaussian_epsilon(noised.noise, 0.01, times)
    assert logged[-1]["fed/epsilon_local"] == pytest.approx(expected, rel=1e-5)
    assert sum(loop.privacy.asked.values()) == 6 * 3


def run_of(clients, num_asked, num_rounds):
    """What an account asks of a run that begins."""
    planned = SimpleNamespace(num_asked=num_asked)
    return SimpleNamespace(clients=clients, planned=planned, num_rounds=num_rounds, round_idx=0, records=[])


def test_a_round_of_more_clients_ends_a_run_earlier():
    """Epsilon of the rounds that there are counts, not of those that were planned."""
    account, run = PrivacyAccount(central(), Identity()), run_of(range(10), 3, 5)
    run.planned.asked = lambda round_idx: [SimpleNamespace(id=name) for name in range(run.planned.num_asked)]
    run.trainer = SimpleNamespace(should_stop=False)
    account.attach(run)
    run.planned.num_asked = 9
    while not run.trainer.should_stop:
        account.start_round(run)
        account.finish_round(run, None, {})
        run.round_idx += 1
        account.after_round(run, {})
    spent = account._parts[""].spent(account.rounds)
    assert spent <= 8 < account._parts[""].spent({(9, 10): run.round_idx + 1})
    assert run.round_idx < 5


def test_a_new_run_begins_with_the_first_clipping_norm():
    metrics, mean = Metrics("clip_norm"), PrivateMean(0.05, 0.5, delta=0.01, clip_quantile=0.5)
    first, again = (weights(federate(3, callbacks=[metrics], aggregation=mean)[0]) for _ in range(2))
    logged = [row["fed/clip_norm"] for row in metrics.rounds]
    assert_equal(first, again)
    assert logged[3:] == logged[:3]
    assert len({0.05, *logged}) == 4
    assert logged[-1] == pytest.approx(mean.norm)


def test_what_a_broken_round_has_left_in_a_mean_is_not_in_the_next_run():
    mean = PrivateMean(1.0, 1.0)
    mean.add(Update("c5", {name: value.clone() for name, value in module().state_dict().items()}, 1.0))
    used, _ = federate(rounds=1, clients_per_round=10, aggregation=mean)
    fresh, _ = federate(rounds=1, clients_per_round=10, aggregation=PrivateMean(1.0, 1.0))
    assert_equal(weights(used), weights(fresh))


def test_noise_of_a_run_without_rounds_is_found_anew():
    account, run = PrivacyAccount(central(), Identity()), run_of("abcde", 3, 2)
    account.attach(run)
    few = account.noise[""]
    run.num_rounds = 20
    account.attach(run)
    assert account.noise[""] > 1.5 * few


def in_turn(bands=3, **settings):
    return PrivateMean(1.0, delta=0.01, bands=bands, **(settings or {"epsilon": 20.0}))


def cohorts_in_turn(size, rounds):
    return [cohort_in_turn([f"c{i}" for i in range(10)], size, 0, idx) for idx in range(rounds)]


def test_an_epsilon_of_clients_in_turn_is_that_of_their_rounds(caplog):
    caplog.set_level(logging.INFO)
    mean = in_turn()
    _, loop, logged = budget(8, aggregation=mean)
    cohorts = cohorts_in_turn(3, 8)
    times = Counter(itertools.chain(*cohorts))
    assert loop.privacy.asked == times
    assert max(times.values()) == 3
    norm = math.hypot(*root_coefficients(3))
    for number, found in enumerate(logged, start=1):
        most = max(Counter(itertools.chain(*cohorts[:number])).values())
        expected = gaussian_epsilon(mean.noise / norm, 0.01, most)
        assert found["fed/epsilon"] == pytest.approx(expected, rel=1e-5)
    assert 0.999 * 20 < logged[-1]["fed/epsilon"] <= 20
    assert "keeps epsilon=20 at delta=0.01 for 8 rounds of 3 of 10 clients" in caplog.text


def test_a_mean_that_was_used_in_another_run_begins_anew():
    whole, mean, logged = budget(6, aggregation=in_turn(noise_multiplier=1.0))
    used = mean.aggregation
    assert all(len(noises) == 2 for noises in used.earlier.values())
    again, _, relogged = budget(6, aggregation=used)
    assert_equal(again, whole)
    assert relogged == logged
    independent, _, _ = budget(6, aggregation=in_turn(bands=1, noise_multiplier=1.0))
    assert any(not bool((independent[name] == whole[name]).all()) for name in whole)


def test_a_budget_of_clients_in_turn_ends_a_run(tmp_path):
    """Four rounds have a client twice; so have the next two, and then one would come for the third time."""
    budget(4, tmp_path / "four.ckpt", aggregation=in_turn())
    _, loop, logged = budget(12, None, tmp_path / "four.ckpt", aggregation=in_turn())
    assert loop.rounds_done == 6
    assert max(loop.privacy.asked.values()) == 2
    assert logged[-1]["fed/epsilon"] <= 20


def test_turns_that_follow_each_other_too_closely_are_refused():
    message = (
        "bands=4 needs as many rounds from one of a client to its next, and with 3 of 10 clients in a round there are 3: "
        "set bands=3 or less"
    )
    with refusal(message):
        federate(rounds=1, aggregation=in_turn(4))
    federate(rounds=1, clients_per_round=10, aggregation=in_turn(1))


def test_turns_are_those_of_all_that_are_asked(tmp_path):
    """More clients are asked than have to remain: their turns count, whoever comes through."""
    fleet = make_fleet(tmp_path, over_selection=1.3, fast={})
    with refusal("with 4 of 10 clients in a round there are 2"):
        federate(rounds=1, aggregation=in_turn(3), fleet=fleet)
    _, loop = federate(rounds=5, aggregation=in_turn(2), fleet=fleet)
    assert loop.privacy.rounds == {(4, 10): 5}
    assert loop.privacy.asked == Counter(itertools.chain(*cohorts_in_turn(4, 5)))


def test_buffered_rounds_have_no_turns(tmp_path):
    fleet = make_fleet(tmp_path, buffered=FedBuff(buffer_size=2), fast={})
    with refusal("devices decide who arrives when"):
        federate(rounds=1, aggregation=in_turn(2), fleet=fleet)


def test_a_client_that_is_asked_too_early_is_refused():
    """With other clients there are other turns: the order of those that were there does not tell who may come."""
    account = PrivacyAccount(in_turn(3, noise_multiplier=1.0), Identity())
    turns = iter([["a", "b"], ["c", "d"], ["e", "a"]])
    run = run_of("abcdef", 2, 9)
    account.attach(run)
    for run.round_idx in range(3):
        cohort = [SimpleNamespace(id=name) for name in next(turns)]
        run.planned.asked = lambda round_idx, cohort=cohort: cohort
        if run.round_idx == 2:
            break
        account.start_round(run)
        account.finish_round(run, None, {})
    again = PrivacyAccount(in_turn(3, noise_multiplier=1.0), Identity())
    again.load_state_dict(account.state_dict())
    for each in (account, again):
        with refusal("round 3 asks client 'a' again before bands=3 rounds are over"):
            each.start_round(run)
