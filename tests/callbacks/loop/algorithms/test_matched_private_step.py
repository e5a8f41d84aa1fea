import pytest
import torch
from plain_lightning import module, ten_clients, weights
from synthesizing import Synthesizing, run

from fedlight import FedAvg, FewFedPIT
from fedlight.federation import Average

BETAS = (0.25, 0.5, 0.75)


def without_candidates():
    return Synthesizing(without=tuple(ten_clients(None)))


def close(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("beta", BETAS)
def test_without_candidates_it_is_fedavg_with_a_server_rate_of_beta(beta):
    pit, _, _ = run(FewFedPIT(beta), rounds=3, data=without_candidates())
    avg, _, _ = run(FedAvg(), rounds=3, server=Average(beta))
    plain, _, _ = run(FedAvg(), rounds=3)
    close(weights(pit), weights(avg))
    assert not torch.allclose(weights(pit)["net.0.weight"], weights(plain)["net.0.weight"], atol=1e-3)


@pytest.mark.parametrize("beta", BETAS)
def test_without_candidates_a_server_rate_of_one_over_beta_makes_it_fedavg(beta):
    pit, _, _ = run(FewFedPIT(beta), rounds=3, data=without_candidates(), server=Average(1 / beta))
    avg, _, _ = run(FedAvg(), rounds=3)
    close(weights(pit), weights(avg))


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("matched", [False, True])
def test_a_round_is_the_private_step_and_a_share_of_the_public_one(beta, matched):
    """w + lr (beta P + (1 - beta) Q), with P of FedAvg and Q of beta = 0, whose candidates and choices are the same."""
    start = weights(module())
    lr = 1 / beta if matched else 1.0
    private, public, both = (
        weights(run(algorithm, rounds=1, **more)[0])
        for algorithm, more in (
            (FedAvg(), {}),
            (FewFedPIT(0.0), {}),
            (FewFedPIT(beta), {"server": Average(lr)}),
        )
    )
    expected = {
        name: value + lr * (beta * (private[name] - value) + (1 - beta) * (public[name] - value))
        for name, value in start.items()
    }
    close(both, expected)
    assert not torch.allclose(public["net.0.weight"], start["net.0.weight"], atol=1e-3)
