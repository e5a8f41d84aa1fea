"""Parts of torch programs: evaluation mode, nested batches, modules that are changed for a while."""

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import is_namedtuple_instance


@contextmanager
def eval_mode(module: nn.Module) -> Iterator[None]:
    """Run the body with every submodule in eval mode, then restore the mode of each."""
    training = [part for part in module.modules() if part.training]
    if training:  # for a language model with adapters 17 ms
        module.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True


def tensors(batch: Any) -> Iterator[Tensor]:
    """Yield all tensors of a nested batch in order."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, (Mapping, list, tuple)):
        for part in batch.values() if isinstance(batch, Mapping) else batch:
            yield from tensors(part)


def with_parts(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a mapping, list or tuple of the same type with its direct parts changed; other values are returned as they are.

    Examples:
        >>> with_parts({"x": 1, "y": 2}, lambda part: part + 1), with_parts((1, 2), str), with_parts("text", str.upper)
        ({'x': 2, 'y': 3}, ('1', '2'), 'text')
        >>> from collections import Counter
        >>> with_parts(Counter("aab"), lambda part: part)["a"]
        2
    """
    if isinstance(value, Mapping):
        # A copy keeps the type, such as that of a tokenizer's batches, and its other attributes.
        made: MutableMapping[Any, Any] = copy.copy(value) if isinstance(value, MutableMapping) else {}
        for key, part in value.items():  # a Counter's update would add
            made[key] = change(part)
        return made
    if not isinstance(value, (list, tuple)):
        return value
    parts = [change(part) for part in value]
    return type(value)(*parts) if is_namedtuple_instance(value) else type(value)(parts)


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of an object or Python module inside the body, then restore or remove it.

    Examples:
        >>> from types import SimpleNamespace
        >>> owner = SimpleNamespace(x=1)
        >>> with replaced(owner, "x", 2), replaced(owner, "y", 3):
        ...     print(owner)
        namespace(x=2, y=3)
        >>> owner
        namespace(x=1)
    """
    attributes = vars(owner)
    before = {name: attributes[name]} if name in attributes else {}
    attributes[name] = value
    try:
        yield
    finally:
        attributes.pop(name, None)
        attributes.update(before)


CONTAINERS = (list, set, deque, dict, OrderedDict, defaultdict)


@contextmanager
def undisturbed(module: nn.Module) -> Iterator[None]:
    """Let a module work on copies of everything that a step may change, then restore it.

    Copied are numbers, tensors, lists, sets and dictionaries of its submodules: buffers, modes, states of metrics, counters.
    Weights are not copied; inside they have no gradients, afterwards those that they had.
    """
    attributes = [(vars(part), dict(vars(part))) for part in module.modules()]
    gradients = [(weight, weight.grad) for weight in module.parameters() if weight.requires_grad]
    copies: dict[int, Any] = {}  # a value that two submodules share stays shared
    try:
        for held, before in attributes:
            held.update({name: _copied(value, copies) for name, value in before.items()})
        for weight, _ in gradients:
            weight.grad = None
        yield
    finally:
        for weight, gradient in gradients:
            weight.grad = gradient
        for held, before in attributes:
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
