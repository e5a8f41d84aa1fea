"""Optimizers by their name in ``torch.optim``, and the learning rate as a function of the epoch (= round)."""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from lightning import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from fedlight.support.checks import Checked, Settings, check_choice
from fedlight.support.settings_record import with_plain_values

SCHEDULES = ("constant", "cosine")


@dataclass(frozen=True)
class Optimization(Settings):
    """Optimizer of a module, and its learning rate as a function of the round.

    Args:
        name: name of a class in ``torch.optim``.
        args: further arguments of the optimizer, such as ``{"betas": [0.9, 0.95]}``.
        schedule: ``constant``, or ``cosine`` from ``lr`` to 0 over ``trainer.max_epochs`` (epochs are rounds).

    Raises:
        ValueError: torch has no such optimizer, it has no such argument, or the schedule is misspelt.
    """

    name: str = "AdamW"
    args: dict[str, Any] | None = None
    schedule: str = "constant"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("optimizer.schedule", self.schedule, SCHEDULES)
        check_optimizer(self.name, self.args or {})


def check_optimizer(name: str, args: Mapping[str, Any]) -> None:
    """Raise ValueError, with the nearest names, unless ``torch.optim`` has an optimizer that takes the arguments.

    Examples:
        >>> check_optimizer("AdamW", {"beta": [0.9, 0.95]})
        Traceback (most recent call last):
        ...
        ValueError: optimizer.args of AdamW='beta': did you mean 'betas'?
    """
    kinds = {key: kind for key, kind in vars(torch.optim).items() if isinstance(kind, type)}
    base = kinds.pop("Optimizer")
    check_choice("optimizer.name", name, [key for key, kind in kinds.items() if issubclass(kind, base)])
    if "lr" in args:
        raise ValueError("optimizer.args has 'lr': set lr itself")
    parameters = inspect.signature(getattr(torch.optim, name)).parameters
    for key in args:
        check_choice(
            f"optimizer.args of {name}", key, [key for key in parameters if key not in ("params", "lr")]
        )
    try:  # on a matrix, as adapters have: some optimizers take no other
        make_optimizer(name, [nn.Parameter(torch.zeros(1, 1))], 1e-3, args)
    except (ValueError, TypeError, LookupError, RuntimeError) as error:
        raise ValueError(f"optimizer.args={dict(args)} does not fit {name}: {error}") from None


def make_optimizer(
    name: str, parameters: Iterable[nn.Parameter], lr: float, args: Mapping[str, Any]
) -> torch.optim.Optimizer:
    """Return the optimizer; lists in ``args`` become tuples, which YAML cannot write.

    Examples:
        >>> weight = nn.Parameter(torch.zeros(1))
        >>> make_optimizer("AdamW", [weight], 1e-5, {"betas": [0.9, 0.95]}).defaults["betas"]
        (0.9, 0.95)
    """
    plain = {key: tuple(value) if isinstance(value, list) else value for key, value in args.items()}
    return getattr(torch.optim, name)(list(parameters), lr=lr, **plain)


def cosine(max_epochs: int | None) -> Callable[[int], float]:
    """Return the learning rate's factor as a function of the epoch: from 1 in epoch 0 towards 0 after the last.

    Raises:
        ValueError: the training has no last epoch, or it is below 1.

    Examples:
        >>> [round(cosine(4)(epoch), 4) for epoch in range(5)]
        [1.0, 0.8536, 0.5, 0.1464, 0.0]
    """
    if max_epochs is None or max_epochs < 1:
        raise ValueError(
            f"optimizer.schedule='cosine' needs an end: trainer.max_epochs={max_epochs}, set it above 0"
        )
    return lambda epoch: (1 + math.cos(math.pi * min(epoch, max_epochs) / max_epochs)) / 2


class OptimizedModule(Checked, LightningModule):
    """Base of modules with settings ``lr`` and ``optimizer``, an `Optimization`; a subclass defines ``example_losses``."""

    @property
    def options(self) -> Any:
        """Arguments of the constructor, as attributes; nested ones are maps."""
        return self.hparams

    def save_plain(self, **nested: Any) -> None:
        """Save the hyperparameters again as plain values, with these objects for the maps of nested ones."""
        self.save_hyperparameters(with_plain_values({**self.hparams, **nested}))

    def example_losses(self, batch: Any) -> Tensor:
        """Return one loss per example, ``(batch,)``."""
        raise NotImplementedError(
            f"{type(self).__name__} has no loss: use SFTModule, SelectorModule, RewardModule or DPOModule"
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        losses = self.example_losses(batch)
        self.log_means("train", {"loss": losses})
        return losses.mean()

    def log_means(self, stage: str, metrics: Mapping[str, Tensor]) -> None:
        """Log the mean of each metric as ``stage/name``."""
        for name, values in metrics.items():
            self.log(
                f"{stage}/{name}", values.detach().mean(), batch_size=len(values), prog_bar=name == "loss"
            )

    def configure_optimizers(self) -> OptimizerLRScheduler:
        settings, lr = self.options.optimizer, self.options.lr
        trained = [weight for weight in self.parameters() if weight.requires_grad]
        optimizer = make_optimizer(settings["name"], trained, lr, settings["args"] or {})
        if settings["schedule"] == "constant":
            return optimizer
        schedule = LambdaLR(optimizer, cosine(self.trainer.max_epochs))
        return {"optimizer": optimizer, "lr_scheduler": schedule}
