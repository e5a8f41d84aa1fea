"""Steps of one client in several processes: each computes a part of a batch's rows, and all add up the gradients.

The loss of a batch of n rows is their mean, so its gradient is ``sum_k n_k / n * gradient of part k`` over the processes k.
Every process then has the whole batch's gradient and loss, and makes the same optimizer step. Dropout is drawn apart in each
process. `fedlight.processes.seat` splits the layers.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from functools import reduce, wraps
from typing import Any

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from fedlight.callbacks.loop.fitted_step import Gradients, HandOver, count_examples, take_examples
from fedlight.callbacks.loop.groups.at_once import AtOnce
from fedlight.callbacks.loop.parts.buffers import BufferPolicy
from fedlight.callbacks.loop.parts.dpsgd import DPSGD
from fedlight.callbacks.loop.parts.part import Part
from fedlight.callbacks.loop.run import Run, seed_all
from fedlight.callbacks.loop.visits.visit import OpenGroup, OpenVisit
from fedlight.processes.joining import joined
from fedlight.processes.seat import add_up, place
from fedlight.support.torch_parts import eval_mode, replaced, undisturbed

SAME_LOSS = 2e-3
"""Largest relative difference between a batch's loss and the mean over its parts, for which rounding is the reason."""


class SplitSteps(Part):
    """Training steps of a visit that the processes of its client share.

    Raises:
        ValueError: in ``setup``, for settings that steps of parts of a batch do not suit; in the first step, for a loss that
            is no mean over the rows of a batch.
    """

    def __init__(self) -> None:
        self._place, self._number = place()
        self._as_before = ExitStack()
        self._is_compared = False

    def check(self, run: Run) -> None:
        module = run.lightning_module
        name = type(module).__name__
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
            if hasattr(parameter, "full_tensor"):
                raise ValueError(
                    f"{name} is trained, and it was frozen when its layer was split among the processes of a client: have "
                    "the module set requires_grad in __init__ or configure_model, or set "
                    "trainer.strategy.processes_per_client=1"
                )

    def enter(self, run: Run, group: OpenGroup, batch: Any) -> None:
        module = run.lightning_module
        step = module.training_step
        split = wraps(step)(self._split(step, run))  # Lightning reads its signature
        self._as_before.enter_context(replaced(module, "training_step", split))

    def leave(self, run: Run, group: OpenGroup, visit: OpenVisit) -> None:
        self.abort(run)

    def abort(self, run: Run) -> None:
        self._as_before.close()

    def _split(self, step: Callable[..., Any], run: Run) -> Callable[..., Any]:
        module, others = run.lightning_module, joined()
        assert others is not None

        def training_step(batch: Any, *args: Any) -> Any:
            rows = count_examples(batch)
            start, stop = (rows * number // self._number for number in (self._place, self._place + 1))
            share = (stop - start) / rows
            # A process without rows computes one all the same: each has a part of the layers.
            part = take_examples(batch, start, max(stop, start + 1))
            draw = int(torch.randint(2**62, ()))  # the same in all processes of the client
            with others.reached():
                if not self._is_compared:
                    self._compare(run, step, (batch, *args), (part, *args), share)
                with isolate_rng(), nullcontext() if share else quiet(module):
                    seed_all(draw, self._place)
                    result = step(part, *args)
                if self._is_skipped(run, result):
                    return None
                loss = result["loss"] if isinstance(result, Mapping) else result
                weights = [weight for weight in module.parameters() if weight.requires_grad]
                gradients: Gradients = [None] * len(weights)
                if torch.is_grad_enabled():
                    with torch.autocast(loss.device.type, enabled=False):  # as in backward
                        gradients = [*torch.autograd.grad(loss * share, weights, allow_unused=True)]
                total, gradients = _added_up(loss.detach() * share, gradients)
            if torch.is_grad_enabled():
                # Lightning clears the gradients after training_step and only then goes backward.
                total = HandOver.apply(total, gradients, *weights)
            return {**result, "loss": total} if isinstance(result, Mapping) else total

        return training_step

    def _compare(self, run: Run, step: Any, all_of_it: Any, part: Any, share: float) -> None:
        """Raise ValueError if the loss of a batch is not the mean over its rows."""
        module = run.lightning_module
        with torch.no_grad(), isolate_rng(), quiet(module), eval_mode(module):
            results = [step(*arguments) for arguments in (all_of_it, part)]
        losses = [result["loss"] if isinstance(result, Mapping) else result for result in results]
        values = torch.tensor([0.0 if loss is None else float(loss) for loss in losses], dtype=torch.float64)
        mean, skipped = values[1] * share, torch.tensor(float(None in losses))
        add_up(mean)
        add_up(skipped)
        if skipped:  # nothing to compare
            return
        self._is_compared = True
        if not torch.isclose(values[0], mean, rtol=SAME_LOSS, atol=1e-6, equal_nan=True):
            raise ValueError(
                f"the loss of a batch is {values[0]:.6g} and the mean over its rows {mean:.6g}: {type(module).__name__} has "
                "to return the mean over the rows of a batch, not over their tokens, or set "
                "trainer.strategy.processes_per_client=1"
            )

    def _is_skipped(self, run: Run, result: Any) -> bool:
        """Return whether the step leaves the batch out; raise ValueError if it is so for a part of its rows alone."""
        skipped = torch.tensor(float(result is None), device=run.lightning_module.device)
        add_up(skipped)
        if 0 < skipped < self._number:
            raise ValueError(
                f"{type(run.lightning_module).__name__}.training_step returned None for a part of a batch's rows: have it "
                "return torch.zeros(()) with a gradient, or set trainer.strategy.processes_per_client=1"
            )
        return bool(skipped)


def quiet(module: Any) -> ExitStack:
    """Return a context in which a module's step changes and logs nothing."""
    stack = ExitStack()
    stack.enter_context(undisturbed(module))
    for name in ("log", "log_dict"):
        stack.enter_context(replaced(module, name, lambda *_, **__: None))
    return stack


def _added_up(loss: Tensor, gradients: Gradients) -> tuple[Tensor, Gradients]:
    """Return loss and gradients summed over the processes of the client, in one exchange."""
    values = [loss, *(gradient for gradient in gradients if gradient is not None)]
    kind = reduce(torch.promote_types, (value.dtype for value in values), torch.float32)
    joined_values = torch.cat([value.to(kind).flatten() for value in values])
    add_up(joined_values)
    parts = iter(joined_values.split([value.numel() for value in values]))
    total = next(parts).view_as(loss).to(loss.dtype)
    return total, [None if old is None else next(parts).view_as(old).to(old.dtype) for old in gradients]
