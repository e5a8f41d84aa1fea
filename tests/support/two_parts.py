"""A network with a body and a head, runs of it whose batches are recorded, and local training written out for references."""

import lightning as L
import torch
from lightning.fabric.utilities import move_data_to_device
from torch import nn
from torch.func import functional_call

START = ("body.weight", "body.bias", "head.weight", "head.bias")


class TwoParts(L.LightningModule):
    """A hidden layer and an output layer."""

    def __init__(self, optimizer="SGD", **options):
        super().__init__()
        torch.manual_seed(1)
        self.body, self.head = nn.Linear(6, 5), nn.Linear(5, 1)
        self.optimizer, self.options = optimizer, {"lr": 0.1} | options

    def forward(self, batch):
        return self.head(self.body(batch["x"]).tanh())

    def example_losses(self, batch):
        return (self(batch) - batch["y"]).square().mean(dim=1)

    def training_step(self, batch, batch_idx):
        return self.example_losses(batch).mean()

    def validation_step(self, batch, batch_idx):
        """Lightning warns of validation data that nobody looks at."""

    def configure_optimizers(self):
        return self.make_optimizer(self.parameters())

    def make_optimizer(self, parameters):
        """Return a fresh optimizer over some parameters."""
        return getattr(torch.optim, self.optimizer)(parameters, **self.options)


class Recorder(L.Callback):
    """Batches of each visit, in order: ``visits[round]`` is a list of the visit and its batches."""

    def __init__(self):
        self.visits, self._visit = {}, None

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        loop = next(callback for callback in trainer.callbacks if hasattr(callback, "rounds_done"))
        visits = self.visits.setdefault(loop.rounds_done, [])
        if not visits or visits[-1][0] is not loop.visit:
            visits.append((loop.visit, []))
        visits[-1][1].append(move_data_to_device(batch, "cpu"))


def weights(of):
    """Return a copy of all parameters by name."""
    return {name: p.detach().cpu().clone() for name, p in of.named_parameters()}


def trained(module, start, batches, names=None, add=None):
    """Return ``start`` after a step on each batch, written out in plain torch with a fresh optimizer over ``names`` alone.

    Args:
        module: gives the loss and the optimizer; its own weights play no part.
        start: weights by name, fp32.
        batches: batches of the visit.
        names: trained parameters; None: all.
        add: function from the weights to what is added to the loss.
    """
    own = {
        name: value.clone().requires_grad_(names is None or name in names) for name, value in start.items()
    }
    optimizer = module.make_optimizer([value for value in own.values() if value.requires_grad])
    for batch in batches:
        optimizer.zero_grad()
        loss = (functional_call(module, own, (batch,)) - batch["y"]).square().mean()
        (loss if add is None else loss + add(own)).backward()
        optimizer.step()
    return {name: value.detach() for name, value in own.items()}


def mean(states, shares):
    """Return the mean of states by name, weighted by shares."""
    total = sum(shares)
    return {
        name: sum(
            s.double() * share for s, share in zip([s[name] for s in states], shares, strict=True)
        ).float()
        / total
        for name in states[0]
    }


def share_of(client, clients):
    """Return a client's share of all examples."""
    return clients[client] / sum(clients.values())


def close(found, expected, tolerance=2e-6):
    """Check that two sets of weights agree to rounding."""
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=tolerance, msg=name)
