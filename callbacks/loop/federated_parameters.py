"""Which parameters are federated: those that the module's optimizers hold when the first visit of a round begins.

Lightning's finetuning callbacks add parameters when an epoch starts, and may stand behind the loop among the callbacks. So
the loop asks when a round opens and again before its first visit. What has joined by then was not trained in this round: the
value that the module has is the global one.

On resume these callbacks freeze what they had unfrozen and leave it so, although the optimizer holds it: a resumed run would
go on without it and say nothing. So the loop remembers what was trained.
"""

from collections.abc import Mapping

import lightning as L
from torch import Tensor, float32, float64


def federated_parameters(trainer: L.Trainer, module: L.LightningModule) -> dict[str, Tensor]:
    """The named parameters that the optimizers hold, in the order of the module.

    Raises:
        ValueError: an optimizer holds a parameter that the module does not, there are none, or one has too few bits.
    """
    held = _held(trainer)
    named: dict[str, Tensor] = {name: p for name, p in module.named_parameters() if id(p) in held}
    if not held:
        raise ValueError(
            "configure_optimizers gives no optimizer that holds a parameter, so there is nothing to federate: have it "
            "return one over what is to be trained, as those are the parameters that are sent"
        )
    if len(named) < len(held):
        raise ValueError(
            f"{len(held) - len(named)} of the optimizer's {len(held)} parameters are not parameters of the "
            "LightningModule: make what is trained a submodule of it"
        )
    for name, parameter in named.items():
        if parameter.is_complex():
            raise ValueError(
                f"{name} is trained in {str(parameter.dtype).removeprefix('torch.')}, and what is sent are real numbers: "
                "hold its real and imaginary parts as one real parameter, and read it with torch.view_as_complex"
            )
        if parameter.dtype not in (float32, float64):
            raise ValueError(
                f"{name} is trained in {str(parameter.dtype).removeprefix('torch.')}, which would round the global model in "
                f"every round: keep what is trained in float32. trainer.precision is {trainer.precision!r}; 'bf16-mixed' "
                "and '16-mixed' compute in 16 bits and leave parameters in float32"
            )
    return named


def refuse_joined(trainer: L.Trainer, parameters: dict[str, Tensor], client_id: str) -> None:
    """Raises ``ValueError`` where the optimizers hold other parameters at the end of a visit than when the round began."""
    number = len(_held(trainer) ^ {id(parameter) for parameter in parameters.values()})
    if number:
        raise ValueError(
            f"{number} parameters joined or left the optimizer during the visit to client {client_id}, so some clients of "
            "the round would train them and others not: change what is trained in on_train_epoch_start, as Lightning's "
            "BaseFinetuning does"
        )


def which_are_trained(parameters: Mapping[str, Tensor]) -> dict[str, bool]:
    """Of each federated parameter whether it gets gradients, for a checkpoint."""
    return {name: parameter.requires_grad for name, parameter in parameters.items()}


def train_again(module: L.LightningModule, trained: Mapping[str, bool]) -> None:
    """Has the module train what it trained when a checkpoint was made, given what :func:`which_are_trained` said."""
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(trained.get(name, parameter.requires_grad))


def _held(trainer: L.Trainer) -> set[int]:
    return {
        id(p) for optimizer in trainer.optimizers for group in optimizer.param_groups for p in group["params"]
    }
