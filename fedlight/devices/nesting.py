"""Parts of torch programs: batches of any nesting, attributes, modes and undisturbed modules."""

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

from torch import Tensor
from torch.utils._pytree import is_namedtuple_instance


def tensors(batch: Any) -> Iterator[Tensor]:
    """Yield all tensors of a nested batch in order.

    Example:
        >>> import torch
        >>> [x.item() for x in tensors({"pair": (torch.tensor(1), [torch.tensor(2), "text"]), "beta": 0.1})]
        [1, 2]
    """
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, (Mapping, list, tuple)):
        for part in batch.values() if isinstance(batch, Mapping) else batch:
            yield from tensors(part)


def with_parts(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a mapping, list or tuple of the same type with its direct parts changed; other values are returned as they are.

    Example:
        >>> with_parts({"x": 1, "y": 2}, lambda part: part + 1), with_parts((1, 2), str), with_parts("text", str.upper)
        ({'x': 2, 'y': 3}, ('1', '2'), 'text')
    """
    if isinstance(value, Mapping):
        # A copy keeps the type, such as that of a tokenizer's batches, and its other attributes.
        made: MutableMapping[Any, Any] = copy.copy(value) if isinstance(value, MutableMapping) else {}
        made.update({key: change(part) for key, part in value.items()})
        return made
    if not isinstance(value, (list, tuple)):
        return value
    parts = [change(part) for part in value]
    return type(value)(*parts) if is_namedtuple_instance(value) else type(value)(parts)
