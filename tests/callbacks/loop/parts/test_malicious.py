import logging

import pytest
import torch
from lora_runs import run as run_lora
from plain_lightning import States, assert_equal, federate, module, weights
from refusals import refusal
from stacked import Lora as PointsModule
from stacked import Points, fit
from thread_team import on_team
from written_out import SHARES, assert_close, local, recorded

from fedlight import FedAvg
from fedlight.callbacks.loop.parts import Limits, Malicious
from fedlight.federation.algorithms.lora import HetLoRA, ProductAverage
from fedlight.federation.byzantine import FLTrust, Liars
from fedlight.federation.forward import FedKSeed, ZerothOrder
from fedlight.flower.parts import refuse_unsupported

GIVEN = Liars(clients=["c1", "c4", "c6"])


@pytest.mark.parametrize(
    ("lie", "factor", "times"), [("flip", 1.0, -1), ("flip", 3.0, -3), ("scale", 5.0, 5)]
)
def test_a_federation_with_liars_equals_a_loop_written_out(lie, factor, times, caplog):
    caplog.set_level(logging.INFO)
    start, end, rounds = recorded(
        rounds=3, clients_per_round=10, algorithm=FedAvg("normalized"), parts=[Malicious(lie, factor, GIVEN)]
    )
    assert f"3 of 10 clients lie ({lie}, {factor:g} times): c1, c4, c6" in caplog.text
    state = start
    for of_clients in rounds:
        total = {name: torch.zeros_like(value) for name, value in state.items()}
        for client, batches in of_clients.items():
            trained = local(state, batches)
            for name in state:
                said = times if client in GIVEN.clients else 1
                total[name] += SHARES[client] * said * (trained[name] - state[name])
        state = {name: value + total[name] for name, value in state.items()}
    assert_close(end, state)


def test_the_lie_is_what_attacks_and_limits_see():
    honest, lying = States(), States()
    start = weights(module())
    settings = {"rounds": 1, "clients_per_round": 10}
    federate(callbacks=[honest], **settings)
    _, loop = federate(
        callbacks=[lying],
        parts=[Malicious("scale", 50.0, GIVEN)],
        limits=Limits(share=None, norm=3.0, enforce=True),
        **settings,
    )
    for key, state in lying.seen.items():
        times = 50 if key[1] in GIVEN.clients else 1
        for name, value in state.items():
            expected = start[name] + times * (honest.seen[key][name] - start[name])
            torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5)
    reasons = {row["client"]: row["reason"] for row in loop.visit_records}
    assert {client for client, reason in reasons.items() if reason == "clipped"} == {*GIVEN.clients}


def test_noise_depends_on_seed_round_and_client_alone():
    def said(seed, clients_per_round=10):
        uploads = States()
        part = Malicious("noise", 2.0, Liars(clients=GIVEN.clients, seed=seed))
        federate(rounds=1, callbacks=[uploads], parts=[part], clients_per_round=clients_per_round)
        return {client: state for (_, client), state in uploads.seen.items()}

    one, again, other, few = said(0), said(0), said(1), said(0, clients_per_round=6)
    for client in one:
        assert_equal(one[client], again[client])
        is_same = torch.equal(one[client]["net.0.weight"], other[client]["net.0.weight"])
        assert is_same == (client not in GIVEN.clients)
    assert {*few} & {*GIVEN.clients}
    for client in few:
        assert_equal(few[client], one[client])


def test_clients_side_by_side_lie_as_one_by_one():
    def run(at_once):
        lies = Malicious("flip", 2.0, Liars(clients=["a", "d"]))
        return fit(PointsModule(), Points(batch_size=3), at_once, 3, local_steps=2, parts=[lies])[0]

    alone, beside = run(1), run(4)
    torch.testing.assert_close(beside, alone, rtol=1e-4, atol=1e-5)


def test_processes_change_no_bit(monkeypatch):
    def run(rank=0):
        return weights(federate(parts=[Malicious("noise", 2.0, GIVEN)], clients_per_round=6)[0])

    whole = run()
    for each in on_team(monkeypatch, 3, run):
        assert_equal(each, whole)


@pytest.mark.parametrize(
    "algorithm",
    [HetLoRA(ranks={"a": 1, "b": 2, "c": 1, "d": 2}), ProductAverage(0.5)],
    ids=["het", "product"],
)
def test_noise_keeps_out_of_the_ranks_that_a_client_lacks(algorithm):
    """Else the loop would refuse the moved zeros."""
    lies = Malicious("noise", 2.0, Liars(share=1.0))
    assert run_lora(algorithm, parts=[lies], rounds=2)


def test_scalars_are_refused():
    with refusal("Malicious lies about parameters, and clients of FedKSeed send scalars"):
        federate(algorithm=FedKSeed(num_seeds=8), forward=ZerothOrder(), parts=[Malicious()])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Malicious("lie"), "lie='lie' is not one of flip, scale, noise"),
        (lambda: Malicious(factor=0.0), "factor=0.0 is the size of a lie and must be above 0"),
        (lambda: Malicious("scale"), "factor=1 sends the honest update: set factor"),
    ],
)
def test_settings_out_of_range(make, message):
    with refusal(message):
        make()
    with refusal(r"liars\.clients has 'nobody', which is no client"):
        federate(parts=[Malicious(liars=Liars(clients=["nobody"]))])


def test_a_deployment_refuses_simulated_lies():
    settings = dict.fromkeys(["fleet", "forward", "channel"]) | {
        "algorithm": FedAvg(),
        "parts": [Malicious()],
    }
    with refusal(r"federated\.parts=Malicious does not work under Flower: lies are simulated"):
        refuse_unsupported(settings)
    refuse_unsupported({**settings, "parts": []})


def test_a_lying_root_of_fltrust_is_refused():
    with refusal("root='c1' is among the liars, and FLTrust follows it"):
        federate(clients_per_round=10, aggregation=FLTrust("c1"), parts=[Malicious(liars=GIVEN)])
