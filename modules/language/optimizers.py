"""Optimizers by their name in ``torch.optim``, and the learning rate as a function of the epoch (= round)."""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from fedlight.support.checks import check_choice

SCHEDULES = ("constant", "cosine")


def check_optimizer(name: str, args: Mapping[str, Any]) -> None:
    """Refuses an optimizer that torch does not have, and arguments that it does not take.

    Args:
        name: of a class in ``torch.optim``.
        args: its further arguments, without ``params`` and ``lr``.

    Raises:
        ValueError: see above; the nearest names are in the message.

    Example:
        >>> check_optimizer("AdamW", {"beta": [0.9, 0.95]})
        Traceback (most recent call last):
        ...
        ValueError: optimizer_args of AdamW='beta': did you mean 'betas'?
    """
    check_choice("optimizer", name, [key for key, value in vars(torch.optim).items() if _is_optimizer(value)])
    if "lr" in args:
        raise ValueError("optimizer_args has 'lr': set lr itself")
    taken = [
        key for key in inspect.signature(getattr(torch.optim, name)).parameters if key not in ("params", "lr")
    ]
    for key in args:
        check_choice(f"optimizer_args of {name}", key, taken)


def _is_optimizer(value: object) -> bool:
    return (
        isinstance(value, type)
        and issubclass(value, torch.optim.Optimizer)
        and value is not torch.optim.Optimizer
    )


def make_optimizer(
    name: str, parameters: Iterable[nn.Parameter], lr: float, args: Mapping[str, Any]
) -> torch.optim.Optimizer:
    """The optimizer; lists among ``args`` become tuples, which YAML cannot write.

    Example:
        >>> weight = nn.Parameter(torch.zeros(1))
        >>> make_optimizer("AdamW", [weight], 1e-5, {"betas": [0.9, 0.95]}).defaults["betas"]
        (0.9, 0.95)
    """
    plain = {key: tuple(value) if isinstance(value, list) else value for key, value in args.items()}
    optimizer: torch.optim.Optimizer = getattr(torch.optim, name)(parameters, lr=lr, **plain)
    return optimizer


def cosine(max_epochs: int | None) -> Callable[[int], float]:
    """Factor on the learning rate in each epoch: from 1 in epoch 0 towards 0 after the last.

    Args:
        max_epochs: at least 1.

    Raises:
        ValueError: there is no last epoch.

    Example:
        >>> [round(cosine(4)(epoch), 4) for epoch in range(5)]
        [1.0, 0.8536, 0.5, 0.1464, 0.0]
    """
    if max_epochs is None or max_epochs < 1:
        raise ValueError(
            f"lr_schedule='cosine' needs an end: trainer.max_epochs={max_epochs}, set it above 0"
        )
    return lambda epoch: (1 + math.cos(math.pi * min(epoch, max_epochs) / max_epochs)) / 2


def configure(
    options: Any, parameters: Iterable[nn.Parameter], max_epochs: int | None
) -> OptimizerLRScheduler:
    """The optimizer of a module's settings, with its schedule where they ask for one.

    Args:
        options: ``optimizer``, ``optimizer_args``, ``lr`` and ``lr_schedule``.
        parameters: what is trained.
        max_epochs: after which a schedule has ended.
    """
    optimizer = make_optimizer(options.optimizer, parameters, options.lr, options.optimizer_args or {})
    if options.lr_schedule == "constant":
        return optimizer
    return {"optimizer": optimizer, "lr_scheduler": LambdaLR(optimizer, cosine(max_epochs))}
