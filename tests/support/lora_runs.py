"""Runs of a module with LoRA whose batches, weights after each round and metrics are recorded, for references."""

import lightning as L
import torch
from stacked import CLIENTS, Lora, Points, fit
from two_parts import Recorder, share_of, trained

from fedlight.callbacks.loop.parts.product_error import ProductError
from fedlight.federation.lora.pairs import find_pairs


class LoraModule(Lora):
    """LoRA on two layers, in the form that `two_parts.trained` takes."""

    def forward(self, batch):
        return self.net(batch["x"])

    def make_optimizer(self, parameters):
        """Return a fresh optimizer over some parameters."""
        return getattr(torch.optim, self.optimizer)(parameters, lr=self.lr, **self.options)


class History(L.Callback):
    """Trained weights before the first round and after each, and the metrics of the rounds."""

    def __init__(self):
        self.states, self.metrics = [], []

    def on_fit_start(self, trainer, pl_module):
        self.states.append(adapters(pl_module))

    def on_train_epoch_start(self, trainer, pl_module):
        # Lightning keeps values that nobody logs again
        trainer.callback_metrics.pop("fed/product_error", None)

    def on_train_epoch_end(self, trainer, pl_module):
        self.states.append(adapters(pl_module))
        found = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self.metrics.append({k.removeprefix("fed/"): v for k, v in found.items() if k.startswith("fed/")})

    @property
    def errors(self):
        """``fed/product_error`` of each round, None where it was not logged."""
        return [one.get("product_error") for one in self.metrics]


def adapters(module):
    """Return a copy of what is trained."""
    return {name: p.detach().cpu().clone() for name, p in module.named_parameters() if p.requires_grad}


def run(algorithm, rounds=3, module=None, data=None, **more):
    """Return the module, its history, the batches of its visits, the rows of its visits, and the loop."""
    history, seen = History(), Recorder()
    module = LoraModule() if module is None else module
    callbacks = [history, seen, *more.pop("callbacks", ())]
    more.setdefault("parts", [ProductError()])
    _, rows, _, loop = fit(
        module, data or Points(), rounds=rounds, algorithm=algorithm, callbacks=callbacks, **more
    )
    return module, history, seen.visits, rows, loop


def weights_of(names, weighting, clients=CLIENTS):
    """Return the coefficient of each client in the combined movement, by the formulas of `Algorithm`."""
    shares = [share_of(name, clients) for name in names]
    return {
        "unbiased": [len(clients) / len(names) * share for share in shares],
        "normalized": [share / sum(shares) for share in shares],
        "uniform": [1 / len(names)] * len(names),
    }[weighting]


def local_ends(module, before, visits, names=None, add=None):
    """Return what each client of a round ends with, written out: client -> weights."""
    return {v.client_id: trained(module, before, batches, names=names, add=add) for v, batches in visits}


def moved(before, ends, coefficients):
    """Return ``before`` moved by the weighted movements of ``ends``, in fp64."""
    return {
        name: value.double()
        + sum(c * (end[name].double() - value.double()) for c, end in zip(coefficients, ends, strict=True))
        for name, value in before.items()
    }


def products(state):
    """Return the product of each pair, multiplied out in fp64: layer -> matrix."""
    return {pair.layer: pair.product(state) for pair in find_pairs(state).pairs}


def mean_products(before, ends, coefficients):
    """Return the mean of the clients' products in movement form, multiplied out: layer -> matrix."""
    own = products(before)
    moves = [{layer: value - own[layer] for layer, value in products(end).items()} for end in ends]
    return {
        layer: value + sum(c * move[layer] for c, move in zip(coefficients, moves, strict=True))
        for layer, value in own.items()
    }


def relative_distance(found, expected):
    """Return the distance of matrices by layer over the norm of those that are expected."""
    distance = sum((found[layer] - value).square().sum() for layer, value in expected.items())
    return float((distance / sum(value.square().sum() for value in expected.values())).sqrt())
