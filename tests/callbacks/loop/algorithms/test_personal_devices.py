import pytest
from fleets import make_fleet
from plain_lightning import assert_equal
from stacked import Points, fit
from two_parts import TwoParts, weights

from fedlight.federation.algorithms import Ditto, FedRep, GlobalThenLocal

ALGORITHMS = {
    "Ditto": lambda: Ditto(0.5, personal_epochs=2),
    "FedRep": lambda: FedRep(head_epochs=3),
    "FedPer": lambda: FedRep(together=True),
    "GlobalThenLocal": lambda: GlobalThenLocal(1),
}
COSTS = ("bytes_down", "bytes_up", "split", "client", "round", "steps")


def costs(rows):
    """Return what does not depend on the device, in an order that does not depend on it either."""
    found = [{name: row[name] for name in COSTS} for row in rows]
    return sorted(found, key=lambda row: (row["round"], row["client"], row["split"]))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_costs_are_those_that_were_planned_and_weights_those_without_devices(name, tmp_path, caplog):
    plain, module = TwoParts(), TwoParts()
    _, rows, _, alone = fit(plain, Points(), rounds=3, clients_per_round=3, algorithm=ALGORITHMS[name]())
    fleet = make_fleet(tmp_path, slow={"tflops": 0.001}, fast={})
    options = {"rounds": 3, "clients_per_round": 3, "algorithm": ALGORITHMS[name](), "fleet": fleet}
    _, others, _, loop = fit(module, Points(), **options)
    assert "was to send" not in caplog.text
    assert_equal(weights(module), weights(plain))
    for client in loop.clients:
        assert (loop.own_state(client) is None) == (alone.own_state(client) is None)
        if loop.own_state(client) is not None:
            assert_equal(loop.own_state(client), alone.own_state(client))
    assert costs(others) == costs(rows)
    by_part = {}
    for row in others:
        by_part.setdefault((row["client"], row["split"]), set()).add(row["flops"])
    for (client, split), flops in by_part.items():
        factor = {"personal": 2, "head": 3}.get(split)
        if factor:
            assert flops == {factor * one for one in by_part[client, "train"]}
