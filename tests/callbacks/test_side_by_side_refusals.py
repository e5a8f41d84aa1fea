"""What cannot be trained for several clients at once is refused before anything is trained, with the remedy."""

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from peft import LoraConfig, get_peft_model
from stacked import Lora, Points, fit
from torch import nn


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


class Dora(Lora):
    def __init__(self):
        super().__init__()
        net = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 1))
        self.net = get_peft_model(net, LoraConfig(r=2, target_modules=["0"], use_dora=True))


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


def with_optimizer(make):
    class Own(Lora):
        def configure_optimizers(self):
            return make([p for p in self.parameters() if p.requires_grad])

    return Own()


@pytest.mark.parametrize(
    ("make", "settings", "message"),
    [
        (Without, {}, r"Without has no example_losses\(batch\) -> \(examples,\).*: add this method"),
        (Manual, {}, "Manual has automatic_optimization=False"),
        (Whole, {}, "extra.weight is trained, the weight of a layer of type LayerNorm"),
        (Dora, {}, "Dora"),
        (Coupled, {}, r"Coupled\.example_losses gives an example another loss beside other examples"),
        (OtherStep, {}, r"OtherStep\.training_step returns a loss of .* where the mean of example_losses"),
        (Scalar, {}, r"Scalar\.example_losses gives losses of shape \(\) for a batch of 4 examples"),
        (VisitStarts, {}, r"VisitStarts\.on_visit_start would see a batch of several clients"),
        (ClipsItself, {}, r"ClipsItself\.configure_gradient_clipping would see"),
        (lambda: with_optimizer(torch.optim.LBFGS), {}, "LBFGS is not known to step each number"),
        (lambda: with_optimizer(torch.optim.Adafactor), {}, "Adafactor is not known to step each number"),
        (
            lambda: with_optimizer(lambda p: OwnStep(p, lr=0.1)),
            {},
            "OwnStep is not known .* take one of ASGD, Ada",
        ),
        (Lora, {"callbacks": [Watches()]}, r"Watches\.on_before_optimizer_step would see"),
        (
            Lora,
            {"callbacks": [LambdaCallback(on_train_batch_end=lambda *args: None)]},
            r"LambdaCallback\.on_train_batch_end would see .* takes_stacked = True",
        ),
        (Lora, {"buffers": "average"}, "federated.buffers=average gives each client buffers of its own"),
        (Lora, {"buffers": "local"}, "federated.buffers=local gives each client buffers"),
    ],
)
def test_refused_with_the_reason_and_the_remedy(make, settings, message):
    module = make()
    before = [p.detach().clone() for p in module.parameters()]
    with pytest.raises(ValueError, match=message) as refused:
        fit(module, Points(), 2, **settings)
    assert "set " in str(refused.value)
    assert "clients_at_once" in str(refused.value)
    after = list(module.parameters())[: len(before)]
    assert all(torch.equal(p, old) for p, old in zip(after, before, strict=True))


@pytest.mark.parametrize("at_once", [0, -1])
def test_the_number_is_at_least_one(at_once):
    with pytest.raises(ValueError, match=f"federated.clients_at_once={at_once} must be at least 1"):
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


def test_data_that_give_one_client_at_a_time():
    with pytest.raises(
        ValueError, match="Visits does not give batches of several clients: derive it from Fed"
    ):
        fit(Lora(), Visits(), 2)
    fit(Lora(), Visits(), 1)


def test_a_callback_that_says_so_sees_the_stacked_gradients():
    told = Told()
    fit(Lora(), Points(), 4, callbacks=[told])
    assert told.shapes == {4}


def test_one_client_at_a_time_goes_on_with_all_of_them():
    for make in (Whole, Dora, Coupled, OtherStep, Scalar, VisitStarts, ClipsItself):
        fit(make(), Points(), 1, rounds=1)
