"""Training step in less memory: micro-batches in sequence, activations computed twice.

A batch of n examples is run as micro-batches of n_1 + n_2 + ... = n. Its loss is a mean over examples, so its gradient is
``sum_i n_i / n * gradient of micro-batch i``, and only one micro-batch's activations exist at a time. The gradients are
computed inside the step and handed over when Lightning asks for them: no forward pass runs twice, and clipping,
accumulation over batches, optimizer and callbacks work unchanged.

Gradient checkpointing, done by the module: T. Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016,
https://arxiv.org/abs/1604.06174.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import wraps
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._pytree import is_namedtuple_instance
from torchmetrics import Metric

from fedlight.support.torch_parts import replaced, tensors, with_parts


def count_examples(batch: Any) -> int:
    """Return the rows of a batch's tensors; raise ValueError for a batch without tensors or with different numbers of rows.

    Examples:
        >>> count_examples({"x": torch.zeros(3, 2), "labels": [torch.zeros(3), "shared"]})
        3
    """
    counts = {len(tensor) for tensor in tensors(batch) if tensor.dim()}  # a single number is for all examples
    if len(counts) != 1:
        raise ValueError(
            f"a batch of type {type(batch).__name__} cannot be cut into micro-batches, as its tensors have "
            f"{' and '.join(map(str, sorted(counts))) or 'no'} rows: give each one row per example"
        )
    return counts.pop()


def take_examples(batch: Any, start: int, stop: int) -> Any:
    """Return the examples of a batch from ``start`` to before ``stop``, in the form of the batch.

    Examples:
        >>> take_examples({"x": torch.arange(3), "prompt": ["a", "b", "c"], "beta": 0.1}, 1, 3)
        {'x': tensor([1, 2]), 'prompt': ['b', 'c'], 'beta': 0.1}
    """
    total = count_examples(batch)

    def take(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value[start:stop] if value.dim() else value
        return value[start:stop] if _one_per_example(value, total) else with_parts(value, take)

    return take(batch)


def _one_per_example(value: Any, examples: int) -> bool:
    """Return whether the value is a list of plain values as long as the batch; fields of a named tuple are no examples."""
    if not isinstance(value, (list, tuple)) or is_namedtuple_instance(value) or len(value) != examples:
        return False
    return not any(isinstance(item, (Tensor, Mapping, list, tuple)) for item in value)


def reduce_parts(values: Sequence[Any], sizes: Sequence[int], how: Any) -> Any:
    """Return one value from those of several micro-batches, which have ``sizes`` examples.

    ``how`` is the ``reduce_fx`` of ``self.log``: ``"mean"`` weights each value by its size; ``"sum"``, ``"min"``, ``"max"``
    or torch's functions of these names do not; any other function receives the values as one tensor.

    Examples:
        >>> reduce_parts([1.0, 4.0], [2, 1], "mean"), reduce_parts([1.0, 4.0], [2, 1], "sum")
        (tensor(2.), tensor(5.))
    """
    stacked = torch.stack([torch.as_tensor(value) for value in values])
    if how in ("mean", "avg", torch.mean):
        counts = torch.tensor(sizes, dtype=torch.float32, device=stacked.device)
        return (stacked * counts).sum(dim=0) / counts.sum()
    reduce = {"sum": torch.sum, "min": torch.min, "max": torch.max}.get(how, how)
    return reduce(stacked)


def join_results(results: Sequence[Any], shares: Sequence[float]) -> Any:
    """Return the result of the whole step: concatenated rows, the mean of single numbers, else the last value."""
    first = results[0]
    if isinstance(first, Mapping):
        return {key: join_results([result[key] for result in results], shares) for key in first}
    if not isinstance(first, Tensor):
        return results[-1]
    if first.dim():
        return torch.cat(list(results))
    return sum(share * result for share, result in zip(shares, results, strict=True))


Gradients = list[Tensor | None]
"""Gradient of each weight; None for one that no loss has reached."""


class FittedStep:
    """A module's ``training_step`` in less memory, with the same gradients up to rounding.

    The module's loss has to be a mean over the examples of its batch, and every tensor of a batch, in any nesting of
    mappings, lists and tuples, has one row per example. Lists of other values with one entry per example are cut alike;
    everything else in a batch is given to every micro-batch. The step is called once for each micro-batch, so dropout and
    in-batch statistics are drawn per micro-batch. Its metrics are logged once, combined over the micro-batches; a
    torchmetrics object has the right value over the epoch, but shows the last micro-batch's value for this step. The
    ``changes`` are `DPSGD`, whose module imports this one, or None; they are for a batch that is a single micro-batch, too.
    """

    def __init__(self, module: L.LightningModule, changes: Any = None) -> None:
        self.module, self._changes = module, changes
        self._as_before = ExitStack()

    def enter(self, micro_batch: int | None, checkpointing: bool) -> None:
        """Fit the step to a memory, until `leave`.

        Args:
            micro_batch: examples computed at a time, at least 1; None for whole batches.
            checkpointing: compute activations twice instead of keeping them.

        Raises:
            ValueError: the module calls backward itself, or the precision scales the loss.
        """
        self.leave()  # the visit before may have fitted it
        if micro_batch is not None:
            self._check_cut(micro_batch)
        if checkpointing:
            module: Any = self.module  # which was measured so, and has the method
            module.checkpoint_gradients(True)
            self._as_before.callback(module.checkpoint_gradients, False)
        if micro_batch is not None:
            step = self.module.training_step
            in_parts = wraps(step)(self._in_parts(step, micro_batch))  # Lightning reads its signature
            self._as_before.enter_context(replaced(self.module, "training_step", in_parts))

    def leave(self) -> None:
        """Restore the step from before `enter`."""
        self._as_before.close()

    def _check_cut(self, micro_batch: int) -> None:
        if not self.module.automatic_optimization:
            raise ValueError(
                f"micro_batch={micro_batch} cannot cut the steps of {type(self.module).__name__}, whose "
                "automatic_optimization is off: cut them there, or give the device more memory_gib"
            )
        trainer = self.module._trainer
        if trainer is not None and trainer.precision == "16-mixed":
            raise ValueError(
                f"trainer.precision='16-mixed' scales the loss, which micro_batch={micro_batch} works out unscaled: use "
                "'bf16-mixed' or '32-true'"
            )

    def _in_parts(self, step: Callable[..., Any], micro_batch: int) -> Callable[..., Any]:
        def training_step(batch: Any, *args: Any) -> Any:
            num_examples = count_examples(batch)
            if num_examples <= micro_batch and self._changes is None:
                return step(batch, *args)
            if self._changes is not None:
                self._changes.check_rows(batch, num_examples)
            weights = [weight for weight in self.module.parameters() if weight.requires_grad]
            gradients: Gradients = [None] * len(weights)
            total, log, results, shares = torch.zeros(()), _Log(self.module), [], []
            with log:
                for start in range(0, num_examples, micro_batch):
                    part = take_examples(batch, start, start + micro_batch)
                    log.num_examples = count_examples(part)
                    result = step(part, *args)
                    if result is None and self._changes is not None:
                        raise ValueError(
                            f"{type(self.module).__name__}.training_step left an example out, which must not decide on "
                            "the batch of others: have it return torch.zeros(())"
                        )
                    if result is None:  # the module asks to skip the batch
                        return None
                    loss = result["loss"] if isinstance(result, Mapping) else result
                    shares.append(log.num_examples / num_examples)  # n_i / n
                    if torch.is_grad_enabled():  # not in a forward-only visit
                        self._add_gradients(gradients, loss * shares[-1], weights, shares[-1])
                    total = total.to(loss) + shares[-1] * loss.detach()
                    results.append(_detached(result))
                    del result, loss  # they hold activations
            if torch.is_grad_enabled():
                if self._changes is not None:
                    gradients = self._changes.noised(gradients, weights, shares[0])
                # Lightning clears the gradients after training_step and only then goes backward.
                total = HandOver.apply(total, gradients, *weights)
            return (
                {**join_results(results, shares), "loss": total} if isinstance(results[0], Mapping) else total
            )

        return training_step

    def _add_gradients(self, total: Gradients, loss: Tensor, weights: Sequence[Tensor], share: float) -> None:
        parts: Gradients = [None] * len(weights)
        # The loss of an example that is left out may be a plain 0.
        if self._changes is None or loss.requires_grad:
            with torch.autocast(loss.device.type, enabled=False):  # as in backward, outside of training_step
                parts = [*torch.autograd.grad(loss, weights, allow_unused=True)]
        if self._changes is not None:
            parts = self._changes.clipped(parts, weights, share)
        for i, part in enumerate(parts):
            if part is not None:
                before = total[i]
                # Autograd may give one tensor for two parameters, so it is not added to in place.
                total[i] = part.clone() if before is None else before.add_(part)


class HandOver(torch.autograd.Function):
    """Loss with gradients that are already known."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: Gradients, *weights: Tensor) -> Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
        # The factor: Lightning has divided the loss by accumulate_grad_batches. In place: they may be as large as the model.
        return None, None, *(None if part is None else part.mul_(factor) for part in ctx.gradients)


