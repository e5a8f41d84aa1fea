"""Federated averaging written out in plain torch, with nothing of fedlight and nothing of Lightning's trainer.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017,
https://arxiv.org/abs/1602.05629. In each round every client of the round copies the global model, trains the copy with an
optimizer that remembers nothing, and the server adds the weighted mean of the movements:

    unbiased    w <- w + M / A * sum(n_m / N * (w_m - w))      M clients, A of them in the round, N examples of all M
    normalized  w <- w + sum(n_m * (w_m - w)) / sum(n_m)       sums over the round

Buffers that training changes are, as a run is told, the mean over its clients by their examples (``average``), or stay
with each client together with the parameters of the layers that own running statistics (``local``, FedBN: Li et al.,
ICLR 2021, https://arxiv.org/abs/2102.07623).

Weighted movements are summed exactly and rounded once. Who takes part and which batches come is taken from the run that is
checked; the checks of that are in `matrix`.
"""

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

Visits = Sequence[tuple[str, Sequence[Any]]]
"""Of one round: client and its batches, each with ``content`` and ``random``."""

Train = Callable[[Any, Sequence[Any], int], None]
"""Trains a module in place on the batches of a visit, in a round."""


def federated_averaging(
    model: nn.Module,
    rounds: Sequence[Visits],
    train: Train,
    sizes: Mapping[str, int],
    weighting: str = "unbiased",
    buffers: str = "none",
) -> nn.Module:
    """The global model after the rounds, ``model`` itself."""
    num_examples = sum(sizes.values())
    own: dict[str, dict[str, torch.Tensor]] = {}
    for round_idx, visits in enumerate(rounds):
        stay = staying(model) if buffers == "local" else set()
        before = {name: p.detach().double() for name, p in model.named_parameters() if name not in stay}
        weighted: dict[str, list[torch.Tensor]] = {name: [] for name in before}
        statistics = {name: torch.zeros_like(b).double() for name, b in model.named_buffers()}
        of_round = sum(sizes[client] for client, _ in visits)
        for client, batches in visits:
            local = copy.deepcopy(model)
            local.load_state_dict(own.get(client, {}), strict=False)
            train(local, batches, round_idx)
            parameters, after = dict(local.named_parameters()), dict(local.named_buffers())
            for name in before:
                moved = parameters[name].detach().double() - before[name]
                weighted[name].append(moved * (sizes[client] / num_examples))
            for name, buffer in after.items():
                statistics[name].add_(buffer.double() * sizes[client])
            if buffers == "local":
                own[client] = {n: v.clone() for n, v in local.state_dict().items() if n in stay or n in after}
        factor = {"unbiased": len(sizes) / len(visits), "normalized": num_examples / of_round}[weighting]
        with torch.no_grad():
            for name, p in model.named_parameters():
                if name in before:
                    p.copy_((before[name] + factor * summed(weighted[name])).float())
            for name, buffer in model.named_buffers() if buffers == "average" else ():
                mean = statistics[name] / of_round
                buffer.copy_(mean if buffer.is_floating_point() else mean.round())
    return model


def summed(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the exact sum of fp64 tensors, rounded once."""
    sums = [math.fsum(column) for column in zip(*(value.flatten().tolist() for value in values), strict=True)]
    return torch.tensor(sums, dtype=torch.float64).view_as(values[0])


def staying(model: nn.Module) -> set[str]:
    """Names of the parameters of the layers that own running statistics."""
    norms = {
        name: part for name, part in model.named_modules() if getattr(part, "running_mean", None) is not None
    }
    return {
        f"{name}.{own}" for name, part in norms.items() for own, _ in part.named_parameters(recurse=False)
    }


def clipped_by_norm(parameters: Sequence[nn.Parameter]) -> None:
    """Clips gradients at 0.05."""
    nn.utils.clip_grad_norm_(parameters, 0.05)


def local_training(
    model: Any,
    batches: Sequence[Any],
    round_idx: int,
    *,
    accumulate: int = 1,
    clip: Callable[[list[nn.Parameter]], Any] | None = None,
    before: Callable[[int], int] = lambda round_idx: round_idx,
    within: bool = False,
    forward: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> None:
    """A visit with the module's own optimizer, made anew.

    Args:
        model: a module with ``training_step`` and ``configure_optimizers``, trained in place.
        batches: of the visit.
        round_idx: rounds before this one.
        accumulate: batches of an optimizer step.
        clip: changes the gradients of these parameters before a step.
        before: steps of the schedule before the visit, by round; one for each round unless said otherwise.
        within: whether the schedule makes a step after each step of the optimizer.
        forward: context of the training step, such as autocast.
    """
    model.log = lambda *_, **__: None  # there is no trainer to log with
    optimizer, schedule = configured(model)
    for _ in range(before(round_idx) if schedule else 0):
        optimizer.step()  # without gradients nothing moves; torch wants a step before one of the schedule
        schedule.step()
    for start in range(0, len(batches), accumulate):

        def gradients(window: Sequence[Any] = batches[start : start + accumulate], first: int = start) -> Any:
            optimizer.zero_grad()
            for number, batch in enumerate(window):
                torch.set_rng_state(batch.random)
                with forward():
                    loss = model.training_step(copy.deepcopy(batch.content), first + number)
                    loss = loss["loss"] if isinstance(loss, dict) else loss
                (loss / accumulate).backward()
            if clip is not None:
                clip([p for group in optimizer.param_groups for p in group["params"]])
            return loss

        optimizer.step(gradients)
        if within:
            schedule.step()


def stepped(optimizer: torch.optim.Optimizer, losses: Iterable[torch.Tensor]) -> None:
    """A step for each loss, which is computed after the step before it."""
    for loss in losses:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def configured(model: Any) -> tuple[torch.optim.Optimizer, Any]:
    """The optimizer that the module asks for, and its schedule or None."""
    made = model.configure_optimizers()
    if not isinstance(made, dict):
        return in_one_call(made), None
    schedule = made.get("lr_scheduler")
    return in_one_call(made["optimizer"]), schedule["scheduler"] if isinstance(schedule, dict) else schedule


def in_one_call(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer on torch's fused kernel, if it is an Adam or AdamW that leaves the choice open."""
    if type(optimizer) in (torch.optim.Adam, torch.optim.AdamW):
        for group in optimizer.param_groups:
            if group["foreach"] is None and group["fused"] is None:
                group["fused"] = True
    return optimizer
