from functools import partial

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from refusals import refusal
from stacked import Lora, Points, both_ways, fit
from torch import nn

from fedlight.callbacks.loop.parts.buffers import AveragedBuffers, LocalBuffers
from fedlight.federation.algorithms.fedavg import FedAvg


class Without(Lora):
    example_losses = None


class Manual(Lora):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class Whole(Lora):
    def configure_optimizers(self):
        self.extra = nn.LayerNorm(8)
        return torch.optim.SGD([*self.extra.parameters(), *self.net.parameters()], lr=0.1)


class Coupled(Lora):
    def example_losses(self, batch):
        losses = super().example_losses(batch)
        return losses - losses.mean() / 2


class OtherStep(Lora):
    def training_step(self, batch, batch_idx):
        return 2 * super().training_step(batch, batch_idx)


class Scalar(Lora):
    def example_losses(self, batch):
        return super().example_losses(batch).mean()


class OwnStep(torch.optim.SGD):
    """Nobody knows what it does."""


class Watches(L.Callback):
    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        pass


class Told(L.Callback):
    takes_stacked = True

    def on_after_backward(self, trainer, pl_module):
        self.shapes = {p.grad.shape[0] for p in pl_module.parameters() if p.grad is not None}


class VisitStarts(Lora):
    def on_visit_start(self, client_id):
        pass


class ClipsItself(Lora):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        pass


class TokensFirst(Lora):
    """As many tokens as the batch has examples, so that no number of rows gives it away."""

    def example_losses(self, batch):
        tokens = torch.linspace(0.3, 3, 8)[:, None, None] * batch["x"]
        return (self.net(tokens) - batch["y"]).square().mean(dim=(0, 2))


class Choices(Lora):
    """Two rows of each example next to each other, as models for multiple choice have them."""

    def example_losses(self, batch):
        rows = torch.stack([batch["x"], batch["x"] / 2], dim=1).flatten(0, 1)
        return (self.net(rows).view(-1, 2) - batch["y"]).square().mean(dim=1)


LAMBDA = {"callbacks": [LambdaCallback(on_train_batch_end=lambda *args: None)]}


class HidesItsStep(Lora):
    """Its regularizer of B is 0 where the run begins."""

    def __init__(self):
        super().__init__()
        for name, parameter in self.named_parameters():
            if "lora_B" in name:
                nn.init.zeros_(parameter)

    def training_step(self, batch, batch_idx):
        parts = [p.square().sum() for name, p in self.named_parameters() if "lora_B" in name]
        return super().training_step(batch, batch_idx) + 0.01 * sum(parts)


class SlightlyOtherStep(Lora):
    """As large as the balance of experts beside the loss of a language model."""

    def training_step(self, batch, batch_idx):
        return 1.001 * super().training_step(batch, batch_idx)


class GradientHook(Lora):
    def __init__(self):
        super().__init__()
        for parameter in self.parameters():
            if parameter.requires_grad:
                parameter.register_hook(lambda gradient: gradient / gradient.norm())


class StepHook(Lora):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        optimizer.register_step_post_hook(lambda *args: None)
        return optimizer


class Centres(Lora):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        return {**batch, "x": batch["x"] - batch["x"].mean(dim=0)}


class CentredPoints(Points):
    def on_before_batch_transfer(self, batch, dataloader_idx):
        return {**batch, "x": batch["x"] - batch["x"].mean(dim=0)}


def with_optimizer(kind):
    class Own(Lora):
        def configure_optimizers(self):
            return kind([p for p in self.parameters() if p.requires_grad], lr=0.1)

    return Own


@pytest.mark.parametrize(
    ("make", "settings", "message"),
    [
        (Without, {}, r"Without has no example_losses\(batch\) -> \(examples,\).*: add this method"),
        (Manual, {}, "Manual has automatic_optimization=False"),
        (Whole, {}, "extra.weight is trained, the weight of a layer of type LayerNorm"),
        (Coupled, {}, r"Coupled\.example_losses gives an example another loss beside other examples"),
        (OtherStep, {}, r"OtherStep\.training_step returns a loss of .* where the mean of example_losses"),
        (TokensFirst, {}, "TokensFirst gives its layers with adapters another input than the examples"),
        (Choices, {}, "Choices gives its layers with adapters another input .* several rows of each example"),
        (HidesItsStep, {}, r"HidesItsStep\.training_step returns a loss of .* where the mean"),
        (SlightlyOtherStep, {}, r"SlightlyOtherStep\.training_step returns a loss of .* where the mean"),
        (
            GradientHook,
            {},
            "a hook on net.*lora_A.* would see the gradients of several clients.*take the hook",
        ),
        (StepHook, {}, "a hook on the steps of SGD would see parameters and gradients of several clients"),
        (Centres, {}, r"Centres\.on_after_batch_transfer would see a batch of several clients"),
        (Scalar, {}, r"Scalar\.example_losses gives losses of shape \(\) for a batch of 4 examples"),
        (VisitStarts, {}, r"VisitStarts\.on_visit_start would see a batch of several clients"),
        (ClipsItself, {}, r"ClipsItself\.configure_gradient_clipping would see"),
        (with_optimizer(torch.optim.LBFGS), {}, "LBFGS is not known to step each number"),
        (with_optimizer(torch.optim.Adafactor), {}, "Adafactor is not known to step each number"),
        (with_optimizer(OwnStep), {}, "OwnStep is not known .* take one of ASGD, Ada"),
        (Lora, {"callbacks": [Watches()]}, r"Watches\.on_before_optimizer_step would see"),
        (Lora, LAMBDA, r"LambdaCallback\.on_train_batch_end would see .* takes_stacked = True"),
        (Lora, {"parts": [AveragedBuffers()]}, "AveragedBuffers gives each client buffers of its own"),
        (Lora, {"parts": [LocalBuffers()]}, "LocalBuffers gives each client buffers"),
    ],
)
def test_refused_with_the_reason_and_the_remedy(make, settings, message):
    module = make()
    before = [p.detach().clone() for p in module.parameters()]
    with refusal(message) as refused:
        fit(module, Points(), 2, **settings)
    assert "set " in str(refused.value)
    assert "clients_at_once" in str(refused.value)
    after = list(module.parameters())[: len(before)]
    assert all(torch.equal(p, old) for p, old in zip(after, before, strict=True))


