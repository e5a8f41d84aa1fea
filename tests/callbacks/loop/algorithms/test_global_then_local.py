import pytest
from plain_lightning import assert_equal, federate
from stacked import CLIENTS, Points, fit
from two_parts import Recorder, TwoParts, close, trained, weights

from fedlight import FedAdam, FedAvg, LocalOnly
from fedlight.federation.algorithms import GlobalThenLocal
from fedlight.federation.client import serialized_bytes


def test_global_rounds_are_fedavg_and_local_rounds_go_on_from_there():
    """Two of four clients a round; in the local ones a client's model is plain training from the last global model."""
    averaged, module, seen = TwoParts(), TwoParts(), Recorder()
    fit(averaged, Points(), rounds=2, algorithm=FedAvg(), clients_per_round=2, server=FedAdam(0.05))
    algorithm = GlobalThenLocal(global_rounds=2)
    more = {"clients_per_round": 2, "server": FedAdam(0.05), "callbacks": [seen]}
    _, rows, _, loop = fit(module, Points(), rounds=5, algorithm=algorithm, **more)
    assert_equal(weights(module), weights(averaged))  # local rounds leave it, and the server's moments, alone
    own = {}
    for round_idx in (2, 3, 4):
        for visit, batches in seen.visits[round_idx]:
            start = own.get(visit.client_id, weights(averaged))
            # A visit begins with a fresh optimizer, so its steps are those of plain training.
            own[visit.client_id] = trained(module, start, batches)
    assert 2 <= len(own) < 4
    for client in CLIENTS:
        if client in own:
            close(loop.own_state(client), own[client])
        else:
            assert loop.own_state(client) is None
    whole, met = serialized_bytes(weights(module)), set()
    for row in rows:
        first, is_local = row["client"] not in met, row["round"] >= 2
        met |= {row["client"]} if is_local else set()
        assert row["bytes_up"] == (0 if is_local else whole)
        assert row["bytes_down"] == (whole if first or not is_local else 0)


def test_runs_without_a_round_of_either_kind_are_refused():
    with pytest.raises(ValueError, match="global_rounds=0 must be at least 1; with none it is LocalOnly"):
        GlobalThenLocal(0)
    with pytest.raises(ValueError, match="global_rounds=2 of the run's 2 rounds leave no local round"):
        fit(TwoParts(), Points(), rounds=2, algorithm=GlobalThenLocal(2))


def test_the_model_is_sent_once_and_nothing_comes_back():
    _, loop = federate(rounds=1, algorithm=LocalOnly(), clients_per_round=10)
    assert all(r["bytes_down"] > 0 and r["bytes_up"] == 0 for r in loop.visit_records)
    _, loop = federate(rounds=2, algorithm=LocalOnly(), clients_per_round=10)
    assert all(r["bytes_down"] == r["bytes_up"] == 0 for r in loop.visit_records)
    assert federate(rounds=1, algorithm=LocalOnly(), clients_per_round=1)[1].own_state("c5") is None
