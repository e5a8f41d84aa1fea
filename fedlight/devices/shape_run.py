"""Training step on shapes alone: its operations and its memory are counted, and next to nothing is computed.

Weights are meta tensors, which have a shape but no values, and so are results of them. Tensors with values (ids, masks,
positions: they decide the course of a step) are computed as usual. Operations repeat from layer to layer, so each is
asked only once for the layout of its result: a step is then several times faster than with torch's fake tensors.
"""

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from fedlight.support.torch_parts import replaced

aten = torch.ops.aten

FLOPS: dict[Any, Callable[..., int]] = {
    **flop_registry,
    # Attention on a CPU, which torch's counter leaves out; its arguments begin like those of the other kernels.
    aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[aten._scaled_dot_product_flash_attention],
    aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        aten._scaled_dot_product_flash_attention_backward
    ],
}
"""FLOPs of an operation as in ``torch.utils.flop_counter``, 2 for a multiplication with its addition."""


class ShapeRun(TorchDispatchMode):
    """Counter of the FLOPs inside it so far, and of the most bytes alive at once that were made inside it.

    ``known`` are tensors that existed before, such as weights and the batch: they and their views are not counted.

    Examples:
        >>> weight, x = torch.ones(4, 3, device="meta"), torch.ones(2, 4, device="meta")
        >>> with ShapeRun([weight, x]) as counted:
        ...     y = (x @ weight) + 1
        >>> counted.flops, counted.peak_bytes  # 2 * 2 * 4 * 3; two tensors of 2 * 3 * 4 bytes
        (48, 48)
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.flops = 0
        self.peak_bytes = 0
        self._live_bytes = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in known}  # views share it
        self._living: dict[int, weakref.ref[Any]] = {}
        self._results: dict[Any, tuple[Callable[[], Any] | None, int]] = {}
        self._attention = ExitStack()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here: avoids a wrapper around every operation

    def __enter__(self) -> "ShapeRun":
        self._attention.enter_context(_fused_on_meta())
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._attention.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        on_meta = [tensor.is_meta for tensor in _tensors(args, kwargs)]
        if True not in on_meta:
            if _loses_values(func, args, kwargs):
                kwargs = {**kwargs, "device": args[0].device}
            out = func(*args, **kwargs)
            flops = _flops(func, args, kwargs, out)
        elif _writes(func):  # no values to write, and the layout stays
            out, flops = args[0], _flops(func, args, kwargs, args[0])
        elif _views(func):  # the tensor behind a view is not new
            return func(*args, **kwargs)
        else:
            if False in on_meta:
                args = tuple(_without_values(part) for part in args)
                kwargs = {name: _without_values(part) for name, part in kwargs.items()}
            out, flops = self._without_values(func, args, kwargs)
        self.flops += flops
        for tensor in _tensors((out,), {}):
            self._keep(tensor)
        return out

    def _without_values(self, func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, int]:
        """Return a meta tensor of the operation's layout, and its FLOPs."""
        key = (func, *map(_key, args), *map(_key, kwargs.values()))
        known = self._results.get(key)
        if known is None:
            out = func(*args, **kwargs)
            known = _maker(out, _tensors(args, kwargs)), _flops(func, args, kwargs, out)
            self._results[key] = known
            return out, known[1]
        make, flops = known
        return func(*args, **kwargs) if make is None else make(), flops

    def _keep(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        place = storage._cdata
        if place in self._living or place in self._known:
            return
        size = storage.nbytes()

        def dies(_: object) -> None:
            self._live_bytes -= size
            del self._living[place]

        self._living[place] = weakref.ref(storage, dies)
        self._live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self._live_bytes)


def _tensors(args: Iterable[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    tensors = []
    for part in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(part, Tensor):
            tensors.append(part)
        elif isinstance(part, (list, tuple)):
            tensors += [entry for entry in part if isinstance(entry, Tensor)]
    return tensors


def _flops(func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> int:
    formula = FLOPS.get(func._overloadpacket)
    return 0 if formula is None else formula(*args, **kwargs, out_val=out)


@functools.cache
def _writes(func: Any) -> bool:
    """Return whether an operation writes into its first argument and returns it, as ``add_`` does."""
    name = func._schema.name
    return func._schema.is_mutable and name.endswith("_") and torch.Tag.inplace_view not in func.tags


@functools.cache
def _views(func: Any) -> bool:
    """Return whether the result is declared as a view of an argument."""
    aliases = [value.alias_info for value in func._schema.returns]
    return func is aten._unsafe_view.default or (
        not func._schema.is_mutable and any(alias is not None for alias in aliases)
    )


def _loses_values(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether whole numbers are moved to meta; they keep their values, which may decide the step."""
    if func is not aten._to_copy.default or args[0].is_floating_point():
        return False
    device = kwargs.get("device")
    return device is not None and torch.device(device).type == "meta"


def _without_values(part: Any) -> Any:
    """Return the argument on meta; a mask becomes the positions it selects."""
    if isinstance(part, Tensor):
        return part if part.dim() == 0 else part.to("meta")  # torch takes single numbers from the CPU
    if not isinstance(part, (list, tuple)):
        return part
    moved: list[Any] = []
    for entry in part:
        if isinstance(entry, Tensor) and entry.dtype == torch.bool and not entry.is_meta:
            moved += entry.nonzero().to("meta").unbind(dim=1)  # their number depends on values
        else:
            moved.append(_without_values(entry))
    return moved


def _key(part: Any) -> Any:
    if isinstance(part, Tensor):
        return part.shape, part.stride(), part.dtype, part.is_meta
    if isinstance(part, (list, tuple)):
        return tuple(map(_key, part))
    return type(part), part  # 1 and 1.0 are equal, but give different types


def _maker(out: Any, inputs: Iterable[Tensor]) -> Callable[[], Any] | None:
    """Return a function that makes results of this layout; None if the result shares an argument's storage."""
    parts = [out] if isinstance(out, Tensor) else out
    if not isinstance(parts, (list, tuple)) or not all(isinstance(part, Tensor) for part in parts):
        return None
    places = {tensor.untyped_storage()._cdata for tensor in inputs}
    if any(not part.is_meta or part.untyped_storage()._cdata in places for part in parts):
        return None
    layouts = [(part.shape, part.stride(), part.dtype) for part in parts]
    is_one = isinstance(out, Tensor)

    def make() -> Any:
        made = [
            torch.empty_strided(size, stride, dtype=kind, device="meta") for size, stride, kind in layouts
        ]
        return made[0] if is_one else tuple(made)

    return make


@contextmanager
def _fused_on_meta() -> Iterator[None]:
    """Let attention on meta use the kernel that it uses with values; torch's choice there keeps all attention weights."""
    attention = functional.scaled_dot_product_attention

    @functools.wraps(attention)
    def chosen(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        fused = _fused(query, key, value, *args, **kwargs) if query.is_meta else None
        return attention(query, key, value, *args, **kwargs) if fused is None else fused

    # Torch disables a TorchFunctionMode in the backward pass, where checkpoints are recomputed.
    with replaced(functional, "scaled_dot_product_attention", chosen):
        yield


def _fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """Return the result of the kernel that is used with values; None if that is not a fused one."""
    fused = query.dim() == 4 and query.shape[-1] == value.shape[-1] and dropout_p == 0
    if not fused or (attn_mask is not None and attn_mask.requires_grad):
        return None
    if enable_gqa:
        key, value = (part.repeat_interleave(query.shape[1] // part.shape[1], dim=1) for part in (key, value))
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype)
    attended: Tensor = aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
    )[0]
    return attended
