"""A batch in parts: its examples by number, and what its parts give put together again."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import is_namedtuple_instance

from fedlight.support.torch_parts import tensors, with_parts


def count_examples(batch: Any) -> int:
    """Examples of a batch: rows of its tensors.

    Raises:
        ValueError: it has no tensors, or they differ in their rows.

    Example:
        >>> count_examples({"x": torch.zeros(3, 2), "labels": [torch.zeros(3), "shared"]})
        3
    """
    counts = {len(tensor) for tensor in tensors(batch) if tensor.dim()}
    if len(counts) != 1:
        raise ValueError(
            f"a batch of type {type(batch).__name__} cannot be cut into micro-batches, as its tensors have "
            f"{' and '.join(map(str, sorted(counts))) or 'no'} rows: give each one row per example"
        )
    return counts.pop()


def take_examples(batch: Any, start: int, stop: int) -> Any:
    """The examples of a batch from ``start`` to before ``stop``, in the form of the batch.

    Example:
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
    """Is it a list of plain values as long as the batch? Fields of a named tuple are no examples."""
    if not isinstance(value, (list, tuple)) or is_namedtuple_instance(value) or len(value) != examples:
        return False
    return not any(isinstance(item, (Tensor, Mapping, list, tuple)) for item in value)


def reduce_parts(values: Sequence[Any], sizes: Sequence[int], how: Any) -> Any:
    """One value of several micro-batches'.

    Args:
        values: numbers or tensors.
        sizes: examples of each.
        how: ``reduce_fx`` of ``self.log``: ``"mean"`` counts each value by its size; ``"sum"``, ``"min"`` and ``"max"``, or
            torch's functions of these names, do not; any other function is given the values as one tensor.

    Example:
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
    """What the step would have returned: rows behind each other, the mean of single numbers, else the last."""
    first = results[0]
    if isinstance(first, Mapping):
        return {key: join_results([result[key] for result in results], shares) for key in first}
    if not isinstance(first, Tensor):
        return results[-1]
    if first.dim():
        return torch.cat(list(results))
    return sum(share * result for share, result in zip(shares, results, strict=True))