class OwnBatch:
    def __init__(self, x, y):
        self.x, self.y = x, y

    def to(self, device):
        return self


class OwnBatches(Points):
    def collate(self, examples):
        return OwnBatch(**super().collate(examples))


class ReadsOwn(Lora):
    def example_losses(self, batch):
        return super().example_losses(vars(batch))


class Freezes(FedAvg):
    """Takes the gradient of A away at some clients, by None or out of the dictionary."""

    def __init__(self, clients):
        super().__init__()
        self.clients = clients

    def adjust_gradients(self, visiting, parameters, gradients):
        if visiting.client.id in self.clients:
            for name in [name for name in gradients if "lora_A" in name]:
                if ".0." in name:
                    gradients[name] = None
                else:
                    del gradients[name]


def test_what_all_clients_of_a_group_leave_out_is_moved_neither_by_momentum_nor_by_weight_decay():
    made = partial(Lora, "AdamW", lr=0.02, weight_decay=0.3)
    (alone, *_), _ = both_ways(made, most=1e-5, algorithm=Freezes("abcd"))
    start = {name: p.detach() for name, p in Lora().named_parameters() if p.requires_grad}
    for name, value in alone.items():
        assert torch.equal(value, start[name]) == ("lora_A" in name), name


@pytest.mark.parametrize("make", [TokensFirst, Choices, OtherStep])
def test_refused_in_16_bits_too_where_a_proper_module_is_not(make):
    settings = {"precision": "bf16-mixed"}
    with refusal(f"{make.__name__}.*set it to 1"):
        fit(make(), Points(), 2, settings=settings)
    fit(Lora(), Points(), 2, rounds=1, settings=settings)


@pytest.mark.parametrize("make", [TokensFirst, Choices, HidesItsStep, GradientHook])
def test_auto_takes_one_client_at_a_time_instead(make):
    *_, groups, _ = fit(make(), Points(), "auto", rounds=1)
    assert {len(group) for group in groups[0]} == {1}


class Logs(Lora):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("train/loss", loss)
        self.log_dict({"train/twice": 2 * loss})
        return loss


def test_what_training_step_logs_is_named_as_it_is_not_called():
    said = r"Logs\.training_step logs train/loss, train/twice, and is not called for"
    with pytest.warns(UserWarning, match=said):
        fit(Logs(), Points(), 3, rounds=1)
    fit(Logs(), Points(), 1, rounds=1)


@pytest.mark.parametrize("at_once", [0, -1])
def test_the_number_is_at_least_one(at_once):
    with refusal(f"clients_at_once={at_once} must be at least 1"):
        fit(Lora(), Points(), at_once)


class Visits(L.LightningDataModule):
    """Data of clients that stream visit after visit, as a user may have written them."""

    def __init__(self):
        super().__init__()
        self.points = Points()
        self.points.setup()
        self.client_sizes, self.num_batches = self.points.client_sizes, self.points.num_batches
        self.train_dataloader = self.points.train_dataloader

    def val_dataloader(self):
        return []

    def client_sizes(self): ...

    def num_batches(self, client_id, split="train"): ...

    def set_visits(self, visits, round_idx):
        self.points.set_visits(visits, round_idx)


@pytest.mark.parametrize(
    ("make", "data", "settings", "message"),
    [
        (
            ReadsOwn,
            OwnBatches,
            {},
            "type OwnBatch cannot be divided .*: give a dictionary, list or .* set it to 1",
        ),
        (
            Lora,
            CentredPoints,
            {},
            r"CentredPoints\.on_before_batch_transfer would see a batch of several clients",
        ),
        (Lora, Visits, {}, "Visits does not give batches of several clients: derive it from Fed"),
        (
            Lora,
            Points,
            {"algorithm": Freezes("a")},
            r"Freezes takes the gradient of net.*lora_A.* for 1 of 2 cl",
        ),
    ],
)
def test_what_trains_one_client_at_a_time_is_refused_for_two(make, data, settings, message):
    with refusal(message):
        fit(make(), data(), 2, **settings)
    fit(make(), data(), 1, rounds=1, **settings)


def test_a_callback_that_says_so_sees_the_stacked_gradients():
    told = Told()
    fit(Lora(), Points(), 4, callbacks=[told])
    assert told.shapes == {4}


def test_one_client_at_a_time_goes_on_with_all_of_them():
    for make in (Whole, Coupled, OtherStep, Scalar, VisitStarts, ClipsItself, GradientHook, StepHook):
        fit(make(), Points(), 1, rounds=1)
