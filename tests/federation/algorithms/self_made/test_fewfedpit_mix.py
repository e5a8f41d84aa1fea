import pytest
import torch

from fedlight.federation.algorithms.self_made.fewfedpit import FewFedPIT, mixed
from fedlight.federation.client import Client, Visit
from fedlight.federation.payloads import predict_payloads


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"beta": 1.5}, "beta=1.5 must be in"),
        ({"beta": -0.1}, "beta=-0.1 must be in"),
        ({"beta": float("nan")}, "beta=nan must be in"),
        ({"scorer": "ifs"}, "scorer='ifs' is not one of"),
        ({"weighting": "loudest"}, "weighting='loudest'"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        FewFedPIT(**settings)


def test_a_private_model_that_has_diverged_does_not_get_through_a_beta_of_zero():
    lost = {"w": torch.tensor([float("nan")])}
    assert torch.equal(mixed(lost, {"w": torch.tensor([2.0])}, beta=0.0)["w"], torch.tensor([2.0]))


def test_the_mix_of_equal_adapters_is_that_adapter_bit_for_bit():
    w = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    for beta in (0.1, 0.3, 1 / 3, 0.5, 0.9, 1.0):
        assert torch.equal(mixed({"w": w}, {"w": w}, beta)["w"], w)


def test_by_hand():
    private, public = {"w": torch.tensor([4.0, -2.0])}, {"w": torch.tensor([0.0, 2.0])}
    assert mixed(private, public, beta=0.75)["w"].tolist() == [3.0, -1.0]
    assert mixed(private, public, beta=1.0)["w"].tolist() == [4.0, -2.0]


def test_before_anybody_was_asked_for_candidates_a_client_has_one_visit_both_ways():
    """As Lightning needs a loader before the model is there, and as a plan of devices asks without a run."""
    algorithm, client, state = FewFedPIT(0.5), Client("a", 4, 1.0), {"w": torch.zeros(1)}
    (sent,) = predict_payloads(algorithm, [Visit("a", 3)], client, state)
    assert [{n: v.shape for n, v in way.items()} for way in (sent.down, sent.up)] == [{"w": (1,)}] * 2
    assert algorithm.plan(0, [client], lambda client_id, split="train": 3) == [Visit("a", 3)]
