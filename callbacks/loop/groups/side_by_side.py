"""Training of a group of visits in one batch, each on separate parameters.

The clients' adapters are stacked in the module (`fedlight.stacking`). Gradients are clipped by client, and an elementwise
optimizer steps the slices as it steps the parameters of one client. Between groups the module is as ever.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import wraps
from typing import Any, Protocol, runtime_checkable

import lightning as L
import torch
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import Tensor, nn
from torch.optim import Optimizer

from fedlight.callbacks.loop.fitted_step import take_examples
from fedlight.callbacks.loop.groups.comparison import check_shape, compare_losses
from fedlight.callbacks.loop.groups.refusals import refusal
from fedlight.callbacks.loop.run import LossPerExample
from fedlight.callbacks.loop.visits.visit import CLIENT_LOSSES
from fedlight.federation.algorithm import Algorithm
from fedlight.federation.client import State, Visiting
from fedlight.federation.protocols import StreamsGroups
from fedlight.stacking import StackedAdapters
from fedlight.support.seeding import derive_seed
from fedlight.support.torch_parts import replaced


@runtime_checkable
class MetricsPerExample(Protocol):
    """Module that logs metrics of a training batch beside its loss."""

    def example_metrics(self, batch: Any) -> dict[str, Tensor]:
        """Return one value per example of each metric, ``(batch,)``; ``loss`` is among them."""

    def log_training(self, metrics: dict[str, Tensor], counts: Sequence[int]) -> None:
        """Log the metrics of a batch with ``counts`` examples of each client."""


@runtime_checkable
class SeedsDropout(Protocol):
    """Module whose dropout follows from a client's batch."""

    def dropout_seed(self, batch: Any) -> int:
        """Return the seed of dropout for a batch of one client in the present epoch."""


