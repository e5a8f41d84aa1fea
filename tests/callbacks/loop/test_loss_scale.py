import torch
from lightning.pytorch.plugins import MixedPrecision
from plain_lightning import Regression, federate, seeded, trainer, weights
from refusals import refusal

from fedlight import FedProx
from fedlight.callbacks.loop.parts.optimizers import scaler_of


def run(algorithm=None, scale=2.0**18, rounds=3, fused=None):
    """A scale of 2**18 overflows in the first steps; one of 2**4 never does."""

    class Model(Regression):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.05, fused=fused)

    half = MixedPrecision("16-mixed", device="cpu", scaler=torch.amp.GradScaler("cpu", init_scale=scale))
    loop = {"algorithm": algorithm, "clients_per_round": 4, "local_steps": 3}
    return federate(rounds, model=seeded(Model, dropout=0.0), settings={"plugins": [half]}, **loop)


def test_steps_that_were_left_out_are_not_counted():
    _, first = run(rounds=1)
    assert {row["steps"] for row in first.visit_records} <= {0, 1, 2}
    _, plain = run(rounds=1, scale=16.0)
    assert [row["steps"] for row in plain.visit_records] == [3] * 4


def test_algorithms_see_gradients_that_are_not_multiplied():
    """Lightning divides by the scale before its hook: a scale of 2**4 or 2**8, powers of 2, changes nothing."""
    found = [weights(run(FedProx(0.5), scale=scale)[0]) for scale in (2.0**4, 2.0**8)]
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name], rtol=2e-3, atol=2e-4)


def test_optimizers_that_divide_by_the_scale_themselves_are_refused_where_gradients_are_changed():
    with refusal(r"SGD with fused=True divides .* after FedProx has added .* leave fused out"):
        run(FedProx(0.5), fused=True)


def test_other_precisions_have_no_scale():
    assert scaler_of(trainer(1)) is None
