"""A state as it is now, however it goes on: containers and small tensors are copied, large ones that stay are only named."""

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor

COPIED_MIB = 256
"""Tensors that may be held by reference are copied up to so many MiB together; a copy of these takes about 0.1 s."""


class HeldState:
    """Holds a nested state of dicts, lists, tuples, tensors and plain values.

    Tensors are copied to the CPU. Those for which ``may_refer`` answers true are held by reference where all of them
    together are above ``copied_mib``: frozen weights, and moments of a server optimizer that gives new tensors in each
    round. A change in place of such a tensor raises its version counter and is refused in :meth:`value`.

    Args:
        state: what is held.
        may_refer: whether nothing is expected to change this tensor in place; asked for each tensor.
        copied_mib: up to which they are copied anyway.

    Example:
        >>> import torch
        >>> state = {"w": torch.zeros(1)}
        >>> held = HeldState(state, may_refer=lambda tensor: False)
        >>> state["w"] += 1
        >>> held.value()["w"].item()
        0.0
    """

    def __init__(
        self, state: Any, may_refer: Callable[[Tensor], bool], copied_mib: float = COPIED_MIB
    ) -> None:
        self._may_refer = may_refer
        self._references: list[tuple[str, Tensor, int]] = []
        self._refers = False
        total = sum(t.numel() * t.element_size() for t in _tensors(state) if self._can_refer(t))
        self._refers = total > copied_mib * 2**20
        self._state = self._hold(state, "")

    def value(self) -> Any:
        """The state; its containers are the caller's own.

        Raises:
            ValueError: a tensor that is held by reference was changed in place.
        """
        for where, tensor, version in self._references:
            if tensor._version != version:
                raise ValueError(
                    f"{where} was changed in place inside a round, so what it was before the round is lost and no "
                    "checkpoint can be written: replace the tensor by a new one, or register it as a buffer of the module"
                )
        return _containers(self._state)

    def copy_those(self, changes: Callable[[Tensor], bool]) -> None:
        """Copies those that are held by reference and will now change, before they do."""
        stays = self._may_refer
        self._may_refer = lambda tensor: stays(tensor) and not changes(tensor)
        self._references = []
        self._state = self._hold(self._state, "")

    def _can_refer(self, tensor: Tensor) -> bool:
        return not tensor.is_inference() and self._may_refer(tensor)  # inference tensors have no version

    def _hold(self, value: Any, where: str) -> Any:
        if isinstance(value, Tensor):
            if self._refers and self._can_refer(value):
                self._references.append((where, value.detach(), value._version))
                return value.detach()
            return value.detach().to("cpu", copy=True)
        if isinstance(value, dict):
            held = copy.copy(value)
            for key, item in value.items():
                held[key] = self._hold(item, f"{where}.{key}" if where else str(key))
            return held
        if type(value) in (list, tuple):
            return type(value)(self._hold(item, f"{where}[{i}]") for i, item in enumerate(value))
        return copy.deepcopy(value)


def _containers(value: Any) -> Any:
    if isinstance(value, dict):
        new = copy.copy(value)
        new.update((key, _containers(item)) for key, item in value.items())
        return new
    return type(value)(map(_containers, value)) if type(value) in (list, tuple) else value


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if type(value) in (list, tuple) else ()
    return [tensor for item in items for tensor in _tensors(item)]
