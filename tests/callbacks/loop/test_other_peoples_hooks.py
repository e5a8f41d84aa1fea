"""Two clients, one batch of four examples each, y = w x; what is expected is computed in plain Python."""

import math

import lightning as L
import pytest
import torch
from plain_lightning import trainer
from refusals import refusal
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler, default_collate

from fedlight import ByClient, FederatedLoop

X = torch.arange(1.0, 9.0)[:, None]
Y = 3 * X.flip(0)
LR = 0.01
HALVES = {"a": [0, 1, 2, 3], "b": range(4, 8)}


class Line(L.LightningModule):
    """y = w x."""

    def __init__(self, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=LR)):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.optimizer = optimizer

    def training_step(self, batch, batch_idx):
        return (self.weight * batch[0] - batch[1]).square().mean()

    def configure_optimizers(self):
        return self.optimizer(self.parameters())


def gradient(own, weight):
    x, y = X[list(own)].double(), Y[list(own)].double()
    return (2 * (weight * x - y) * x).mean().item()


def by_hand(visit, rounds=3, begin=lambda weight: weight):
    """The weight after rounds in which every client goes through ``visit``: examples, weight, round -> weight."""
    weight = 0.0
    for round_idx in range(rounds):
        weight = begin(weight)
        weight = sum(visit(own, weight, round_idx) for own in HALVES.values()) / len(HALVES)
    return weight


def steps(number, then=lambda weight: weight):
    """A visit of plain gradient descent."""

    def visit(own, weight, round_idx):
        for _ in range(number):
            weight = then(weight - LR * gradient(own, weight))
        return weight

    return visit


def loader(**settings):
    return DataLoader(TensorDataset(X, Y), batch_size=4, **settings)


def fitted(model, before=(), after=(), data=None, rounds=3, **loop):
    federation = FederatedLoop(**{"clients_per_round": 2, "local_steps": 3} | loop)
    trainer(rounds, [*before, ByClient(lambda _: HALVES), federation, *after]).fit(model, data or loader())
    return model.weight.item()


class ByHand(Line):
    """Steps its optimizer by hand."""

    def __init__(self, *optimizer):
        super().__init__(*optimizer)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        self.stepped(optimizer).step()

    def stepped(self, optimizer):
        return optimizer


class StepsLate(ByHand):
    """Steps its schedule by hand when a batch is over."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.lr_schedulers().step()

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


def test_a_schedule_that_is_stepped_when_a_batch_is_over_moves_as_many_steps_as_a_visit_has():
    def visit(own, weight, round_idx):
        for number in range(2):
            weight -= LR * 0.5 ** (2 * round_idx + number) * gradient(own, weight)
        return weight

    assert fitted(StepsLate(), local_steps=2) == pytest.approx(by_hand(visit), rel=1e-5)


class Bends(L.Callback):
    """Changes the weights when a batch is over, as the critic of a Wasserstein GAN does."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        with torch.no_grad():
            pl_module.weight.sin_()


@pytest.mark.parametrize("local_steps", [1, 3])
def test_what_a_callback_in_front_of_the_loop_does_when_a_batch_is_over_belongs_to_the_visit(local_steps):
    expected = by_hand(steps(local_steps, then=math.sin))
    assert fitted(Line(), before=[Bends()], local_steps=local_steps) == pytest.approx(expected, rel=1e-6)


def test_a_callback_that_changes_weights_behind_the_end_of_a_visit_is_refused():
    with refusal(r"weight was changed .* client a.* in front of FederatedLoop"):
        fitted(Line(), after=[Bends()])


class Rate(L.Callback):
    """Sets the rate of each batch of a visit."""

    def on_visit_start(self, client_id):
        self.number = 0

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.number += 1
        for group in trainer.optimizers[0].param_groups:
            group["lr"] = LR * self.number


@pytest.mark.parametrize("place", ["before", "after"])
def test_rates_that_a_callback_sets_for_each_batch_hold_from_the_first_on(place):
    def visit(own, weight, round_idx):
        for number in (1, 2, 3):
            weight -= number * LR * gradient(own, weight)
        return weight

    assert fitted(Line(), **{place: [Rate()]}) == pytest.approx(by_hand(visit), rel=1e-5)


class Shrinks(Line):
    """Changes its weights when an epoch starts."""

    def on_train_epoch_start(self):
        with torch.no_grad():
            self.weight.mul_(0.5)


def test_what_a_module_changes_when_an_epoch_starts_is_the_rounds_global_model():
    expected = by_hand(steps(3), begin=lambda weight: 0.5 * weight)
    assert fitted(Shrinks()) == pytest.approx(expected, rel=1e-6)


