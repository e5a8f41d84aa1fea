import lightning as L
import pytest
import torch
from plain_lightning import Numbers, Regression, ten_clients, trainer
from refusals import refusal
from torch.optim import lr_scheduler
from written_out import LR, assert_close, combined, gradients, recorded, scaffold

from fedlight import FedAvg, FederatedLoop, FederatedWrapper, Scaffold
from fedlight.callbacks.loop.parts import StepSchedules

DECAY = 0.9


class Scheduled(Regression):
    """Plain SGD under the schedules that ``make`` gives for its optimizer."""

    def __init__(self, make):
        L.seed_everything(0, verbose=False)
        super().__init__(dropout=0.0)
        self.make = make

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=LR)
        return [optimizer], self.make(optimizer)


def by_step(optimizer):
    return [{"scheduler": lr_scheduler.ExponentialLR(optimizer, DECAY), "interval": "step"}]


def by_step_and_round(optimizer):
    """A schedule by step, and one that halves the rate after each round, one after the other on one rate."""
    return [*by_step(optimizer), lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


class Manual(Scheduled):
    """Steps its schedule itself, after each batch."""

    def __init__(self, make):
        super().__init__(make)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.optimizers().zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        self.optimizers().step()
        self.step_schedule()

    def step_schedule(self):
        self.lr_schedulers().step()


class ManualByRound(Manual):
    """As Lightning's documentation steps a schedule by epoch under manual optimization."""

    def step_schedule(self):
        if self.trainer.is_last_batch:
            self.lr_schedulers().step()


def written_out(state, rounds, rate):
    """Plain SGD at each client; ``rate`` gives the learning rate of a step of a round, both counted from 0."""
    for round_idx, of_clients in enumerate(rounds):
        trained = {}
        for client, batches in of_clients.items():
            now = dict(state)
            for step, batch in enumerate(batches):
                found = gradients(now, batch)
                now = {n: w - rate(round_idx, step) * found[n] for n, w in now.items()}
            trained[client] = now
        state = {name: state[name] + value for name, value in combined(state, trained).items()}
    return state


@pytest.mark.parametrize("make", [by_step, by_step_and_round])
def test_the_next_round_begins_where_the_longest_visit_ended(make):
    """A pass over each client's data; with the schedule by round on top of it."""
    start, found, rounds = recorded(local_steps=None, model=Scheduled(make))
    longest = [max(map(len, of_clients.values())) for of_clients in rounds]
    assert any(len(batches) < max(map(len, one.values())) for one in rounds for batches in one.values())
    halves = 0.5 if make is by_step_and_round else 1.0

    def rate(round_idx, step):
        return LR * DECAY ** (sum(longest[:round_idx]) + step) * halves**round_idx

    assert_close(found, written_out(start, rounds, rate))


def test_a_schedule_that_manual_optimization_steps_by_round_goes_on_whoever_is_last():
    start, found, rounds = recorded(model=ManualByRound(by_step))
    assert_close(found, written_out(start, rounds, lambda r, step: LR * DECAY**r))


def test_scaffold_is_exact_under_a_schedule_by_step():
    """It divides by the sum of the rates of a visit."""
    start, found, rounds = recorded(
        rounds=5, clients_per_round=7, model=Scheduled(by_step), algorithm=Scaffold(), parts=[StepSchedules()]
    )

    def rates(idx):
        return [LR * DECAY ** (3 * idx + step) for step in range(3)]

    def visit(idx, now, batches, change):
        for rate, batch in zip(rates(idx), batches, strict=True):
            grads = gradients(now, batch)
            now = {n: w - rate * change(n, grads[n], w) for n, w in now.items()}
        return now

    assert_close(found, scaffold(start, rounds, visit, lambda idx, _: sum(rates(idx))))


def test_a_round_without_visits_leaves_the_schedule_where_it_was():
    class NobodyAtFirst(FedAvg):
        def plan(self, round_idx, cohort, num_batches):
            return super().plan(round_idx, cohort, num_batches)[: 3 * (round_idx > 0)]

    rates = []

    class Watch(L.Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    loop = FederatedLoop(NobodyAtFirst(), clients_per_round=3, local_steps=2)
    trainer(3, [loop, Watch()]).fit(Scheduled(by_step), FederatedWrapper(Numbers(), ten_clients))
    assert rates == pytest.approx([LR, LR, LR * DECAY**2])


def every_second_batch(optimizer):
    return [{"scheduler": lr_scheduler.ExponentialLR(optimizer, DECAY), "interval": "step", "frequency": 2}]


def test_a_schedule_that_steps_every_second_batch_of_each_visit_is_fine_and_of_all_is_refused():
    with refusal("ExponentialLR steps every 2 batches .* local_steps to a multiple of 2"):
        recorded(rounds=1, local_steps=3, model=Scheduled(every_second_batch))
    start, found, rounds = recorded(rounds=2, local_steps=4, model=Scheduled(every_second_batch))
    assert_close(found, written_out(start, rounds, lambda r, step: LR * DECAY ** (2 * r + step // 2)))


def test_another_setting_is_refused():
    with refusal(r"next_round='round' is not one of continue, restart"):
        StepSchedules("round")
