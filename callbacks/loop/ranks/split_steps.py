"""Steps of one client in several processes: each computes a part of a batch's rows, and all add up the gradients.

The loss of a batch of n rows is their mean, so its gradient is ``sum_k n_k / n * gradient of part k`` over the processes k.
Every process then has the whole batch's gradient and loss, and makes the same optimizer step. Dropout is drawn apart in each
process. `fedlight.processes.seat` splits the layers.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import reduce, wraps
from itertools import count
from typing import Any, Protocol, runtime_checkable

import lightning as L
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from fedlight.callbacks.loop.fitted_step import Gradients, HandOver, count_examples, take_examples
from fedlight.callbacks.loop.groups.at_once import AtOnce
from fedlight.callbacks.loop.parts.buffers import BufferPolicy
from fedlight.callbacks.loop.parts.dpsgd import DPSGD
from fedlight.callbacks.loop.parts.part import Part
from fedlight.callbacks.loop.ranks.ranks import sum_of_bits
from fedlight.callbacks.loop.run import Run, seed_all
from fedlight.callbacks.loop.visits.visit import OpenGroup, OpenVisit
from fedlight.processes.joining import OF_TORCH, joined
from fedlight.processes.seat import add_up, held_here, is_split, place
from fedlight.support.torch_parts import eval_mode, replaced, undisturbed

SAME_LOSS = 2e-3
"""Largest relative difference between a batch's loss and the mean over its parts, for which rounding is the reason."""


@runtime_checkable
class PreparesParts(Protocol):
    """Module with passes through its layers that only some rows need, which all processes of a client have to make."""

    def before_parts(self, batch: Any) -> None:
        """Make these passes for the whole batch, before a step on a part of its rows."""


