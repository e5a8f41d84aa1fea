"""Warm-up of LESS: a short training with Adam that yields after every epoch.

M. Xia et al., "LESS: Selecting Influential Data for Targeted Instruction Tuning", ICML 2024,
https://arxiv.org/abs/2402.04333: Adam without weight decay, the learning rate rising over the first 3 % of the steps and
falling to 0 over the others. Epochs are weighted by their mean learning rate.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedlight.augmentation.less.features import BETAS, EPSILON, Moments
from fedlight.modules.language.adapters import trained_parameters
from fedlight.modules.sft import SFTModule
from fedlight.support.checks import Settings, check_range, refuse_below
from fedlight.support.seeding import derive_seed

RISING_SHARE = 0.03  # of the paper


@dataclass(frozen=True)
class WarmUp(Settings):
    """Training of the adapter before and between the gradients.

    Args:
        share: share of the public rows to warm up on, in (0, 1].
        epochs: epochs over these rows, >= 1; gradients are taken at the end of each.
        batch_size: rows per step, >= 1.
        lr: highest learning rate, which rises for 3 % of the steps and then falls to 0.

    Raises:
        ValueError: a setting is out of range.
    """

    share: float = 0.05
    epochs: int = 4
    batch_size: int = 32
    lr: float = 2e-5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("warmup.share", self.share, 0, 1, above_low=True)
        refuse_below(1, epochs=self.epochs, batch_size=self.batch_size)


class Epoch(NamedTuple):
    """Finished epoch."""

    mean_lr: float  # mean learning rate of its steps
    mean_loss: float  # mean loss of its batches, nats per token
    moments: Moments  # Adam's state at its end; it changes when the training goes on


def linear_lr(step: int, steps: int, highest: float) -> float:
    """Return the learning rate of a step (from 0), which rises over 3 % of the steps, at least one, and then falls to 0.

    Examples:
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
    """Train a module and yield each epoch when it is finished, with the module in its state then.

    Dropout follows from the module's seed, the epoch and the texts; the global random stream is not touched. ``read``
    converts the batches of each epoch to those of the module, on its device; ``lr`` is the highest learning rate.
    """
    weights = trained_parameters(module)
    optimizer = torch.optim.Adam(weights.values(), lr=lr, betas=BETAS, eps=EPSILON)  # no weight decay
    steps, step = sum(map(len, epochs)), 0
    for number, batches in enumerate(epochs):
        rates, losses = [], []
        for batch in map(read, batches):
            optimizer.param_groups[0]["lr"] = linear_lr(step, steps, lr)
            rates.append(optimizer.param_groups[0]["lr"])
            losses.append(_train_step(module, batch, optimizer, number))
            step += 1
        states = {name: optimizer.state[weight] for name, weight in weights.items()}
        first, second = (
            {name: state[moment] for name, state in states.items()} for moment in ("exp_avg", "exp_avg_sq")
        )
        yield Epoch(sum(rates) / len(rates), sum(losses) / len(losses), Moments(first, second, step))


def _train_step(
    module: SFTModule, batch: dict[str, Tensor], optimizer: torch.optim.Optimizer, epoch: int
) -> float:
    seed = derive_seed(module.options.seed, "dropout", epoch, module.batch_key(batch))
    optimizer.zero_grad()
    with module.dropout_masks.seeded(seed):
        loss = module.example_losses(batch).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()  # frees their memory until the next step
    return loss.item()
