"""Cost of one training step: FLOPs and bytes of activations, counted once for each shape of a batch."""

import copy
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn

from fedlight.devices.shape import BatchShape, anchors
from fedlight.devices.shape_run import ShapeRun
from fedlight.federation.lora.ranks import cut_module
from fedlight.support.torch_parts import replaced, tensors, undisturbed, with_parts

logger = logging.getLogger("fedlight")


@dataclass(frozen=True)
class StepCost:
    """Cost of the forward and backward pass of one batch, or of the forward pass alone.

    Args:
        flops: floating point operations, 2 for a multiplication with its addition.
        activation_bytes: most bytes that live at once beyond weights, their gradients and the batch.
    """

    flops: int
    activation_bytes: int


@runtime_checkable
class Sketched(Protocol):
    """Module that has a copy without weights, so that a step can be counted before anything is loaded."""

    def skeleton(self) -> "Sketched":
        """Return the same module with meta tensors for weights."""

    def sketch_batch(self, shape: BatchShape) -> Any:
        """Return a batch of that shape."""

    def sketch_losses(self, batch: Any) -> Tensor:
        """Return one loss per example, ``(batch,)``, by everything that a step computes."""


@runtime_checkable
class Checkpointed(Protocol):
    """Module that can recompute activations in the backward pass instead of keeping them."""

    def checkpoint_gradients(self, enabled: bool) -> None:
        """Turn recomputation on or off."""


Costs = dict[tuple[BatchShape, bool, bool], StepCost]
COUNTED: dict[tuple[Any, ...], Costs] = {}
"""Costs of fedlight's modules that this process has counted: the stages of a recipe have the same."""


