"""Optimizers begin every visit as new ones do, also those that remember something outside of ``Optimizer.state``.

Torch's own optimizers keep what they remember in ``state``, which is cleared. Others step an optimizer that they hold in an
attribute (SAM, Lookahead), whose state is cleared as well, or count and collect in attributes: those get back the value that
they had before the first visit. A tensor in an attribute cannot be given back, as it may be a copy of the weights.
"""

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

TORCHS = vars(torch.optim.SGD([torch.zeros(1)])).keys() | {"_opt_called", "_step_count", "step"}
"""Attributes that torch, its schedules and its loss scale give to every optimizer."""


class FreshOptimizers:
    """Makes optimizers forget. It has to see them before their first step."""

    def __init__(self) -> None:
        self._met: dict[int, _Attributes] = {}

    def forget(self, optimizers: Sequence[Optimizer]) -> None:
        """Clears what they remember; groups and learning rates stay.

        Raises:
            ValueError: one keeps tensors in an attribute and has changed them.
        """
        for optimizer in _with_inner(optimizers):
            optimizer.state.clear()
            met = self._met.get(id(optimizer))
            if met is None or met.optimizer is not optimizer:
                self._met[id(optimizer)] = _Attributes(optimizer)
            else:
                met.put_back()


class _Attributes:
    """What an optimizer that is not torch's own has in attributes of its own.

    Args:
        optimizer: as it is before its first step.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._values: dict[str, Any] = {}
        self._tensors: dict[str, list[tuple[Tensor, int]]] = {}
        for name, value in self._own():
            tensors = [one for one in _leaves(value) if isinstance(one, Tensor)]
            if tensors:
                self._tensors[name] = [(one, one._version) for one in tensors]
            else:
                self._values[name] = copy.deepcopy(value)

    def put_back(self) -> None:
        for name, value in [*self._own()]:
            if name in self._tensors:
                self._refuse_changed(name, value)
            elif name in self._values:
                setattr(self.optimizer, name, copy.deepcopy(self._values[name]))
            else:
                delattr(self.optimizer, name)

    def _own(self) -> Iterator[tuple[str, Any]]:
        """Plain values and containers of them; what is made of parameters of the groups is none."""
        if type(self.optimizer).__module__.startswith("torch.optim"):
            return
        trained = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        plain = (Tensor, int, float, complex, str, bytes, type(None))
        for name, value in [*vars(self.optimizer).items()]:
            leaves = [*_leaves(value)]
            if name not in TORCHS and all(
                isinstance(one, plain) and id(one) not in trained for one in leaves
            ):
                yield name, value

    def _refuse_changed(self, name: str, value: Any) -> None:
        now = [(one, one._version) for one in _leaves(value) if isinstance(one, Tensor)]
        before = self._tensors[name]
        if len(now) != len(before) or any(
            a[0] is not b[0] or a[1] != b[1] for a, b in zip(now, before, strict=True)
        ):
            raise ValueError(
                f"{type(self.optimizer).__name__} changes tensors in its attribute {name}, which would pass from one client "
                "to the next: have it keep them in Optimizer.state, without which every visit begins"
            )


def _with_inner(optimizers: Sequence[Optimizer]) -> list[Optimizer]:
    """These, and the optimizers that they hold in attributes."""
    found: dict[int, Optimizer] = {}
    waiting = [*optimizers]
    while waiting:
        one = waiting.pop()
        if id(one) not in found:
            found[id(one)] = one
            waiting += [
                leaf for value in vars(one).values() for leaf in _leaves(value) if isinstance(leaf, Optimizer)
            ]
    return [*found.values()]


def _leaves(value: Any) -> Iterator[Any]:
    """What stands in dicts, lists, tuples and sets, or the value itself."""
    if isinstance(value, dict):
        value = [*value.values()]
    if isinstance(value, (list, tuple, set)):
        for one in value:
            yield from _leaves(one)
    else:
        yield value
