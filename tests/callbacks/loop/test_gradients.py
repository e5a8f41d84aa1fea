import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from plain_lightning import Regression, federate
from refusals import refusal
from written_out import LR, assert_close, combined, gradients, recorded

from fedlight import FedAvg


class Partly(Regression):
    """Steps by hand, the second layer alone."""

    def __init__(self):
        super().__init__(dropout=0.0)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.manual_backward(super().training_step(batch, batch_idx))
        self.optimizers().step()
        self.optimizers().zero_grad()

    def configure_optimizers(self):
        return torch.optim.SGD(self.net[3].parameters(), lr=LR)


def test_gradients_of_parameters_outside_the_optimizer_are_cleared_as_well():
    left = []

    class Watch(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            left.append(pl_module.net[0].weight.grad)

    recorded(rounds=1, local_steps=1, model=Partly(), after=[Watch()])
    assert left == [None] * 3


def accumulating(state, batches, number):
    """A visit whose steps have ``number`` batches each, in fp64."""
    now = dict(state)
    for first in range(0, len(batches), number):
        step = [gradients(now, batch) for batch in batches[first : first + number]]
        now = {name: now[name] - LR * sum(one[name] for one in step) / number for name in now}
    return now


@pytest.mark.parametrize("first", [True, False])
def test_scheduled_accumulation_equals_a_loop_written_out(first):
    """1 batch a step in rounds 0 and 1, 3 in round 2, 2 in round 3; the scheduler stands on either side of the loop."""
    scheduler = GradientAccumulationScheduler({2: 3, 3: 2})
    place = {"before": [scheduler]} if first else {"after": [scheduler]}
    state, found, rounds = recorded(rounds=4, local_steps=2, **place)
    for number, of_clients in zip((1, 1, 3, 2), rounds, strict=True):
        assert {len(own) for own in of_clients.values()} == {2 * number}
        trained = {client: accumulating(state, own, number) for client, own in of_clients.items()}
        state = {name: state[name] + value for name, value in combined(state, trained).items()}
    assert_close(found, state)


def test_a_round_without_visits_under_scheduled_accumulation():
    class NobodyFirst(FedAvg):
        def plan(self, round_idx, cohort, num_batches):
            return super().plan(round_idx, cohort, num_batches)[: round_idx * 3]

    scheduler = GradientAccumulationScheduler({0: 3, 1: 2})
    _, loop = federate(rounds=2, algorithm=NobodyFirst(), callbacks=[scheduler])
    assert [row["steps"] for row in loop.visit_records] == [2, 2, 2]


def test_accumulation_that_a_callback_changes_unannounced_is_refused():
    class Changes(L.Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            trainer.accumulate_grad_batches = 1 + trainer.current_epoch

    with refusal(r"is 2, but .* planned with 1: .* GradientAccumulationScheduler"):
        federate(callbacks=[Changes()])