class CostMeter:
    """Meter of a training step's cost; a pure function of the batch's shape.

    No weights are read and next to nothing is computed: see `fedlight.devices.shape_run`. A `Sketched` module is
    counted on its skeleton, whose base is in 16 bits as on a device. Any other module runs its ``training_step`` on a copy
    without weights. Where that fails, because the step depends on values of the weights or was set on this one object, it
    runs once per shape on the module itself; neither the module nor the random stream changes. Memory that kernels take
    while they run is left out.

    Args:
        module: module that is trained, or a skeleton of it.
        example_batch: function that returns a batch of so many examples; needed for a module without a skeleton only.
        lora_rank: rank of the LoRA adapters in the counted step, which larger ones are cut to; None for the module's own.

    Attributes:
        module: counted module: the skeleton, or the module itself; with ``lora_rank`` a copy without weights.
        checkpoints: whether activations can be recomputed instead of kept.
        together: number of neighbours in a batch that are always computed together, 1 for most modules.

    Raises:
        ValueError: the module has no skeleton, and there is no ``example_batch``, or its step optimizes itself.
    """

    def __init__(
        self,
        module: nn.Module,
        example_batch: Callable[[int], Any] | None = None,
        lora_rank: int | None = None,
    ) -> None:
        if not isinstance(module, Sketched) and example_batch is None:
            raise ValueError(
                f"{type(module).__name__} has no skeleton: give CostMeter an example_batch for n examples"
            )
        if not isinstance(module, Sketched) and not getattr(module, "automatic_optimization", True):
            raise ValueError(
                f"automatic_optimization=False of {type(module).__name__}: to count its step would change its weights; "
                "set it to True and return the loss, give the module a skeleton, or run without devices"
            )
        weightless = any(weight.is_meta for weight in module.parameters())  # it is a skeleton already
        self.module = module
        if isinstance(module, Sketched) and not weightless:
            self.module = cast(nn.Module, module.skeleton())
        self._lora_rank = lora_rank
        if lora_rank is not None:
            self.module = without_weights(self.module)
            cut_module(self.module, lora_rank)
        self._ghost: nn.Module | None = None
        self.checkpoints = isinstance(module, Checkpointed)
        self.together: int = getattr(module, "examples_together", 1)
        self._example_batch = example_batch
        self._costs: Costs = COUNTED.setdefault(key, {}) if (key := _key(self.module, lora_rank)) else {}

    def cost(self, shape: BatchShape, checkpointing: bool = False) -> StepCost:
        """Return the cost of one step on a batch of that shape, with activations recomputed if ``checkpointing``.

        It is counted when it is first needed. Costs of texts follow from those of a few lengths and sizes, see
        `fedlight.devices.shape`.

        Raises:
            ValueError: ``checkpointing``, and the module has no ``checkpoint_gradients``.
        """
        if checkpointing and not self.checkpoints:
            raise ValueError(
                f"{type(self.module).__name__} has no checkpoint_gradients(enabled): give it one, or take smaller "
                "batches instead of checkpointing"
            )
        return self._found(shape, checkpointing, forward=False)

    def forward_cost(self, shape: BatchShape) -> StepCost:
        """Return the cost of one forward pass without a graph on a batch of that shape, in training mode.

        The memory is at least that of perturbing the largest trained parameter between two passes.
        """
        return self._found(shape, checkpointing=False, forward=True)

    def _found(self, shape: BatchShape, checkpointing: bool, forward: bool) -> StepCost:
        cost = self._costs.get((shape, checkpointing, forward))
        if cost is None:
            around = anchors(shape) if isinstance(self.module, Sketched) else {shape: Fraction(1)}
            if shape in around:
                cost = self._count(shape, checkpointing, forward)
            else:
                each = [
                    (self._found(node, checkpointing, forward), weight) for node, weight in around.items()
                ]
                flops = sum(weight * part.flops for part, weight in each)
                cost = StepCost(round(flops), round(sum(w * part.activation_bytes for part, w in each)))
            self._costs[shape, checkpointing, forward] = cost
        return cost

    def _count(self, shape: BatchShape, checkpointing: bool, forward: bool = False) -> StepCost:
        if isinstance(self.module, Sketched):
            module, batch = self.module, self.module.sketch_batch(shape)
            try:
                return _counted(
                    module, batch, lambda: module.sketch_losses(batch).mean(), checkpointing, forward
                )
            except NotImplementedError as error:
                raise ValueError(
                    "what a step costs cannot be counted on shapes alone: the code of this model reads values of its "
                    "tensors; run without devices, or take another model"
                ) from error
        assert self._example_batch is not None
        with torch.random.fork_rng(devices=[]):  # the run's draws stay as they are
            batch = self._example_batch(shape.examples)
        # A step that was set on this one object may refer to it, and would run on it instead of on the copy.
        if "training_step" not in vars(self.module):
            try:
                if self._ghost is None:
                    self._ghost = without_weights(self.module)
                return _step_cost(self._ghost, batch, checkpointing, forward)
            # Anything may need values. An error of the step itself is raised by the real step below.
            except Exception as error:
                name, kind = type(self.module).__name__, type(error).__name__
                self._refuse_rank(f"without values there is a {kind}: {error}")
                logger.info(
                    "%s is measured by a real step on %s: without values there is a %s", name, shape, kind
                )
        self._refuse_rank("its training_step was set on this one object")
        device = next((weight.device for weight in self.module.parameters()), torch.device("cpu"))
        with undisturbed(self.module):
            return _step_cost(self.module, _moved(batch, device), checkpointing, forward)

    def _refuse_rank(self, reason: str) -> None:
        if self._lora_rank is not None:
            raise ValueError(
                f"ranks: what a step of {type(self.module).__name__} costs at rank {self._lora_rank} cannot "
                f"be counted on shapes alone ({reason}): have its training_step depend on shapes, or leave out ranks, and a "
                "gamma of HetLoRA below 1"
            )


