"""Full fine-tuning of a client by several processes: each has a part of the trained weights.

The module's layers hold split weights as `DTensor`. The loop and the optimizers hold the parts here (`held_here`): start
parameters, movements, exact sums, the server's step and its moments are of these alone, and the processes with the same
place in their groups add them up. So whatever works on each number apart is as in one process, and the rest is refused.
"""

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fedlight.callbacks.loop.forward.forward_visits import OF_MODULES
from fedlight.callbacks.loop.groups.refusals import hooks_of_users
from fedlight.callbacks.loop.parts.buffers import BufferPolicy
from fedlight.callbacks.loop.parts.limits import LimitedRounds, norm_of
from fedlight.callbacks.loop.parts.optimizers import FreshOptimizers, StepSchedules
from fedlight.callbacks.loop.parts.part import Part
from fedlight.callbacks.loop.ranks.ranks import Ranks
from fedlight.callbacks.loop.ranks.split_steps import SplitSteps
from fedlight.callbacks.loop.run import Run
from fedlight.callbacks.loop.visits.visit import OpenGroup, OpenVisit, TakesUpload
from fedlight.federation.aggregation import CoordinateMedian, TrimmedMean
from fedlight.federation.algorithm import Average
from fedlight.federation.algorithms.fedavg import FedAvg
from fedlight.federation.algorithms.fedprox import FedProx
from fedlight.federation.channel import Wire
from fedlight.federation.client import Diverged, Identity, State, serialized_bytes
from fedlight.federation.server import FedAdagrad, FedAdam, FedAvgM, FedYogi
from fedlight.processes.seat import add_up, is_split, part_of, put_together
from fedlight.support.torch_parts import replaced

WORKS_ON_PARTS = (FreshOptimizers, StepSchedules, BufferPolicy, LimitedRounds, SplitSteps, Ranks)
IN_STEPS = (*OF_MODULES, "optimizer_step", "optimizer_zero_grad", "on_before_zero_grad")
"""Hooks of modules and callbacks that may read or clear gradients, which split weights themselves do not have."""


class SplitWeights(Part):
    """Part for trained weights that are split among the processes of a client.

    Raises:
        ValueError: in ``check``, for settings that work on whole weights or updates; in ``attach``, if no trained weight is
            split.
    """

    def __init__(self) -> None:
        self._split: set[str] = set()
        self._as_before = ExitStack()

    def check(self, run: Run) -> None:
        module, channel = run.lightning_module, run.channel
        lossless = type(channel) is Identity or (
            type(channel) is Wire and not channel.up_codecs + channel.down_codecs
        )
        whole = {
            type(run.algorithm).__name__: type(run.algorithm) in (FedAvg, FedProx),
            f"aggregation={type(run.aggregation).__name__}": run.aggregation is None
            or type(run.aggregation) in (CoordinateMedian, TrimmedMean),
            f"server={type(run.server).__name__}": type(run.server)
            in (Average, FedAvgM, FedAdagrad, FedAdam, FedYogi),
            f"channel={type(channel).__name__} with codecs": lossless,
            "a fleet with buffered rounds": not run.planned_by_arrival,
        }
        whole |= {
            type(part).__name__: isinstance(part, (SplitWeights, *WORKS_ON_PARTS)) for part in run.parts
        }
        whole |= {
            f"{type(callback).__name__}.on_upload": not isinstance(callback, TakesUpload)
            for callback in run.trainer.callbacks  # type: ignore[attr-defined]
        }
        whole |= {
            f"{type(owner).__name__}.{hook}": False
            for owner in (module, *run.trainer.callbacks)  # type: ignore[attr-defined]
            for hook in hooks_of_users(owner, IN_STEPS)
        }
        for name, works_on_parts in whole.items():
            if not works_on_parts:
                raise ValueError(
                    f"{name} sees whole weights, and with trainer.strategy.split_trained=true a process has a part of them: "
                    "leave it out, or set trainer.strategy.split_trained=false"
                )

    def attach(self, run: Run) -> None:
        weights = dict(run.lightning_module.named_parameters())
        self._split = {name for name in run.parameters if is_split(weights[name])}
        if not self._split:
            raise ValueError(
                f"trainer.strategy.split_trained=true, and {type(run.lightning_module).__name__} has no repeated layer "
                "(nn.ModuleList) whose weights are all trained: set trainer.strategy.split_trained=false, under which "
                "frozen weights are split"
            )
        everything = {name: torch.empty(weights[name].shape, device="meta") for name in run.parameters}
        here = {name: torch.empty(part.shape, device="meta") for name, part in run.parameters.items()}
        run.bytes_elsewhere = serialized_bytes(everything) - serialized_bytes(here)
        run.norm = self._norm
        moments = run.server.state_dict()  # whole tensors, where they are of a checkpoint
        run.server.load_state_dict(
            self._each_split(moments, lambda name, value: part_of(value, weights[name]))
        )

    def saved(self, run: Run, state: dict[str, Any]) -> None:
        weights = dict(run.lightning_module.named_parameters())
        writes = run.trainer.is_global_zero

        def at_writer(name: str, part: Tensor) -> Tensor:
            value = put_together(part, weights[name])
            return value if writes else value.to("meta")  # one tensor at a time is whole in the others

        state["server"] = self._each_split(state["server"], at_writer)

    def start_round(self, run: Run) -> None:
        weights = dict(run.lightning_module.named_parameters())
        for name in self._split:  # which ones are trained goes into checkpoints
            run.parameters[name].requires_grad_(weights[name].requires_grad)

    def enter(self, run: Run, group: OpenGroup, batch: Any) -> None:
        def clip_grad_by_norm(optimizer: Optimizer, clip_val: float) -> None:
            held = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
            gradients = {
                name: weight.grad
                for name, weight in run.parameters.items()
                if id(weight) in held and weight.grad is not None
            }
            factor = float(clip_val) / (self._norm(gradients) + 1e-6)  # as torch has it
            if not factor >= 1:  # nor for NaN
                for gradient in gradients.values():
                    gradient.mul_(factor)

        plugin = run.trainer.precision_plugin
        self._as_before.enter_context(replaced(plugin, "clip_grad_by_norm", clip_grad_by_norm))

    def leave(self, run: Run, group: OpenGroup, visit: OpenVisit) -> None:
        """Raise `Diverged` in all processes of the client where one of them has trained NaN or infinity."""
        self.abort(run)
        odd = torch.tensor(float(not all(part.isfinite().all() for part in visit.parameters.values())))
        add_up(odd)
        if odd:
            raise Diverged("a trained weight is not finite")

    def abort(self, run: Run) -> None:
        self._as_before.close()

    def _each_split(self, moments: Mapping[str, State], change: Callable[[str, Tensor], Tensor]) -> Any:
        """Return the server's moments with those of split weights changed."""
        return {
            moment: {n: change(n, value) if n in self._split else value for n, value in tensors.items()}
            for moment, tensors in moments.items()
        }

    def _norm(self, state: Mapping[str, Tensor]) -> float:
        """Return the L2 norm of all tensors together, of split ones with the parts in the client's other processes."""
        parts = norm_of({name: value for name, value in state.items() if name in self._split})
        squares = torch.tensor([parts**2], dtype=torch.float64)
        add_up(squares)
        rest = norm_of({name: value for name, value in state.items() if name not in self._split})
        return math.hypot(squares.sqrt().item(), rest)
