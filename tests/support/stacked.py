"""Small runs whose clients are trained side by side: an own module with LoRA layers, and fedlight's on the tiny model."""

import copy

import lightning as L
import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from tiny_world import VOTES
from torch import nn

from fedlight.callbacks.loop.federated_loop import FederatedLoop
from fedlight.datamodules.federated.datamodule import FederatedDataModule

CLIENTS = {"a": 8, "b": 8, "c": 3, "d": 8}


class Points(FederatedDataModule):
    """Four clients, of which c has fewer examples than a batch; those of ``broken`` have one number in all inputs."""

    def __init__(self, clients=CLIENTS, batch_size=4, dtype=torch.float32, broken=None, **options):
        super().__init__(batch_size=batch_size, **options)
        self.clients, self.dtype, self.broken = clients, dtype, broken or {}

    def setup(self, stage=None):
        generator = torch.Generator().manual_seed(5)
        total = sum(self.clients.values())
        x = torch.randn(total, 6, generator=generator, dtype=torch.float64)
        y = x.sum(dim=1, keepdim=True).sin() + 0.1 * torch.randn(total, 1, generator=generator)
        self.x, self.y = x.to(self.dtype), y.to(self.dtype)
        self.train_set = range(total)
        ends = np.cumsum([*self.clients.values()])
        self.client_indices = {
            name: np.arange(end - size, end)
            for (name, size), end in zip(self.clients.items(), ends, strict=True)
        }
        for name, value in self.broken.items():
            self.x[self.client_indices[name]] = value

    def collate(self, examples):
        return {"x": self.x[list(examples)], "y": self.y[list(examples)]}


class Lora(L.LightningModule):
    """A user's own module: LoRA on two linear layers of a frozen network."""

    def __init__(self, optimizer="SGD", lr=0.1, dropout=0.0, dtype=torch.float32, **options):
        super().__init__()
        self.optimizer, self.lr, self.options = optimizer, lr, options
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        config = LoraConfig(r=2, lora_alpha=4, target_modules=["0", "2"], lora_dropout=dropout)
        self.net = get_peft_model(net, config).to(dtype)
        for name, parameter in self.net.named_parameters():
            if "lora_B" in name:  # or no gradient would reach A in the first step
                nn.init.normal_(parameter, std=0.3)

    def example_losses(self, batch):
        return (self.net(batch["x"]) - batch["y"]).square().mean(dim=1)

    def training_step(self, batch, batch_idx):
        return self.example_losses(batch).mean()

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.example_losses(batch).mean())

    def configure_optimizers(self):
        trained = [p for p in self.parameters() if p.requires_grad]
        return getattr(torch.optim, self.optimizer)(trained, lr=self.lr, **self.options)


class Rows(L.Callback):
    """Rows of all rounds, and the groups in which they were trained."""

    def __init__(self, loop):
        self.loop, self.rows, self.groups = loop, [], []

    def on_train_epoch_end(self, trainer, pl_module):
        self.rows += [dict(row) for row in self.loop.visit_records]
        groups = self.loop._rounds.schedule.begins.values()
        self.groups.append([[visit.client_id for visit in group] for group in groups])


def fit(module, data, at_once=1, rounds=2, callbacks=(), ckpt_path=None, settings=None, **loop):
    """Return trained weights by name, rows of visits, groups by round, and the loop."""
    made = FederatedLoop(**{"clients_per_round": 4, "local_steps": 3, "clients_at_once": at_once, **loop})
    rows = Rows(made)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    quiet |= {"accelerator": "cpu", "logger": False, "num_sanity_val_steps": 0, "limit_val_batches": 0}
    trainer = L.Trainer(
        **quiet | {"max_epochs": rounds, **(settings or {})}, callbacks=[made, rows, *callbacks]
    )
    trainer.fit(module, datamodule=data, ckpt_path=ckpt_path, weights_only=True if ckpt_path else None)
    trained = {name: p.detach().cpu().clone() for name, p in module.named_parameters() if p.requires_grad}
    return trained, rows.rows, rows.groups, made


def furthest(one, other):
    """Return the largest difference of two sets of weights."""
    assert one.keys() == other.keys()
    return max((one[name].double() - other[name].double()).abs().max().item() for name in one)


def by_visit(rows):
    """Return the rows of a run by round, client and kind of data."""
    return {(row["round"], row["client"], row["split"]): row for row in rows}


def assert_same_rows(rows, others, tolerance=1e-5):
    """Check that visits have equal steps, examples and bytes, and losses to rounding."""
    found, expected = by_visit(rows), by_visit(others)
    assert found.keys() == expected.keys()
    assert len(found) == len(rows)
    for visit, row in found.items():
        other = expected[visit]
        assert {**row, "loss": 0, "seconds": 0} == {**other, "loss": 0, "seconds": 0}
        assert (row["loss"] == "") == (other["loss"] == "")
        if row["loss"] != "":
            assert abs(row["loss"] - other["loss"]) < tolerance, visit


def both_ways(make, data=Points, at_once=3, most=1e-6, tolerance=1e-5, **loop):
    """Train one client at a time, then several at once; check that weights and rows agree, and return what `fit` does."""
    alone, beside = (fit(make(), data(), number, **copy.deepcopy(loop)) for number in (1, at_once))
    assert furthest(beside[0], alone[0]) < most
    assert_same_rows(beside[1], alone[1], tolerance)
    return alone, beside


def tiny_sft(model, batch_size=4, lr=0.05):
    """Return a module that trains LoRA with dropout on the tiny language model by SGD, and the votes of six clients."""
    from fedlight import Optimization, PreferenceDataModule, SFTModule
    from fedlight.datamodules.rows.split import Split
    from fedlight.modules.language import adapters

    lora = adapters.Lora(rank=2, dropout=0.1)
    module = SFTModule(model, lora=lora, dtype="fp32", optimizer=Optimization(name="SGD"), lr=lr)
    data = PreferenceDataModule(
        VOTES, view="sft", tokenizer=model, max_tokens=128, batch_size=batch_size, split=Split(val_share=0)
    )
    return module, data
