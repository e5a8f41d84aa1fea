"""A short training with Adam that stops at the end of every epoch to be looked at: the warm-up of LESS.

M. Xia et al., "LESS: Selecting Influential Data for Targeted Instruction Tuning", ICML 2024,
https://arxiv.org/abs/2402.04333: Adam without weight decay, the learning rate rising over the first 3 % of the steps and
falling to 0 over the others. Epochs are weighted by their mean learning rate.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedlight.augmentation.less.gradient_features import BETAS, EPSILON, Moments
from fedlight.modules.language.adapters import trained_parameters
from fedlight.modules.language.streams import own_stream
from fedlight.modules.sft import SFTModule
from fedlight.support.seeding import derive_seed

RISING_SHARE = 0.03


class Epoch(NamedTuple):
    """An epoch that has just been trained."""

    mean_lr: float
    mean_loss: float
    """Of its batches, nats per token."""
    moments: Moments
    """Of Adam, at its end; they change when the training goes on."""


def linear_lr(step: int, steps: int, highest: float) -> float:
    """The learning rate of a step: it rises over the first 3 % of the steps, at least one, and falls to 0 after the last.

    Args:
        step: counted from 0.
        steps: of the whole training.
        highest: reached at the end of the rise.

    Example:
        >>> [linear_lr(step, 5, 1.0) for step in range(5)]
        [1.0, 0.8, 0.6, 0.4, 0.2]
        >>> [round(linear_lr(step, 100, 1.0), 3) for step in (0, 1, 2, 3, 99)]
        [0.333, 0.667, 1.0, 0.99, 0.01]
    """
    rising = max(1, round(RISING_SHARE * steps))
    if step < rising:
        return highest * (step + 1) / rising
    return highest * (steps - step) / (steps - rising + 1)


def warm_up(
    module: SFTModule, epochs: Sequence[Sequence[Any]], read: Callable[[Any], dict[str, Tensor]], lr: float
) -> Iterator[Epoch]:
    """Trains a module, and gives way to the caller after each epoch, the module being where it is by then.

    Dropout follows from the module's seed, the epoch and the texts; the global random stream is not touched.

    Args:
        module: configured, with one adapter.
        epochs: of each epoch its batches, in a form of the caller's.
        read: makes of that form a batch on the module's device.
        lr: the highest learning rate.

    Yields:
        What the epoch was.
    """
    weights = trained_parameters(module)
    optimizer = torch.optim.Adam(weights.values(), lr=lr, betas=BETAS, eps=EPSILON)
    steps, step = sum(map(len, epochs)), 0
    for number, batches in enumerate(epochs):
        rates, losses = [], []
        for batch in map(read, batches):
            optimizer.param_groups[0]["lr"] = linear_lr(step, steps, lr)
            rates.append(optimizer.param_groups[0]["lr"])
            losses.append(_step(module, batch, optimizer, number))
            step += 1
        yield Epoch(sum(rates) / len(rates), sum(losses) / len(losses), _moments(optimizer, weights, step))


def _step(module: SFTModule, batch: dict[str, Tensor], optimizer: torch.optim.Optimizer, epoch: int) -> float:
    seed = derive_seed(module.options.seed, "dropout", epoch, module.batch_key(batch))
    optimizer.zero_grad()
    with own_stream(seed, batch["input_ids"].device):
        loss = module.example_losses(batch).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def _moments(optimizer: torch.optim.Optimizer, weights: dict[str, torch.nn.Parameter], steps: int) -> Moments:
    states = {name: optimizer.state[weight] for name, weight in weights.items()}
    first, second = (
        {name: state[moment] for name, state in states.items()} for moment in ("exp_avg", "exp_avg_sq")
    )
    return Moments(first, second, steps)
