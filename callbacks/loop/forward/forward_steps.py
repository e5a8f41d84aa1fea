"""Steps of a group of visits by forward passes alone, under Lightning's automatic optimization.

``training_step`` runs without a graph, twice for each direction, and gives Lightning the mean of the losses as a leaf: its
backward pass has nowhere to go, gradients stay None, and the optimizer's step moves nothing. When that step is over, the
parameters are moved here, with the learning rate that the optimizer had in it. So hooks, schedules, counts of steps,
accumulation over batches and progress are Lightning's own.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.optim import Optimizer

from fedlight.callbacks.loop.groups.side_by_side import SideBySide
from fedlight.callbacks.loop.visits.visit import CLIENT_LOSSES, learning_rate
from fedlight.federation.algorithm import Algorithm, changes_gradients
from fedlight.federation.client import Visiting
from fedlight.federation.forward.zeroth_order import Key, ZerothOrder, estimate, perturb
from fedlight.federation.lora.pairs import pad_to
from fedlight.federation.lora.ranks import trained_part, trained_ranks
from fedlight.support.seeding import derive_seed
from fedlight.support.torch_parts import replaced

Slopes = list[tuple[Key, float]]
"""Directions of a step, and the slope of the loss along each."""


@dataclass
class ForwardClient:
    """Visit of a group: its parameters, and their perturbations so far.

    Attributes:
        visiting: the visit.
        parameters: name -> tensor that is changed in place: the module's parameter, or the client's slice of a stacked one.
        held: name -> the parameter that the optimizer holds.
        gone: for each perturbation so far, the index of its direction among shared ones (0 for one that is not shared), and
            how far the parameters went against it.
        parts: name -> view of the tensor's perturbed and stepped part: of LoRA factors that the visit trains in part, these
            rows or columns; the directions are those of a module of that rank.
    """

    visiting: Visiting
    parameters: Mapping[str, Tensor]
    held: Mapping[str, Tensor]
    gone: list[tuple[int, float]] = field(default_factory=list)
    parts: Mapping[str, Tensor] = field(init=False)

    @torch.no_grad()  # views that are changed in place, of leaves
    def __post_init__(self) -> None:
        self._ranks = trained_ranks(self.visiting)
        self.parts = {name: self.part(name, tensor) for name, tensor in self.parameters.items()}

    def part(self, name: str, tensor: Tensor) -> Tensor:
        """Return the trained part of a tensor of a parameter's shape."""
        return trained_part(name, tensor, self._ranks)


