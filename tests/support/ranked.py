"""A module of LoRA layers of any rank with one scaling, and federated rounds of clients of unlike ranks written out."""

import torch
from peft import LoraConfig, get_peft_model
from stacked import CLIENTS, Lora, fit
from torch import nn
from two_parts import Recorder, share_of, weights

from fedlight.federation.algorithms.lora.unlike_ranks import UnlikeRanks

RANKS = {"a": 1, "b": 2, "c": 3}
"""Of three clients; d has that of the module, 4."""
LAYERS = ("net.base_model.model.0", "net.base_model.model.2")


class Ranked(Lora):
    """LoRA of any rank on the first two of three frozen layers, 6 to 8 and 8 to 7; the scaling is 2 for every rank."""

    def __init__(self, optimizer="SGD", lr=0.1, rank=4, dropout=0.0, **options):
        super().__init__(optimizer, lr, **options)
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 1))
        config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=["0", "2"], lora_dropout=dropout)
        self.net = get_peft_model(net, config)
        for name, parameter in self.net.named_parameters():
            if "lora_B" in name:  # or no gradient would reach A in the first step
                nn.init.normal_(parameter, std=0.3)


def trained_of(module):
    """Return copies of the trained parameters."""
    return {name: value for name, value in weights(module).items() if "lora_" in name}


def a_of(layer):
    return f"{layer}.lora_A.default.weight"


def b_of(layer):
    return f"{layer}.lora_B.default.weight"


def products(state):
    """Return B A of each layer, fp64."""
    return {layer: state[b_of(layer)].double() @ state[a_of(layer)].double() for layer in LAYERS}


def sliced(state, rank):
    """Return the first rows of A and columns of B."""
    return {name: value[:rank] if "lora_A" in name else value[:, :rank] for name, value in state.items()}


def trained_alone(start, batches, rank, optimizer, lr, pull=0.0, **options):
    """Return what a module of that very rank has after a step on each batch, in plain torch."""
    module = Ranked(optimizer, lr, rank=rank, **options)
    own = {name: p for name, p in module.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for name, p in own.items():
            p.copy_(start[name])
    steps = module.configure_optimizers()
    for batch in batches:
        steps.zero_grad()
        module.training_step(batch, 0).backward()
        for name, p in own.items():
            p.grad += pull * (p.detach() - start[name])
        steps.step()
    return trained_of(module)


def written_out(start, rounds, combine, ranks=RANKS, full=4, optimizer="SGD", lr=0.1, **how):
    """Return the states after each round; each client trains in a module of its own rank.

    Args:
        start: the parameters of the module of rank ``full``.
        rounds: visits of each round with their batches, as `Recorder` has them.
        combine: function from the state and the clients' (share, rank, factors) to the next state.
        ranks: client -> rank; ``full`` for others.
    """
    states, state = [], start
    for visits in rounds.values():
        ends = []
        for visit, batches in visits:
            rank = ranks.get(visit.client_id, full)
            own = trained_alone(sliced(state, rank), batches, rank, optimizer, lr, **how)
            ends.append((share_of(visit.client_id, CLIENTS), rank, own))
        state = combine(state, ends)
        states.append(state)
    return states


def with_ranks(algorithm, ranks):
    """Give an algorithm its ranks, checked as its constructor does."""
    UnlikeRanks.__init__(algorithm, ranks, algorithm.weighting, algorithm.local)
    return algorithm


def run(algorithm, data, rounds=3, ranks=RANKS, module=None, at_once=1, callbacks=(), **loop):
    """Train; return the module's start, its trained parameters, rows, the recorder (of clients alone) and the loop."""
    seen, module = Recorder(), module or Ranked()
    start = trained_of(module)
    trained, rows, _, made = fit(
        module,
        data,
        at_once,
        rounds,
        [*([seen] if at_once == 1 else []), *callbacks],
        algorithm=with_ranks(algorithm, ranks),
        **loop,
    )
    return start, trained, rows, seen, made
