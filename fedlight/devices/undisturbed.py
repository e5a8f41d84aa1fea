"""A training step of a module, after which the module is what it was before."""

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

CONTAINERS = (list, set, deque, dict, OrderedDict, defaultdict)


@contextmanager
def undisturbed(module: nn.Module) -> Iterator[None]:
    """Let a module work on copies of everything that a step may change, then restore it.

    Copied are numbers, tensors, lists, sets and dictionaries of its submodules: buffers, modes, states of metrics, counters.
    Weights are not copied; inside they have no gradients, afterwards those that they had.

    Example:
        >>> norm = nn.BatchNorm1d(2)
        >>> with undisturbed(norm):
        ...     _ = norm.num_batches_tracked.add_(1)
        ...     norm.num_batches_tracked.item()
        1
        >>> norm.num_batches_tracked.item()
        0
    """
    own = [(vars(part), dict(vars(part))) for part in module.modules()]
    gradients = [(weight, weight.grad) for weight in module.parameters() if weight.requires_grad]
    copies: dict[int, Any] = {}  # a value that two submodules share stays shared
    try:
        for held, before in own:
            held.update({name: _copied(value, copies) for name, value in before.items()})
        for weight, _ in gradients:
            weight.grad = None
        yield
    finally:
        for weight, gradient in gradients:
            weight.grad = gradient
        for held, before in own:
            held.clear()
            held.update(before)


def _copied(value: Any, copies: dict[int, Any]) -> Any:
    if isinstance(value, nn.Parameter) or not isinstance(value, (Tensor, *CONTAINERS)):
        return value
    if id(value) in copies:
        return copies[id(value)]
    if isinstance(value, Tensor):
        copies[id(value)] = value.detach().clone().requires_grad_(value.requires_grad)
    elif type(value) not in CONTAINERS:  # an unknown class may not be copyable
        return value
    else:
        made: Any = copy.copy(value)
        copies[id(value)] = made
        if isinstance(value, dict):
            made.update({key: _copied(part, copies) for key, part in value.items()})
        elif isinstance(value, list):
            made[:] = [_copied(part, copies) for part in value]
    return copies[id(value)]