class ForwardSteps:
    """Training of a group's visits by `ZerothOrder`.

    All passes over a batch see the same random numbers, so the same dropout masks; the stream ends where one pass leaves it.
    Buffers that a pass changes, such as running statistics, are changed by each pass. Values that ``training_step``
    logs itself are of a batch's last pass; the loss is the mean of all.

    Args:
        settings: eps, perturbations and so on.
        algorithm: whose ``adjust_gradients`` is called for one parameter at a time; once more where gradients are clipped by
            their norm.
        clients: visits of the group, one without stacked parameters.
        purpose: seed of the run, and round: of the directions.
        trainer: with its clipping and its batches of a step.
        beside: group that stacks the clients; None for one visit alone.
    """

    def __init__(
        self,
        settings: ZerothOrder,
        algorithm: Algorithm,
        clients: Sequence[ForwardClient],
        purpose: tuple[int, int],
        trainer: L.Trainer,
        beside: SideBySide | None = None,
    ) -> None:
        self.settings = settings
        self.clients = clients
        self._algorithm = algorithm if changes_gradients(algorithm) else None
        self._purpose = purpose
        self._clip_norm = trainer.gradient_clip_val
        self._batches = trainer.accumulate_grad_batches
        self._beside = beside
        self._slopes: list[Tensor] = []  # of each batch of the step under way, (perturbations, clients) fp64
        self._steps = 0
        self._as_before = ExitStack()
        self._name = type(algorithm).__name__
        if settings.weight_decay and any(client.visiting.directions for client in clients):
            raise ValueError(
                f"{self._name} sends how far a client went along its directions, and forward.weight_decay="
                f"{settings.weight_decay} goes another way: set it to 0"
            )
        for client in clients:
            client.parts = {name: p for name, p in client.parts.items() if self._moves(client, name)}

    def _moves(self, client: ForwardClient, name: str) -> bool:
        """Return whether a parameter is trained: it needs a gradient, and the algorithm does not take it away."""
        if not client.held[name].requires_grad:
            return False
        # Once before the first step, since the estimates of all parameters are never in memory together.
        return self._adjusted(client, name, torch.zeros_like(client.parts[name])) is not None

    def gone(self, place: int) -> Sequence[tuple[int, float]]:
        """Return ``Work.gone`` of the visit at ``place`` in the group."""
        return tuple(self.clients[place].gone)

    def enter(self, module: L.LightningModule) -> None:
        """Replace the module's ``training_step`` until `leave`."""
        step = module.training_step

        # Lightning reads the arguments of the wrapped function, one level deep: the step may be wrapped already.
        @wraps(getattr(step, "__wrapped__", step))
        @torch.no_grad()
        def training_step(batch: Any, *args: Any) -> Any:
            return self._both_ways(module, lambda: step(batch, *args), batch)

        self._as_before.enter_context(replaced(module, "training_step", training_step))

    def leave(self) -> None:
        """Restore the module's ``training_step``."""
        self._as_before.close()

    def _both_ways(self, module: L.LightningModule, run: Callable[[], Any], batch: Any) -> Any:
        """Return the result of the last pass, with the mean loss of all; None if the module leaves the batch out."""
        at = [{name: p.clone() for name, p in client.parts.items()} for client in self.clients]
        size, number = self.settings.eps, self.settings.perturbations
        pairs: list[Tensor] = []
        result: Any = None
        try:
            for k in range(number):
                losses = []
                for sign in (1, -1):
                    for client, before in zip(self.clients, at, strict=True):
                        perturb(client.parts, before, self._key(client, k)[1], sign * size)
                    is_last = k == number - 1 and sign == -1
                    with nullcontext() if is_last else _as_if_not_run(module):
                        if self._beside is not None:
                            self._beside.begin_pass(batch)
                        result = run()
                    if result is None:
                        return None
                    losses.append(_losses(result))
                    if not is_last:
                        result = None  # frees its memory before the next pass
                pairs.append(torch.stack(losses))
        finally:
            for client, before in zip(self.clients, at, strict=True):
                for name, part in client.parts.items():
                    part.copy_(before[name])  # minus eps * z would not give the same bits
        both = torch.stack(pairs)  # [perturbations, 2, clients]
        ahead, behind = both.cpu().double().unbind(1)  # on the CPU, as MPS has no fp64
        self._slopes.append((ahead - behind) / (2 * size))  # central difference
        each = both.flatten(0, 1).mean(dim=0)  # [clients]
        loss = each.sum().requires_grad_()  # a leaf
        return {**result, "loss": loss, CLIENT_LOSSES: each} if isinstance(result, Mapping) else loss

    def _key(self, client: ForwardClient, k: int) -> tuple[int, Key]:
        """Return the index of the direction of perturbation ``k`` of the step among shared ones, and its key."""
        seed, round_idx = self._purpose
        key: Key = (seed, "direction", round_idx, *client.visiting.visit.purpose, self._steps, k)
        shared = client.visiting.directions
        if shared is None:
            return 0, key
        index = derive_seed(*key) % shared.number  # drawn evenly
        return index, shared.key(index)

    @torch.no_grad()
    def step(self, optimizer: Optimizer) -> bool:
        """Move the parameters once the optimizer's own step is over; return whether there was a batch to step by."""
        if not self._slopes:
            return False
        # n-SPSA: the mean over the directions, and over the batches of the step.
        slopes = torch.stack(self._slopes).sum(dim=0) / (self._batches * self.settings.perturbations)
        self._slopes = []
        groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        self._refuse_several_rates(groups)
        for client, of_client in zip(self.clients, slopes.unbind(dim=1), strict=True):
            keys = [self._key(client, k) for k in range(self.settings.perturbations)]
            along: Slopes = [(key, slope) for (_, key), slope in zip(keys, of_client.tolist(), strict=True)]
            factor = self._clip_factor(client, along)
            rate = 0.0
            for name, part in client.parts.items():
                rate = learning_rate(groups[id(client.held[name])]) * self.settings.lr_scale
                gradient = self._gradient(client, name, along).mul_(factor)
                if self.settings.weight_decay:
                    gradient.add_(part, alpha=self.settings.weight_decay)
                part.sub_(gradient.mul_(rate))
            client.gone += [
                (index, rate * factor * slope) for (index, _), (_, slope) in zip(keys, along, strict=True)
            ]
        self._steps += 1
        return True

    def _refuse_several_rates(self, groups: Mapping[int, Mapping[str, Any]]) -> None:
        """Raise ValueError where parameters that go along a shared direction go unlike ways, by parameter's group."""
        for client in self.clients:
            rates = {learning_rate(groups[id(client.held[name])]) for name in client.parts}
            if client.visiting.directions and len(rates) > 1:
                raise ValueError(
                    f"{self._name} sends one scalar for all parameters, and the optimizer has rates of {sorted(rates)}: "
                    "give all parameters one, also by their schedules"
                )

    def _gradient(self, client: ForwardClient, name: str, along: Slopes) -> Tensor:
        adjusted = self._adjusted(client, name, estimate(name, client.parts[name], along))
        assert adjusted is not None  # else `_moves` would have left the parameter out
        return adjusted

    def _adjusted(self, client: ForwardClient, name: str, gradient: Tensor) -> Tensor | None:
        """Return a part's gradient as changed by the algorithm, which sees it padded with zeros to the whole."""
        if self._algorithm is None:
            return gradient
        whole = client.parameters[name]
        gradients = {name: pad_to(gradient, whole.shape)}
        self._algorithm.adjust_gradients(client.visiting, {name: whole}, gradients)
        adjusted = gradients.get(name)
        return None if adjusted is None else client.part(name, adjusted)

    def _clip_factor(self, client: ForwardClient, along: Slopes) -> float:
        """Return the factor of `torch.nn.utils.clip_grad_norm_` for all gradients of a client."""
        if not self._clip_norm:
            return 1.0
        # No estimate is kept, so `step` makes each once more.
        norms = [torch.linalg.vector_norm(self._gradient(client, name, along)) for name in client.parts]
        return min(1.0, float(self._clip_norm) / (float(torch.linalg.vector_norm(torch.stack(norms))) + 1e-6))


@contextmanager
def _as_if_not_run(module: L.LightningModule) -> Iterator[None]:
    """Give random streams back as they were, and log nothing: a sum over batches would count a batch once a pass."""
    with isolate_rng(), replaced(module, "log", lambda *args, **more: None):
        yield


def _losses(result: Any) -> Tensor:
    """Return the loss of each visit, ``(visits,)``."""
    if not isinstance(result, Mapping):
        loss: Tensor = result
        return loss.detach().reshape(1)
    losses: Tensor = result[CLIENT_LOSSES] if CLIENT_LOSSES in result else result["loss"].reshape(1)
    return losses.detach()
