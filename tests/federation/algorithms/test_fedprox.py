from types import SimpleNamespace

import pytest
import torch
from plain_lightning import assert_equal, federate, weights
from refusals import refusal
from torch import nn
from written_out import assert_close, combined, local, recorded

from fedlight import Client, FedProx, Visit

CLIENT, VISIT = Client("a", 1, 1.0), Visit("a", 1)


def test_only_what_was_received_and_has_a_gradient_is_held():
    prox, received = FedProx(mu=0.1), {"w": torch.tensor([1.0]), "b": torch.tensor([2.0])}
    parameters = {name: torch.tensor([value]) for name, value in {"w": 6.0, "b": 9.0, "other": 9.0}.items()}
    gradients = {"w": torch.tensor([3.0]), "other": torch.tensor([1.0])}
    prox.adjust_gradients(prox.start_visit(VISIT, CLIENT, received), parameters, gradients)
    assert gradients["w"].item() == pytest.approx(3.0 + 0.1 * (6 - 1))
    assert list(gradients) == ["w", "other"]
    assert gradients["other"].item() == 1.0
    assert parameters["w"].item() == 6.0


def test_a_layer_that_a_step_leaves_out_is_pulled_back_from_where_it_has_moved():
    prox = FedProx(mu=0.5)
    visiting = prox.start_visit(VISIT, CLIENT, {"w": torch.tensor([1.0]), "still": torch.tensor([1.0])})
    prox.adjust_gradients(visiting, {"w": torch.tensor([1.0])}, {"w": torch.tensor([3.0])})
    gradients = {}
    prox.adjust_gradients(visiting, {"w": torch.tensor([5.0]), "still": torch.tensor([1.0])}, gradients)
    assert {name: value.item() for name, value in gradients.items()} == {"w": 0.5 * (5 - 1)}


def test_a_bf16_parameter_starts_without_a_pull():
    prox, received = FedProx(mu=1.0), {"w": torch.tensor([1.001])}
    w = received["w"].bfloat16()
    gradient = torch.ones_like(w)
    prox.adjust_gradients(prox.start_visit(VISIT, CLIENT, received), {"w": w}, {"w": gradient})
    assert gradient.item() == 1.0


@pytest.mark.parametrize("weighting", ["unbiased", "normalized", "uniform"])
def test_a_federation_equals_a_loop_written_out(weighting):
    start, end, rounds = recorded(algorithm=FedProx(mu=0.8, weighting=weighting))
    plain = state = start
    for of_clients in rounds:
        trained, without = {}, {}
        for client, batches in of_clients.items():
            trained[client] = local(state, batches, lambda n, g, now, w=state: g + 0.8 * (now[n] - w[n]))
            without[client] = local(plain, batches)
        state = {n: w + combined(state, trained, weighting)[n] for n, w in state.items()}
        plain = {n: w + combined(plain, without, weighting)[n] for n, w in plain.items()}
    assert_close(end, state)
    assert any(not torch.allclose(end[name], plain[name], atol=1e-3) for name in end)


def test_mu_of_zero_is_fedavg_bit_for_bit():
    assert_equal(weights(federate()[0]), weights(federate(algorithm=FedProx(mu=0.0))[0]))


@pytest.mark.parametrize("mu", [-0.1, float("nan"), float("inf")])
def test_mu_out_of_range(mu):
    with refusal(rf"mu={mu} must be at least 0"):
        FedProx(mu)


def test_optimizers_that_would_make_something_else_of_the_term_are_refused():
    weight = [nn.Parameter(torch.zeros(1))]

    def check(optimizer, mu=0.1):
        FedProx(mu).check(SimpleNamespace(module=nn.Module(), optimizers=[optimizer]))

    check(torch.optim.LBFGS(weight))
    searching = torch.optim.LBFGS(weight, line_search_fn="strong_wolfe")
    with refusal(r"LBFGS with line_search_fn='strong_wolfe' .* set line_search_fn=None"):
        check(searching)
    check(searching, mu=0.0)
    with refusal("Adam has maximize=True"):
        check(torch.optim.Adam(weight, maximize=True))
