import pytest
from plain_lightning import assert_equal
from stacked import CLIENTS, Points, fit
from two_parts import Recorder, TwoParts, close, mean, share_of, trained, weights

from fedlight import Ditto, FedProx, Quantize, Scaffold, Wire
from fedlight.federation.client import Client, serialized_bytes

LAMBDA = 0.7


def written_out(module, start, rounds, channel=None):
    """Algorithm 1 on recorded batches: eq. 2's gradient is that of F_k(v) + lambda / 2 |v - w^t|^2."""
    state, own = start, {}
    for visits in rounds.values():
        received = state if channel is None else channel.down(state, Client("a", 1, 1.0)).state
        ends, shares = [], []

        def distance(v, anchor=received):
            return LAMBDA / 2 * sum((value - anchor[name]).square().sum() for name, value in v.items())

        for visit, batches in visits:
            client = visit.client_id
            if visit.part == "personal":
                own[client] = trained(module, own.get(client, received), batches, add=distance)
            else:
                ends.append(trained(module, received, batches))
                shares.append(share_of(client, CLIENTS))
        end = mean(ends, shares)
        state = {name: state[name] + end[name] - received[name] for name in state}
    return state, own


@pytest.mark.parametrize(
    ("options", "personal_epochs", "loop"),
    [
        ({}, 1, {}),
        ({"momentum": 0.9, "weight_decay": 0.1}, 2, {}),
        ({}, 1, {"channel": Wire(down=Quantize("int8"))}),
    ],
    ids=["SGD", "momentum and two epochs", "lossy download"],
)
def test_rounds_equal_algorithm_1_written_out(options, personal_epochs, loop):
    """Two of four clients a round; the term is one of the gradient, which for plain SGD is that of eq. 2."""
    seen, module = Recorder(), TwoParts("SGD", **options)
    start, lengths = weights(module), {"": 3, "personal": 3 * personal_epochs}
    algorithm = Ditto(LAMBDA, personal_epochs, "normalized")
    *_, made = fit(
        module, Points(), rounds=4, clients_per_round=2, algorithm=algorithm, callbacks=[seen], **loop
    )
    visits = [own for of_round in seen.visits.values() for own in of_round]
    assert all(len(batches) == lengths[visit.part] for visit, batches in visits)
    state, own = written_out(module, start, seen.visits, loop.get("channel"))
    close(weights(module), state)
    visited = [visit.client_id for visit, _ in visits if visit.part]
    assert len(visited) == 8
    assert max(map(visited.count, visited)) > 1  # a client came back to its own model
    for client in CLIENTS:
        assert (made.own_state(client) is None) == (client not in visited)
        if client in visited:
            close(made.own_state(client), own[client])


def test_the_global_part_may_be_fedprox():
    module, prox, plain = TwoParts(), TwoParts(), TwoParts()
    *_, ditto = fit(module, Points(), rounds=2, algorithm=Ditto(LAMBDA, local=FedProx(0.5)))
    fit(prox, Points(), rounds=2, algorithm=FedProx(0.5))
    assert_equal(weights(module), weights(prox))
    *_, other = fit(plain, Points(), rounds=2, algorithm=Ditto(LAMBDA))
    assert (ditto.own_state("a")["body.weight"] - other.own_state("a")["body.weight"]).abs().max() > 1e-4


def test_the_personal_visit_sends_nothing():
    module = TwoParts()
    _, rows, *_ = fit(module, Points(), rounds=2, algorithm=Ditto())
    sizes = {(row["split"], row["bytes_down"], row["bytes_up"]) for row in rows}
    whole = serialized_bytes(weights(module))
    assert sizes == {("train", whole, whole), ("personal", 0, 0)}
    assert [row["split"] for row in rows[:4]] == ["train", "personal"] * 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Ditto(lam=-1), r"lam=-1 must be at least 0; 0 is local training alone"),
        (lambda: Ditto(lam=float("nan")), "lam=nan"),
        (lambda: Ditto(personal_epochs=0), "personal_epochs=0 must be at least 1"),
        (lambda: Ditto(local=Scaffold()), "local=Scaffold changes .*: inside Ditto a local algorithm may"),
    ],
)
def test_settings_that_cannot_work_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_an_optimizer_that_maximizes_is_refused():
    with pytest.raises(ValueError, match="maximize=True"):
        fit(TwoParts(maximize=True), Points(), rounds=1, algorithm=Ditto())
