"""Buffers of a module: copies of them, changes against a copy, and restoring them.

Buffers are compared by content. Torch counts the changes of a tensor, but not those that its batch norm makes in C++; and
code may put a new tensor, also of another size, in the place of a buffer.
"""

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

Buffers = dict[str, Tensor | None]
"""Dotted name -> buffer, of its own type and on its own device; None for a buffer that is declared but not made."""

WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def snapshot(module: nn.Module) -> Buffers:
    """Return a copy of all buffers, which later training cannot change; a shared buffer is copied once.

    Example:
        >>> norm = nn.BatchNorm1d(2)
        >>> before = snapshot(norm)
        >>> _ = norm(torch.tensor([[0.0, 0.0], [2.0, 0.0]]))
        >>> changed(norm, before)
        ['running_mean', 'running_var', 'num_batches_tracked']
        >>> put_back(norm, before)
        >>> changed(norm, before)
        []
    """
    made: dict[int, Tensor] = {}
    found: Buffers = {}
    for name, _, _, value in _named(module):
        if value is not None and id(value) not in made:
            made[id(value)] = value.detach().clone()
        found[name] = None if value is None else made[id(value)]
    return found


def changed(module: nn.Module, before: Mapping[str, Tensor | None]) -> list[str]:
    """Return names of buffers that differ from a :func:`snapshot`: in content, size or type, new or gone."""
    now = {name: value for name, _, _, value in _named(module)}
    return [
        name for name in {**before, **now} if name not in before or not _same(now.get(name), before[name])
    ]


def copies(module: nn.Module, names: Iterable[str]) -> Buffers:
    """Return a copy of these buffers as they are now; None for one that is gone."""
    now = {name: value for name, _, _, value in _named(module)}
    found = {name: now.get(name) for name in names}
    return {name: None if value is None else value.detach().clone() for name, value in found.items()}


@torch.no_grad()
def put(module: nn.Module, values: Mapping[str, Tensor | None]) -> None:
    """Copy values into these buffers by dotted name, in place where size and type allow it; other buffers stay.

    Raises:
        AttributeError: the module has no submodule of such a name.
    """
    for name, value in values.items():
        held, key = _holder(module, name)
        own = held.get(key)
        if own is not None and value is not None and _alike(own, value) and not own.is_inference():
            own.copy_(value)
        else:
            near = own if own is not None else next(module.parameters(), value)
            held[key] = None if value is None or near is None else value.detach().to(near.device, copy=True)


def put_back(module: nn.Module, before: Mapping[str, Tensor | None]) -> None:
    """Restore all buffers of a :func:`snapshot`, and remove new ones."""
    names = changed(module, before)
    put(module, {name: before[name] for name in names if name in before})
    for name in names:
        if name not in before:
            held, key = _holder(module, name)
            del held[key]


def persistent(module: nn.Module) -> list[str]:
    """Return the names of the buffers in the module's ``state_dict``."""
    return [name for name, part, key, _ in _named(module) if key not in part._non_persistent_buffers_set]


def normalization_parameters(module: nn.Module) -> frozenset[str]:
    """Return names of the weights and biases of layers that own running statistics, such as batch norm.

    These are all submodules with buffers ``running_mean`` and ``running_var`` of their own.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.LayerNorm(2))
        >>> sorted(normalization_parameters(net))
        ['1.bias', '1.weight']
    """
    return frozenset(
        f"{prefix}.{name}" if prefix else name
        for prefix, part in module.named_modules()
        if all(part._buffers.get(key) is not None for key in ("running_mean", "running_var"))
        for name, _ in part.named_parameters(recurse=False)
    )


def _named(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor | None]]:
    """Yield dotted name, submodule, name in it, and buffer; meta tensors, which have no content, are left out."""
    for prefix, part in module.named_modules():
        for key, value in part._buffers.items():
            if value is None or not value.is_meta:
                yield f"{prefix}.{key}" if prefix else key, part, key, value


def _holder(module: nn.Module, name: str) -> tuple[dict[str, Tensor | None], str]:
    part, _, key = name.rpartition(".")
    return module.get_submodule(part)._buffers, key


def _alike(a: Tensor, b: Tensor) -> bool:
    return (a.shape, a.dtype, a.layout) == (b.shape, b.dtype, b.layout)


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether two buffers are equal bit for bit, so that a NaN equals itself: a constant may hold one."""
    if a is None or b is None:
        return a is b
    if not _alike(a, b) or a.device != b.device:
        return False
    if a.layout != torch.strided:
        a, b = a.to_sparse_coo().coalesce(), b.to_sparse_coo().coalesce()
        return _same(a.indices(), b.indices()) and _same(a.values(), b.values())
    flat = [value.detach().contiguous().reshape(-1) for value in (a, b)]
    # As few numbers as possible: a causal mask of an old model has a million truth values in each layer.
    bytes_of = [n * each.element_size() for each in flat for n in (each.numel(), each.storage_offset())]
    width = next(size for size in WORDS if not any(number % size for number in bytes_of))
    return torch.equal(*(each.view(WORDS[width]) for each in flat))
