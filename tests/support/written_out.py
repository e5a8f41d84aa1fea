"""A small federation under plain SGD whose batches are taken down, so that a test can write its rounds out in fp64."""

import lightning as L
import torch
from memories import loop_with
from plain_lightning import Numbers, Regression, module, ten_clients, trainer, weights
from torch import nn
from torch.func import functional_call

from fedlight.datamodules.federated.by_client import FederatedWrapper

SHARES = {name: len(indices) / 120 for name, indices in ten_clients(None).items()}
LR = 0.05


def recorded(
    rounds=4, clients_per_round=3, local_steps=3, model=None, before=(), after=(), settings=None, **loop
):
    """Trains with callbacks ``before`` and ``after`` the loop in the trainer's list.

    Gives weights before and after, and for each round the batches of each client, all in fp64.
    """
    batches = [{} for _ in range(rounds)]

    class Recorder(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            of_client = batches[federation.rounds_done].setdefault(federation.visit.client_id, [])
            of_client.append([part.cpu().double() for part in batch])

    model = model or module(optimizer="SGD", lr=LR, dropout=0.0)
    start = doubled(weights(model))
    federation = loop_with(clients_per_round=clients_per_round, local_steps=local_steps, **loop)
    fit = trainer(rounds, [*before, federation, *after, Recorder()], **(settings or {}))
    fit.fit(model, FederatedWrapper(Numbers(), ten_clients))
    return start, doubled(weights(model)), batches


def doubled(state):
    return {name: value.double() for name, value in state.items()}


def gradients(state, batch):
    """Of the mean squared error at ``state``, by torch alone."""
    leaves = {name: value.clone().requires_grad_() for name, value in state.items()}
    named = {name.removeprefix("net."): value for name, value in leaves.items()}
    outputs = functional_call(Regression(dropout=0.0).net, named, (batch[0],))
    grads = torch.autograd.grad(nn.functional.mse_loss(outputs, batch[1]), list(leaves.values()))
    return dict(zip(leaves, grads, strict=True))


def local(state, batches, change=lambda name, gradient, now: gradient):
    """Plain SGD from ``state``; ``change`` gives the gradient that is used, from its name, itself and the weights."""
    now = dict(state)
    for batch in batches:
        found = gradients(now, batch)
        now = {name: value - LR * change(name, found[name], now) for name, value in now.items()}
    return now


def combined(state, trained, weighting="unbiased"):
    """The combined movement of the clients, ``trained`` holding the weights with which each ended."""
    total = sum(SHARES[c] for c in trained)
    weight = {
        "unbiased": {c: len(SHARES) / len(trained) * SHARES[c] for c in trained},
        "normalized": {c: SHARES[c] / total for c in trained},
        "uniform": dict.fromkeys(trained, 1 / len(trained)),
    }[weighting]
    return {name: sum(weight[c] * (trained[c][name] - state[name]) for c in trained) for name in state}


def scaffold(start, rounds, visit, rates, weighting="unbiased"):
    """The end of rounds of SCAFFOLD.

    ``visit(round_idx, state, batches, change)`` trains a client as `local` does; ``rates(round_idx, name)`` is the sum of
    the learning rates of its steps.
    """
    zero = {name: torch.zeros_like(value) for name, value in start.items()}
    state, control, controls = start, zero, dict.fromkeys(SHARES, zero)
    for idx, of_clients in enumerate(rounds):
        trained, new = {}, {}
        for client, batches in of_clients.items():
            own, common = controls[client], control
            now = visit(idx, state, batches, lambda n, g, _, own=own, common=common: g + common[n] - own[n])
            trained[client] = now
            new[client] = {n: own[n] - control[n] + (state[n] - w) / rates(idx, n) for n, w in now.items()}
        change = {n: sum(new[c][n] - controls[c][n] for c in new) / len(SHARES) for n in state}
        control = {n: c + change[n] for n, c in control.items()}
        controls |= new
        state = {n: w + combined(state, trained, weighting)[n] for n, w in state.items()}
    return state


def assert_close(found, expected):
    """As close as fp32 training can be to fp64."""
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=2e-5, atol=2e-6)
