"""Refusals of what cannot be trained for several clients in one batch, before work starts, with the remedy."""

from collections.abc import Mapping, Sequence
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.optim import Optimizer

from fedlight.callbacks.loop.fitted_step import take_examples
from fedlight.callbacks.loop.run import LossPerExample
from fedlight.callbacks.loop.visit import TakesVisitStart
from fedlight.federation.protocols import StreamsGroups
from fedlight.stacking.stacked_adapters import with_adapter
from fedlight.support.torch_parts import eval_mode, replaced, undisturbed

ELEMENTWISE = frozenset(
    getattr(torch.optim, name)
    for name in (
        *(
            "SGD",
            "Adam",
            "AdamW",
            "NAdam",
            "RAdam",
            "Adamax",
            "Adagrad",
            "Adadelta",
            "RMSprop",
            "Rprop",
            "ASGD",
        ),
    )
)
"""Optimizers that step each number by its own gradients alone, so that they step stacked clients as each client alone."""
IN_VISITS = (
    "on_train_batch_start",
    "on_train_batch_end",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
)
"""Hooks that see the module, its batch or its gradients during a visit."""
OF_MODULES = (*IN_VISITS, "backward", "configure_gradient_clipping", "optimizer_step", "optimizer_zero_grad")
OURS = ("lightning.", "fedlight.")
NOT_ROUNDING, IN_16_BITS = 1e-3, 5e-2
"""Relative difference of losses that rounding does not explain, and that of losses computed in 16 bits."""


def refusal(why: str, remedy: str = "") -> ValueError:
    """Return the error for what cannot be trained for several clients at once, with a remedy beside one at a time."""
    or_else = f"{remedy}, or set it to 1" if remedy else "set it to 1"
    return ValueError(f"federated.clients_at_once above 1: {why}: {or_else}")


def check_run(trainer: L.Trainer, module: L.LightningModule, data: object, buffers: str) -> None:
    """Raise ValueError for a module, data or settings of a trainer that train one client at a time alone."""
    if not isinstance(data, StreamsGroups):
        raise refusal(
            f"{type(data).__name__} does not give batches of several clients",
            "derive it from FederatedDataModule or wrap it, FederatedWrapper(datamodule, clients=...)",
        )
    name = type(module).__name__
    if not isinstance(module, LossPerExample):
        raise refusal(
            f"{name} has no example_losses(batch) -> (examples,), of which each client's loss is the mean",
            "add this method, and return its mean in training_step",
        )
    if not module.automatic_optimization:
        raise refusal(f"{name} has automatic_optimization=False and steps batches of several clients as one")
    if trainer.precision == "16-mixed":
        raise refusal(
            "trainer.precision='16-mixed' scales one loss for all clients and leaves out a step of all where one overflows",
            "use 'bf16-mixed' or '32-true'",
        )
    if buffers != "refuse":
        raise refusal(
            f"federated.buffers={buffers} gives each client buffers of its own, and a batch has one set"
        )
    _refuse_hooks(module, OF_MODULES)
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        _refuse_hooks(callback, IN_VISITS)


def _refuse_hooks(owner: Any, hooks: Sequence[str]) -> None:
    """Raise ValueError for a module or callback that sees a visit from inside and does not say that it takes several."""
    if getattr(owner, "takes_stacked", False):
        return
    if isinstance(owner, TakesVisitStart):
        hooks = ("on_visit_start", *hooks)
    for hook in hooks:
        own = vars(owner).get(hook) or getattr(type(owner), hook, None)
        if own is not None and not (getattr(own, "__module__", None) or "").startswith(OURS):
            raise refusal(
                f"{type(owner).__name__}.{hook} would see a batch of several clients, and parameters and gradients with a "
                "leading dimension of clients",
                "give the class takes_stacked = True if it can work with these, take it out",
            )


def check_optimizers(optimizers: Sequence[Optimizer], parameters: Mapping[str, Tensor]) -> None:
    """Raise ValueError for optimizers that do not step each number by itself, or treat adapters of the module unlike.

    Clients that train several adapters side by side share the parameters of one of them.
    """
    groups: dict[int, int] = {}
    for optimizer in optimizers:
        if type(optimizer) not in ELEMENTWISE:
            raise refusal(
                f"{type(optimizer).__name__} is not known to step each number by its own gradients alone",
                f"take one of {', '.join(sorted(kind.__name__ for kind in ELEMENTWISE))}",
            )
        groups |= {id(p): id(group) for group in optimizer.param_groups for p in group["params"]}
    seen: dict[str, tuple[str, int]] = {}
    for name, parameter in parameters.items():
        first, group = seen.setdefault(with_adapter(name, ""), (name, groups[id(parameter)]))
        if group != groups[id(parameter)]:
            raise refusal(
                f"{name} and {first} are in different groups of the optimizers, and clients that train these adapters side "
                "by side share one",
                "give all adapters one group",
            )


def check_losses(module: L.LightningModule, batch: Any, counts: Sequence[int]) -> None:
    """Raise ValueError if a client's losses depend on the others in its batch, or are not what training_step returns.

    Both are asked once a run, in evaluation mode and without gradients, for the first client of a group.

    Args:
        module: module with its own shapes.
        batch: examples of several clients, client after client.
        counts: number of examples of each.
    """
    assert isinstance(module, LossPerExample)
    name, first = type(module).__name__, take_examples(batch, 0, counts[0])
    with (
        torch.no_grad(),
        undisturbed(module),
        eval_mode(module),
        replaced(module, "log", lambda *args, **kwargs: None),
        replaced(module, "log_dict", lambda *args, **kwargs: None),
        module.trainer.precision_plugin.forward_context(),
    ):
        alone = module.example_losses(first)
        check_shape(name, alone, counts[:1])
        beside = module.example_losses(batch)
        check_shape(name, beside, counts)
        is_own = not type(module).training_step.__module__.startswith(OURS)
        step = module.training_step(first, 0) if is_own else alone.mean()
    loss = step["loss"] if isinstance(step, Mapping) else step
    most = IN_16_BITS if _is_in_16_bits(module) else NOT_ROUNDING
    if not torch.allclose(alone, beside[: counts[0]], rtol=most, atol=most, equal_nan=True):
        raise refusal(
            f"{name}.example_losses gives an example another loss beside other examples, as contrastive losses do, so "
            "clients of one batch would change each other"
        )
    if isinstance(loss, Tensor) and not torch.allclose(
        loss, alone.mean(), rtol=most, atol=most, equal_nan=True
    ):
        raise refusal(
            f"{name}.training_step returns a loss of {loss.item():.6g} where the mean of example_losses is "
            f"{alone.mean().item():.6g}, which is what clients side by side train",
            "make them equal",
        )


def check_shape(name: str, losses: Tensor, counts: Sequence[int]) -> None:
    """Raise ValueError unless there is one loss for each example of a batch with so many examples of each client."""
    if losses.shape != (sum(counts),):
        raise refusal(
            f"{name}.example_losses gives losses of shape {tuple(losses.shape)} for a batch of {sum(counts)} examples",
            "give one for each, (examples,)",
        )


def _is_in_16_bits(module: L.LightningModule) -> bool:
    kinds = {p.dtype for p in module.parameters() if p.is_floating_point()}
    return "16" in str(module.trainer.precision) or bool(kinds & {torch.bfloat16, torch.float16})
