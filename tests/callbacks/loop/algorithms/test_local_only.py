from plain_lightning import federate

from fedlight import LocalOnly


def test_the_model_is_sent_once_and_nothing_comes_back():
    _, loop = federate(rounds=1, algorithm=LocalOnly(), clients_per_round=10)
    assert all(r["bytes_down"] > 0 and r["bytes_up"] == 0 for r in loop.visit_records)
    _, loop = federate(rounds=2, algorithm=LocalOnly(), clients_per_round=10)
    assert all(r["bytes_down"] == r["bytes_up"] == 0 for r in loop.visit_records)
    assert federate(rounds=1, algorithm=LocalOnly(), clients_per_round=1)[1].own_state("c5") is None