class SplitSteps(Part):
    """Training steps of a visit that the processes of its client share.

    Raises:
        ValueError: in ``setup``, for settings that steps of parts of a batch do not suit; in a step, for a loss that is no
            mean over the rows of a batch.
    """

    def __init__(self) -> None:
        self._place, self._number = place()
        self._as_before = ExitStack()
        self._compared = 0
        self._draw: tuple[int | str, ...] = ()

    def check(self, run: Run) -> None:
        module = run.lightning_module
        name = type(module).__name__
        self._together: int = getattr(module, "examples_together", 1)
        refused = {
            "a fleet emulates small devices, one for each client: leave it out": run.has_fleet,
            "clients side by side share a batch: set clients_at_once=1": any(
                isinstance(part, AtOnce) for part in run.parts
            ),
            "training by forward passes has no gradients to add up: leave forward out": run.train
            != "backprop",
            "DPSGD adds noise to the gradient of a batch in one process: take PrivateMean or ClipAndNoise": any(
                isinstance(part, DPSGD) for part in run.parts
            ),
            f"{type(run.buffers).__name__} needs the statistics of whole batches: take layers such as GroupNorm": (
                type(run.buffers) is not BufferPolicy
            ),
            f"the loss of {name} compares the rows of a batch": getattr(module, "compares_rows", False),
            f"automatic_optimization of {name} is off: have training_step return the loss": (
                not module.automatic_optimization
            ),
            "trainer.precision=16-mixed scales the loss: take bf16-mixed or 32-true": (
                run.trainer.precision == "16-mixed"
            ),
        }
        for reason, is_so in refused.items():
            if is_so:
                raise ValueError(f"{reason}, or set trainer.strategy.processes_per_client=1")

    def start_round(self, run: Run) -> None:
        for name, parameter in run.parameters.items():
            if is_split(parameter):
                raise ValueError(
                    f"the optimizer holds {name}, which was frozen when its layer was split among a client's processes: "
                    "give it the parameters with requires_grad, and set that in __init__ or configure_model, or set "
                    "trainer.strategy.processes_per_client=1"
                )

    def enter(self, run: Run, group: OpenGroup, batch: Any) -> None:
        module = run.lightning_module
        [open_visit] = group.visits
        self._draw = (run.seed, "split", run.round_idx, *open_visit.visiting.visit.purpose)
        step = module.training_step
        split = wraps(step)(self._split(step, module))  # Lightning reads its signature
        self._as_before.enter_context(replaced(module, "training_step", split))

    def leave(self, run: Run, group: OpenGroup, visit: OpenVisit) -> None:
        """Raise ValueError if the processes of the client have trained unlike weights."""
        self.abort(run)
        # Not held_here(weight): a weight may be frozen since.
        split = {id(getattr(weight, "held_here", None)) for weight in run.lightning_module.parameters()}
        whole = [weight for weight in visit.parameters.values() if id(weight) not in split]
        bits = torch.tensor([bit for weight in whole for bit in sum_of_bits(weight)])
        total = bits.clone()
        add_up(total)
        if not torch.equal(total, bits * self._number):
            raise ValueError(
                f"the processes of client {visit.visiting.client.id!r} end its visit with unlike weights: have callbacks "
                "and optimizers depend on nothing that differs between processes, or set "
                "trainer.strategy.processes_per_client=1"
            )

    def abort(self, run: Run) -> None:
        self._as_before.close()

    def _split(self, step: Callable[..., Any], module: L.LightningModule) -> Callable[..., Any]:
        others = joined()
        assert others is not None
        numbers = count()

        def training_step(batch: Any, *args: Any) -> Any:
            part, share, rows = self._part(batch)
            with others.reached(OF_TORCH):
                if rows > 1:  # of a single row every loss is the mean
                    self._compare(module, step, (batch, *args), (part, *args), share)
                if isinstance(module, PreparesParts):
                    module.before_parts(batch)
                with isolate_rng(), nullcontext() if share else quiet(module):
                    seed_all(*self._draw, next(numbers), self._place)
                    result = step(part, *args)
                if self._is_skipped(module, result):
                    return None
                loss = result["loss"] if isinstance(result, Mapping) else result
                trained = [weight for weight in module.parameters() if weight.requires_grad]
                weights = [weight for weight in trained if not is_split(weight)]
                split = [weight for weight in trained if is_split(weight)]
                gradients: Gradients = [None] * len(weights)
                if torch.is_grad_enabled() and loss.requires_grad:  # no row may have a label
                    with torch.autocast(loss.device.type, enabled=False):  # as in backward
                        gradients = _gradients(loss * share, weights, by_hooks=bool(split))
                total, gradients = _added_up(loss.detach().to(module.device) * share, gradients, weights)
                gradients += [_taken(weight) for weight in split]
                weights += [held_here(weight) for weight in split]
            if torch.is_grad_enabled():
                # Lightning clears the gradients after training_step and only then goes backward.
                total = HandOver.apply(total, gradients, *weights)
            return {**result, "loss": total} if isinstance(result, Mapping) else total

        return training_step

    def _part(self, batch: Any) -> tuple[Any, float, int]:
        """Return this process's rows of a batch, their share, and all rows; one that does not count where it has none."""
        try:
            rows = count_examples(batch)
        except ValueError as error:
            raise ValueError(
                f"the rows of a batch cannot be divided among the processes of a client ({error}), or set "
                "trainer.strategy.processes_per_client=1"
            ) from error
        some = math.gcd(rows, self._together)  # examples at a time
        start, stop = (
            some * -(-rows // some * place // self._number) for place in (self._place, self._place + 1)
        )
        # Each has a part of the layers, so all of them compute.
        first = min(start, rows - some)
        return take_examples(batch, first, max(stop, first + some)), (stop - start) / rows, rows

    def _compare(self, module: L.LightningModule, step: Any, whole: Any, part: Any, share: float) -> None:
        """Raise ValueError if the loss of a batch is not the mean over its rows; in step 1, 2, 4, 8, ..."""
        self._compared += 1
        if self._compared & (self._compared - 1):
            return
        with torch.no_grad(), isolate_rng(), quiet(module), eval_mode(module):
            results = [step(*arguments) for arguments in (whole, part)]
        losses = [result["loss"] if isinstance(result, Mapping) else result for result in results]
        values = torch.tensor([0.0 if loss is None else float(loss) for loss in losses], dtype=torch.float64)
        mean, skipped = values[1] * share, torch.tensor(float(None in losses))
        add_up(mean)
        add_up(skipped)
        if not skipped and not torch.isclose(values[0], mean, rtol=SAME_LOSS, atol=1e-6, equal_nan=True):
            raise ValueError(
                f"the loss of a batch is {values[0]:.6g} and the mean over its rows {mean:.6g}: {type(module).__name__} has "
                "to return the mean over the rows of a batch, not over their tokens, or set "
                "trainer.strategy.processes_per_client=1"
            )

    def _is_skipped(self, module: L.LightningModule, result: Any) -> bool:
        """Return whether the step leaves the batch out; raise ValueError if it is so for a part of its rows alone."""
        skipped = torch.tensor(float(result is None), device=module.device)
        add_up(skipped)
        if 0 < skipped < self._number:
            raise ValueError(
                f"{type(module).__name__}.training_step returned None for a part of a batch's rows: have it return "
                "torch.zeros(()) with a gradient, or set trainer.strategy.processes_per_client=1"
            )
        return bool(skipped)


def quiet(module: Any) -> ExitStack:
    """Return a context in which a step neither changes its module nor logs."""
    stack = ExitStack()
    stack.enter_context(undisturbed(module))
    for name in ("log", "log_dict"):
        stack.enter_context(replaced(module, name, lambda *_, **__: None))
    return stack


def _gradients(loss: Tensor, weights: Sequence[Tensor], by_hooks: bool) -> Gradients:
    """Return the gradients of whole weights; ``by_hooks``: those of split ones, which hooks add up, are left in ``grad``."""
    if not by_hooks:
        return [*torch.autograd.grad(loss, weights, allow_unused=True)]
    of_batches_before = [weight.grad for weight in weights]
    for weight in weights:
        weight.grad = None
    loss.backward()
    gradients: Gradients = [weight.grad for weight in weights]
    for weight, before in zip(weights, of_batches_before, strict=True):
        weight.grad = before
    return gradients


def _taken(weight: Any) -> Tensor | None:
    """Return the part of a split weight's gradient in this process, and clear it there."""
    gradient, weight.grad = weight.grad, None
    return None if gradient is None else gradient.to_local()


def _added_up(loss: Tensor, gradients: Gradients, weights: Sequence[Tensor]) -> tuple[Tensor, Gradients]:
    """Return loss and gradients summed over the processes of the client, in one exchange; None where none has reached."""
    known = [torch.zeros_like(w) if g is None else g for w, g in zip(weights, gradients, strict=True)]
    known = [gradient.to_dense() if gradient.is_sparse else gradient for gradient in known]
    reached = torch.tensor([float(gradient is not None) for gradient in gradients], device=loss.device)
    values = [loss, reached, *known]
    kind = reduce(torch.promote_types, (value.dtype for value in values), torch.float32)
    together = torch.cat([value.to(kind).flatten() for value in values])
    add_up(together)
    total, counts, *sums = together.split([value.numel() for value in values])
    return total.view_as(loss).to(loss.dtype), [
        part.view_as(weight).to(weight.dtype) if count else None
        for part, weight, count in zip(sums, weights, counts.tolist(), strict=True)
    ]
