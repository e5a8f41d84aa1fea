import pytest
import torch

from fedlight.federation.algorithms.self_made.fewfedpit import FewFedPIT, mixed


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


def test_by_hand():
    private, public = {"w": torch.tensor([4.0, -2.0])}, {"w": torch.tensor([0.0, 2.0])}
    assert mixed(private, public, beta=0.75)["w"].tolist() == [3.0, -1.0]
    assert mixed(private, public, beta=1.0)["w"].tolist() == [4.0, -2.0]
    diverged = {"w": torch.tensor([float("nan"), 1.0])}
    assert mixed(diverged, public, beta=0.0)["w"].tolist() == [0.0, 2.0]
    w = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    for beta in (0.1, 0.3, 1 / 3, 0.5, 0.9, 1.0):  # of equal adapters bit for bit
        assert torch.equal(mixed({"w": w}, {"w": w}, beta)["w"], w)
