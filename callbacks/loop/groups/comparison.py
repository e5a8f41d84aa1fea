"""Comparison of a client in a batch with others and the same client alone, before the first group of a run.

It shows differences that no look at a module does: losses that depend on the other examples, layers that see the examples of
a batch in another order, and a training step with another loss. New adapters change nothing, because their B is 0, and would
hide these, so the comparison is at weights moved at random, the client's in another way than the others'.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from fedlight.callbacks.loop.fitted_step import take_examples
from fedlight.callbacks.loop.groups.refusals import OURS, refusal
from fedlight.callbacks.loop.run import LossPerExample, parameters_of
from fedlight.federation.client import State
from fedlight.stacking import StackedAdapters
from fedlight.support.torch_parts import eval_mode, replaced, undisturbed

MOVED = 0.05
"""Least standard deviation of what is added to weights: of the size of a large layer's; otherwise that of the weights."""
NOT_ROUNDING, IN_16_BITS = 1e-3, 5e-2
"""Relative difference of losses that rounding does not explain, and that of losses computed in 16 bits."""
OF_EFFECT = 0.25
"""What is put down to rounding in 16 bits besides, as a share of what other weights change: random weights amplify it."""
SAME_BATCH = 1e-4, 2e-2
"""The same where the batch is the same, so that only the mean may be taken in another way."""


def compare_losses(
    module: L.LightningModule,
    parameters: Mapping[str, Tensor],
    batch: Any,
    counts: Sequence[int],
    adapters: Sequence[str | None],
) -> None:
    """Raise ValueError if a client's losses in a group differ from those alone, or from the loss of training_step.

    Compared is a client with most examples, in evaluation mode and without gradients. A warning names the metrics that
    training_step logs, which is not called for clients side by side.

    Args:
        module: module with its own shapes, and with the first client's adapter active.
        parameters: trained parameters by name.
        batch: examples of several clients, client after client.
        counts: number of examples of each.
        adapters: adapter of each; None for the one that is active.
    """
    assert isinstance(module, LossPerExample)
    alike = [k for k, adapter in enumerate(adapters) if adapter == adapters[0]]
    asked = max(alike, key=lambda k: counts[k])
    start = sum(counts[:asked])
    rows = slice(start, start + counts[asked])
    try:
        examples = take_examples(batch, rows.start, rows.stop)
    except ValueError as error:
        raise refusal(
            f"a batch of type {type(batch).__name__} cannot be divided among clients",
            "give a dictionary, list or tuple of tensors with one row per example",
        ) from error
    weights, others = (_moved(parameters, seed) for seed in (0, 1))
    name, step, logged = type(module).__name__, None, dict[str, None]()
    with (
        torch.no_grad(),
        undisturbed(module),
        eval_mode(module),
        replaced(module, "log", lambda name, *_, **__: logged.setdefault(name)),
        replaced(module, "log_dict", lambda values, *_, **__: logged.update(dict.fromkeys(values))),
        module.trainer.precision_plugin.forward_context(),
    ):
        with parameters_of(module, weights):
            alone = module.example_losses(examples)
            check_shape(name, alone, counts[asked : asked + 1])
            beside = module.example_losses(batch)
            check_shape(name, beside, counts)
            beside = beside[rows]
            if not type(module).training_step.__module__.startswith(OURS):
                logged.clear()
                step = module.training_step(examples, 0)
        with parameters_of(module, others):
            effect = (module.example_losses(examples) - alone).abs().max().item()
        stack = StackedAdapters(module, parameters)
        stack.enter([weights if k == asked else others for k in range(len(counts))], adapters)
        try:
            stack.set_rows(counts, None)
            stacked = module.example_losses(batch)[rows]
        finally:
            stack.leave()
    kinds = {p.dtype for p in module.parameters() if p.is_floating_point()}
    is_16_bits = "16" in str(module.trainer.precision) or bool(kinds & {torch.bfloat16, torch.float16})
    most = IN_16_BITS if is_16_bits else NOT_ROUNDING
    slack = most + OF_EFFECT * effect if is_16_bits and math.isfinite(effect) else most
    if not _alike(alone, beside, most, slack):
        raise refusal(
            f"{name}.example_losses gives an example another loss beside other examples, as contrastive losses do, so "
            "clients of one batch would change each other"
        )
    if not _alike(alone, stacked, most, slack):
        raise refusal(
            f"{name} gives its layers with adapters another input than the examples of a batch in their order along the "
            "first dimension, as models do that have tokens first, or several rows of each example next to each other, so "
            "clients would train each other's adapters"
        )
    loss = step["loss"] if isinstance(step, Mapping) else step
    if isinstance(loss, Tensor) and not _alike(loss, alone.mean(), *2 * [SAME_BATCH[is_16_bits]]):
        raise refusal(
            f"{name}.training_step returns a loss of {loss.item():.6g} where the mean of example_losses is "
            f"{alone.mean().item():.6g}, which is what clients side by side train",
            "make them equal",
        )
    if logged:
        rank_zero_warn(
            f"{name}.training_step logs {', '.join(logged)}, and is not called for clients side by side, so these are "
            "metrics of the clients alone that a round trains one at a time, if it has any: fed/loss is the mean loss of "
            "all visits"
        )


def _moved(parameters: Mapping[str, Tensor], seed: int) -> State:
    """Return the parameters with something random of their size added."""
    generator = torch.Generator().manual_seed(seed)
    moved = {}
    for name, parameter in parameters.items():
        weight = parameter.detach().cpu().float()
        size = max(MOVED, weight.square().mean().sqrt().item())
        moved[name] = weight + size * torch.randn(weight.shape, generator=generator)
    return moved


def _alike(some: Tensor, others: Tensor, relative: float, absolute: float) -> bool:
    some, others = some.cpu().double(), others.cpu().double()  # MPS has no fp64
    return torch.allclose(some, others, rtol=relative, atol=absolute, equal_nan=True)


def check_shape(name: str, losses: Tensor, counts: Sequence[int]) -> None:
    """Raise ValueError unless there is one loss for each example of a batch with so many examples of each client."""
    if losses.shape != (sum(counts),):
        raise refusal(
            f"{name}.example_losses gives losses of shape {tuple(losses.shape)} for a batch of {sum(counts)} examples",
            "give one for each, (examples,)",
        )