class SideBySide:
    """Group of visits that are trained in one batch; one object serves all groups of a run.

    The ``seed`` is that of the dropout of modules without ``dropout_seed``.

    Raises:
        ValueError: a parameter cannot be stacked.
    """

    def __init__(
        self, module: L.LightningModule, parameters: Mapping[str, Tensor], data: StreamsGroups, seed: int
    ) -> None:
        self.parameters = parameters
        self._module = module
        self._data = data
        self._seed = seed
        self._stack = StackedAdapters(module, parameters)
        self._visits: list[Visiting] = []
        self._counts: list[int] = []
        self._round_idx = self._number = 0
        self._as_before = ExitStack()
        self._is_compared = False

    def enter(self, visits: Sequence[Visiting], batch: Any, round_idx: int) -> None:
        """Begin the visits of a group with their first batch; the module holds the parameters that they do not train.

        Raises:
            ValueError: at the first group of the run, if a client would train differently than alone.
        """
        self._counts = self._data.next_counts()
        adapters = [visiting.adapter for visiting in visits]
        self.compare(batch, self._counts, adapters)
        self._stack.enter([visiting.start for visiting in visits], adapters)
        self._visits, self._round_idx, self._number = [*visits], round_idx, 0

        @wraps(self._module.training_step)  # Lightning looks at the names of its arguments
        def training_step(batch: Any, *args: Any) -> dict[str, Tensor]:
            return self._step(batch)

        self._as_before.enter_context(replaced(self._module, "training_step", training_step))
        self._as_before.enter_context(replaced(self._module, "configure_gradient_clipping", self._clip))
        self.begin_pass(batch)

    def compare(self, batch: Any, counts: Sequence[int], adapters: Sequence[str | None]) -> None:
        """Compare a client of a group with the same one alone, once a run; see `compare_losses`."""
        if not self._is_compared:
            compare_losses(self._module, self.parameters, batch, counts, adapters)
            self._is_compared = True

    def next_batch(self, batch: Any) -> None:
        """Take the next batch of the group, before its step."""
        self._counts = self._data.next_counts()
        self._number += 1
        self.begin_pass(batch)

    def trained_by(self, place: int) -> tuple[State, Mapping[str, Tensor]]:
        """Return a client's slices of the stacked parameters, and the parameters that hold them, by name."""
        return self._stack.parameters(place), self._stack.hosts(place)

    def begin_pass(self, batch: Any) -> None:
        """Begin a pass over a batch; further ones over the same batch have the same dropout masks."""
        seeds, start = [], 0
        for visiting, count in zip(self._visits, self._counts, strict=True):
            if isinstance(self._module, SeedsDropout):
                seeds.append(self._module.dropout_seed(take_examples(batch, start, start + count)))
            else:
                visit = visiting.visit
                seeds.append(
                    derive_seed(self._seed, "dropout", self._round_idx, *visit.purpose, self._number)
                )
            start += count
        self._stack.set_rows(self._counts, seeds)

    def _step(self, batch: Any) -> dict[str, Tensor]:
        """Return the sum over clients of each one's mean loss, and these means, ``(clients,)``."""
        module = self._module
        assert isinstance(module, LossPerExample)
        if isinstance(module, MetricsPerExample):
            metrics = module.example_metrics(batch)
            module.log_training(metrics, self._counts)
            losses = metrics["loss"]
        else:
            losses = module.example_losses(batch)
        check_shape(type(module).__name__, losses, self._counts)
        # The sum of the means gives each client's slice the gradient that it has alone.
        means = torch.stack([part.mean() for part in losses.split(self._counts)])
        return {"loss": means.sum(), CLIENT_LOSSES: means.detach()}

    def _clip(
        self,
        optimizer: Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip the gradients of each client as `torch.nn.utils.clip_grad_norm_` clips those of one."""
        kind = gradient_clip_algorithm or GradClipAlgorithmType.NORM
        if kind == GradClipAlgorithmType.VALUE:
            # Elementwise, so right for stacked gradients.
            self._module.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
        elif gradient_clip_val:
            held = [p for group in optimizer.param_groups for p in group["params"]]
            clip_by_client([p.grad for p in held if p.grad is not None], float(gradient_clip_val))

    def adjust_gradients(self, algorithm: Algorithm, optimizer: Optimizer) -> None:
        """Let an algorithm change the gradients of each client, of the parameters that an optimizer holds."""
        held_by_optimizer = {id(p) for group in optimizer.param_groups for p in group["params"]}
        left_out: Counter[Tensor] = Counter()  # stacked parameters, by identity
        added: dict[nn.Parameter, dict[int, Tensor]] = {}  # those without a gradient -> place -> the client's
        for place, visiting in enumerate(self._visits):
            names = {name for name, held in self._stack.hosts(place).items() if id(held) in held_by_optimizer}
            parameters = {name: p for name, p in self._stack.parameters(place).items() if name in names}
            slices = {name: g for name, g in self._stack.gradients(place).items() if name in names}
            gradients = dict(slices)
            algorithm.adjust_gradients(visiting, parameters, gradients)
            left_out.update(self._stack.hosts(place)[name] for name in slices if gradients.get(name) is None)
            for name, gradient in gradients.items():
                if gradient is None:
                    continue
                if name not in slices:
                    added.setdefault(self._stack.hosts(place)[name], {})[place] = gradient
                elif gradient is not slices[name]:
                    slices[name].copy_(gradient)  # a view of the stacked gradient
        for parameter, clients in left_out.items():
            if clients < len(self._visits):
                raise refusal(
                    f"{type(algorithm).__name__} takes the gradient of {self._name_of(parameter)} away for {clients} of "
                    f"{len(self._visits)} clients, and an optimizer leaves a parameter out for all clients of a batch or "
                    "for none"
                )
            parameter.grad = None
        for parameter, by_place in added.items():
            if len(by_place) < len(self._visits):
                raise refusal(
                    f"{type(algorithm).__name__} gives {self._name_of(parameter)} a gradient, which has none in the step, "
                    "so the clients beside would be stepped as well"
                )
            parameter.grad = torch.stack([by_place[place] for place in range(len(by_place))])

    def _name_of(self, parameter: Tensor) -> str:
        return next(name for name, held in self._stack.hosts(0).items() if held is parameter)

    def leave(self) -> list[State]:
        """End the visits of the group; return each client's trained parameters. The module is as before the group."""
        self._as_before.close()
        self._visits = []
        return self._stack.leave()


@torch.no_grad()
def clip_by_client(gradients: Sequence[Tensor], most: float) -> None:
    """Scale the gradients of each client, in place, so that their common norm is at most ``most``.

    Args:
        gradients: stacked gradients, ``(clients, ...)`` each.
        most: largest norm, above 0.

    Examples:
        >>> one, two = torch.tensor([[3.0], [0.3]]), torch.tensor([[4.0], [0.4]])
        >>> clip_by_client([one, two], 1.0)
        >>> [round(x, 3) for x in (one + two).flatten().tolist()]
        [1.4, 0.7]
    """
    if not gradients:
        return
    # [tensors, clients]
    norms = torch.stack([torch.linalg.vector_norm(each.flatten(1), dim=1) for each in gradients])
    factors = (most / (torch.linalg.vector_norm(norms, dim=0) + 1e-6)).clamp(max=1.0)  # as in clip_grad_norm_
    for each in gradients:
        each.mul_(factors.view(-1, *[1] * (each.dim() - 1)))