def test_where_a_round_is_broken_off_the_model_is_that_of_before_the_epoch():
    class Breaks(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if (trainer.current_epoch, batch_idx) == (1, 4):
                raise RuntimeError("broken")

    model = Shrinks()
    with pytest.raises(RuntimeError, match="broken"):
        fitted(model, after=[Breaks()])
    after_one = by_hand(steps(3), rounds=1, begin=lambda weight: 0.5 * weight)
    assert model.weight.item() == pytest.approx(after_one, rel=1e-6)


class Around(torch.optim.Optimizer):
    """Steps another optimizer, as SAM and Lookahead do."""

    def __init__(self, parameters):
        self.inner = torch.optim.SGD(parameters, lr=LR, momentum=0.9)
        super().__init__(self.inner.param_groups, {"lr": LR})
        self.param_groups = self.inner.param_groups

    def step(self, closure=None):
        loss = closure()
        self.inner.step()
        return loss


def test_what_an_optimizer_in_another_remembers_is_no_other_clients():
    def visit(own, weight, round_idx):
        moment = 0.0
        for _ in range(3):
            moment = 0.9 * moment + gradient(own, weight)
            weight -= LR * moment
        return weight

    assert fitted(Line(Around)) == pytest.approx(by_hand(visit), rel=1e-5)


class StepsInside(ByHand):
    """Steps the inner optimizer, so that nobody sees a step."""

    def stepped(self, optimizer):
        return optimizer.inner


class Broken(TensorDataset):
    """Some examples cannot be read."""

    def __getitem__(self, index):
        return None if index in (4, 6) else super().__getitem__(index)


def readable(examples):
    found = [one for one in examples if one is not None]
    return default_collate(found) if found else None


def test_a_visit_may_begin_with_a_batch_that_is_none():
    """Of four batches of one example those of client b that are None make no step."""
    data = DataLoader(Broken(X, Y), batch_size=1, collate_fn=readable)

    def visit(own, weight, round_idx):
        for index in own:
            if index not in (4, 6):
                weight -= LR * gradient([index], weight)
        return weight

    with pytest.warns(UserWarning, match="yielded None"):
        found = fitted(Line(), data=data, local_steps=None)
    assert found == pytest.approx(by_hand(visit), rel=1e-5)


class Decays(Line):
    """Weight decay by the number of all steps, as DINO has it."""

    def on_train_batch_start(self, batch, batch_idx):
        for group in self.optimizers().param_groups:
            group["weight_decay"] = 0.1 * self.trainer.global_step


class Lookahead(Around):
    """Keeps a copy of the weight in an attribute."""

    def __init__(self, parameters):
        super().__init__(parameters)
        self.slow = [p.detach().clone() for p in self.param_groups[0]["params"]]

    def step(self, closure=None):
        loss = super().step(closure)
        (p,), (slow,) = self.param_groups[0]["params"], self.slow
        p.data.copy_(slow.add_(p.data - slow, alpha=0.5))
        return loss


class CodeBook(Line):
    """Moves one row of a frozen parameter, as vector quantization does."""

    def __init__(self):
        super().__init__()
        self.codes = torch.nn.Parameter(torch.zeros(200, 8), requires_grad=False)

    def training_step(self, batch, batch_idx):
        self.codes.data[3].add_(1.0)
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self):
        return self.optimizer([self.weight])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: StepsInside(Around), "inside of another, where the outer one has to make the step"),
        (Decays, "weight_decay"),
        (lambda: Line(Lookahead), r"Lookahead changes tensors in its attribute slow.*Optimizer\.state"),
        (CodeBook, "training changes codes"),
    ],
    ids=["steps that nobody sees", "decay by all steps", "tensors in an attribute", "a row that moves"],
)
def test_what_runs_on_through_the_clients_or_is_seen_by_nobody_is_refused(make, message):
    with refusal(message):
        fitted(make())


class Mines(L.Callback):
    """Gives the sampler other weights in each epoch: in the second one, of each client only its first example."""

    def __init__(self, sampler):
        self.sampler, self.read = sampler, []

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == 1:
            self.sampler.weights = torch.tensor([1.0, 0, 0, 0, 1, 0, 0, 0])
        self.read.append(set())

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.read[-1] |= {*batch[0].flatten().tolist()}


def test_weights_that_a_sampler_gets_in_later_epochs_count():
    sampler = WeightedRandomSampler([1.0] * 8, 8)
    mines = Mines(sampler)
    fitted(Line(), after=[mines], data=loader(sampler=sampler), rounds=2)
    assert len(mines.read[0]) > 2
    assert mines.read[1] == {1.0, 5.0}
