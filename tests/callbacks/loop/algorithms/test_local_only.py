import torch
from plain_lightning import assert_equal, federate, module, ten_clients, weights

from fedlight import FedAvg, LocalOnly


def test_the_global_model_stays_and_each_client_has_its_own():
    start = weights(module())
    model, loop = federate(rounds=3, algorithm=LocalOnly(), clients_per_round=10)
    assert_equal(weights(model), start)
    own = {client: loop.own_state(client) for client in loop.clients}
    assert all(not torch.equal(state["net.0.weight"], start["net.0.weight"]) for state in own.values())
    assert not torch.equal(own["c0"]["net.0.weight"], own["c1"]["net.0.weight"])


def test_a_clients_model_is_that_of_a_federation_of_it_alone():
    """With plain SGD without dropout, which remember nothing and draw nothing."""
    plain = {"optimizer": "SGD", "dropout": 0.0}
    _, loop = federate(3, algorithm=LocalOnly(), clients_per_round=10, model=module(**plain))
    for client in ("c0", "c3", "c9"):
        alone, _ = federate(
            3,
            clients=lambda dataset, client=client: {client: ten_clients(dataset)[client]},
            algorithm=FedAvg(),
            clients_per_round=1,
            model=module(**plain),
        )
        assert_equal(loop.own_state(client), weights(alone))


def test_the_model_is_sent_once_and_nothing_comes_back():
    _, loop = federate(rounds=1, algorithm=LocalOnly(), clients_per_round=10)
    assert all(r["bytes_down"] > 0 and r["bytes_up"] == 0 for r in loop.visit_records)
    _, loop = federate(rounds=2, algorithm=LocalOnly(), clients_per_round=10)
    assert all(r["bytes_down"] == r["bytes_up"] == 0 for r in loop.visit_records)
    assert federate(rounds=1, algorithm=LocalOnly(), clients_per_round=1)[1].own_state("c5") is None
