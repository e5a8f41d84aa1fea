import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from plain_lightning import Regression, federate, module
from refusals import refusal
from torch import nn
from written_out import LR, assert_close, combined, gradients, recorded

from fedlight import FedAvg


class Manual(Regression):
    """Steps on the sum of the gradients of ``every`` batches, and clears them before the next."""

    def __init__(self, every=1):
        super().__init__(dropout=0.0)
        self.automatic_optimization = False
        self.every = every

    def training_step(self, batch, batch_idx):
        self.manual_backward(nn.functional.mse_loss(self.net(batch[0]), batch[1]))
        if (batch_idx + 1) % self.every == 0:
            self.optimizers().step()
            self.optimizers().zero_grad()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=LR)


class NeverClears(Manual):
    """Leaves the gradients of its last step where they are, as a module may that clears them at its own moments."""

    def training_step(self, batch, batch_idx):
        self.manual_backward(nn.functional.mse_loss(self.net(batch[0]), batch[1]))
        self.optimizers().step()


def seeded(kind, *args):
    L.seed_everything(0, verbose=False)
    return kind(*args)


def test_gradients_of_the_client_before_are_cleared():
    """Without clearing, step k of a visit uses the gradients of all batches of the run; with it, those of its visit."""
    start, found, rounds = recorded(rounds=2, model=seeded(NeverClears))
    for batches in rounds:
        trained = {}
        for client, own in batches.items():
            now, total = dict(start), dict.fromkeys(start, 0.0)
            for batch in own:
                total = {name: total[name] + value for name, value in gradients(now, batch).items()}
                now = {name: value - LR * total[name] for name, value in now.items()}
            trained[client] = now
        start = {name: start[name] + value for name, value in combined(start, trained).items()}
    assert_close(found, start)


def test_gradients_of_parameters_outside_the_optimizer_are_cleared_as_well():
    class Partly(Manual):
        def configure_optimizers(self):
            return torch.optim.SGD(self.net[3].parameters(), lr=LR)

    left = []

    class Watch(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            left.append(pl_module.net[0].weight.grad)

    recorded(rounds=1, local_steps=1, model=seeded(Partly), after=[Watch()])
    assert left == [None] * 3


def test_a_visit_that_ends_before_its_gradients_are_used_is_refused():
    with refusal(r"ended after 3 batches with gradients .* local_steps to a multiple"):
        federate(model=seeded(Manual, 2), local_steps=3)
    federate(model=seeded(Manual, 2), local_steps=4)


def accumulated(schedule, rounds=4):
    """The rounds of a federation whose steps have as many batches as ``schedule`` gives by round, in fp64."""

    def run(state, batches, number):
        now = dict(state)
        for first in range(0, len(batches), number):
            step = [gradients(now, batch) for batch in batches[first : first + number]]
            now = {name: now[name] - LR * sum(one[name] for one in step) / number for name in now}
        return now

    def written_out(start, taken):
        for round_idx, batches in enumerate(taken):
            number = schedule(round_idx)
            assert {len(own) for own in batches.values()} == {2 * number}
            trained = {client: run(start, own, number) for client, own in batches.items()}
            start = {name: start[name] + value for name, value in combined(start, trained).items()}
        return start

    return written_out


@pytest.mark.parametrize("first", [True, False])
def test_scheduled_accumulation_equals_a_loop_written_out(first):
    """1 batch a step in rounds 0 and 1, 3 in round 2, 2 in round 3; the scheduler stands on either side of the loop."""
    scheduler = GradientAccumulationScheduler({2: 3, 3: 2})
    place = {"before": [scheduler]} if first else {"after": [scheduler]}
    start, found, batches = recorded(rounds=4, local_steps=2, **place)
    assert_close(found, accumulated((1, 1, 3, 2).__getitem__)(start, batches))


def test_a_round_without_visits_under_scheduled_accumulation():
    class NobodyFirst(FedAvg):
        def plan(self, round_idx, cohort, num_batches):
            return super().plan(round_idx, cohort, num_batches)[: round_idx * 3]

    _, loop = federate(
        rounds=2,
        algorithm=NobodyFirst(),
        model=module(),
        callbacks=[GradientAccumulationScheduler({0: 3, 1: 2})],
    )
    assert [row["steps"] for row in loop.visit_records] == [2, 2, 2]


def test_accumulation_that_a_callback_changes_unannounced_is_refused():
    class Changes(L.Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            trainer.accumulate_grad_batches = 1 + trainer.current_epoch

    with refusal(r"is 2, but .* planned with 1: .* GradientAccumulationScheduler"):
        federate(model=module(), callbacks=[Changes()])