def _key(module: nn.Module, lora_rank: int | None) -> tuple[Any, ...] | None:
    """Return all that decides a skeleton's costs; None for other modules, and those of a project."""
    kind = type(module)
    weights = [(name, p.shape, p.dtype, p.requires_grad) for name, p in module.named_parameters()]
    if not isinstance(module, Sketched) or not kind.__module__.startswith("fedlight."):
        return None
    return kind, lora_rank, repr(module), repr(getattr(module, "hparams", None)), repr(weights)


def _step_cost(module: Any, batch: Any, checkpointing: bool, forward: bool) -> StepCost:
    def step() -> Tensor:
        outputs = module.training_step(*_arguments(module.training_step, batch))
        loss: Tensor = outputs["loss"] if isinstance(outputs, Mapping) else outputs
        return loss

    # What ran before decides whether a compiled layer is traced, so one step would have several costs.
    with replaced(module, "log", lambda *args, **kwargs: None), torch.compiler.set_stance("force_eager"):
        return _counted(module, batch, step, checkpointing, forward)


def _arguments(step: Callable[..., Any], batch: Any) -> tuple[Any, ...]:
    """Return the arguments that Lightning gives: the number of the batch only to a step that takes it."""
    try:
        inspect.signature(step).bind(batch, 0)
    except TypeError:
        return (batch,)
    return batch, 0


def _counted(
    module: Any, batch: Any, step: Callable[[], Tensor], checkpointing: bool, forward: bool
) -> StepCost:
    module.train()  # a step drops entries
    known = [*module.parameters(), *module.buffers(), *tensors(batch)]
    devices = {tensor.device for tensor in known if tensor.is_cuda}
    if forward:
        with torch.random.fork_rng(devices), torch.no_grad():
            counted = ShapeRun(known)
            with counted, replaced(torch, "autocast", _Autocast):
                step()
        trained = [weight.nbytes for weight in module.parameters() if weight.requires_grad]
        # A step holds a parameter's direction, and the estimate that it is added to.
        return StepCost(counted.flops, max([counted.peak_bytes, *(2 * size for size in trained)]))
    for weight in module.parameters():  # as in a step that adds to gradients of the one before
        if weight.requires_grad and weight.grad is None:
            weight.grad = torch.zeros_like(weight)
    # The footprint at rest has the gradients already.
    known += [weight.grad for weight in known if weight.grad is not None]
    with torch.random.fork_rng(devices), torch.enable_grad(), _checkpointing(module, checkpointing):
        counted = ShapeRun(known)
        with counted, replaced(torch, "autocast", _Autocast):
            step().backward()
    return StepCost(counted.flops, counted.peak_bytes)


class _Autocast(torch.autocast):
    """Autocast that takes meta tensors as well, for which PEFT's adapters of experts turn it off."""

    def __init__(self, device_type: str, **options: Any) -> None:
        super().__init__("cpu" if device_type == "meta" else device_type, **options)


def without_weights(module: nn.Module) -> nn.Module:
    """Return a copy with meta tensors for parameters and buffers, without its trainer; no weight is copied."""
    memo: dict[int, Any] = {}  # deepcopy takes these in the place of weights
    for tensor in (*module.parameters(), *module.buffers()):
        ghost = torch.empty_like(tensor, device="meta")
        is_weight = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(ghost, tensor.requires_grad) if is_weight else ghost
    trainers = {part: vars(part)["_trainer"] for part in module.modules() if "_trainer" in vars(part)}
    try:
        for part in trainers:
            vars(part)["_trainer"] = None  # else all that it holds would be copied
        return copy.deepcopy(module, memo)
    finally:
        for part, trainer in trainers.items():
            vars(part)["_trainer"] = trainer


@contextmanager
def _checkpointing(module: Any, enabled: bool) -> Iterator[None]:
    if not enabled:
        yield
        return
    module.checkpoint_gradients(True)
    try:
        yield
    finally:
        module.checkpoint_gradients(False)


def _moved(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, Tensor):
        return batch.to(device)
    return with_parts(batch, lambda part: _moved(part, device))