class _Log:
    """Replacement of a module's ``log`` that logs each name once at the end.

    Attributes:
        num_examples: size of the present micro-batch, the weight of its means.
    """

    def __init__(self, module: L.LightningModule) -> None:
        self.module = module
        self.num_examples = 0
        self._own = ExitStack()
        self._names: dict[str, tuple[list[Any], list[int], tuple[Any, ...], dict[str, Any]]] = {}

    def __enter__(self) -> None:
        self._own.enter_context(replaced(self.module, "log", self._collect))

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._own.close()
        if kind is not None:
            return
        for name, (values, sizes, args, options) in self._names.items():
            if isinstance(values[-1], Metric):  # it has all parts, and combines them itself
                self.module.log(name, values[-1], *args, **options)
            else:
                value = reduce_parts(values, sizes, options.get("reduce_fx", "mean"))
                self.module.log(name, value, *args, **{**options, "batch_size": sum(sizes)})

    def _collect(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        values, sizes, *_ = self._names.setdefault(name, ([], [], args, options))
        values.append(value.detach() if isinstance(value, Tensor) else value)
        sizes.append(options.get("batch_size") or self.num_examples)


def _detached(result: Any) -> Any:
    return result.detach() if isinstance(result, Tensor) else with_parts(result, _detached)
