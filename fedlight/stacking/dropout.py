"""Dropout whose masks are a function of a client's seed and the number of the layer.

The mask of a row depends on the seed of its client, on the number of the layer, on the row's place among the client's rows
and on nothing else: not on other clients in the batch, on padding to the right, on the device, or on earlier draws.
So it is the same when activations are computed a second time for the backward pass.

Each 64-bit number of the generator gives four lanes of 16 bits, and an entry is dropped where its lane is below
``rate * 65536``; this takes a fraction of the time of torch's dropout on a CPU. Layers that have the same input object
(query, key and value projections of a transformer) share one mask and one product.

Generator: SplitMix64 of G. Steele, D. Lea and C. Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014,
https://doi.org/10.1145/2660193.2660195: its output i is a mixed ``seed + i * golden``, so all outputs are computed at once.
"""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedlight.support.pokes import backward_pass

LANES = 1 << 16
"""Number of values of a lane; ``rate * LANES`` of them drop an entry."""
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_SHARED = "_fedlight_dropped"


class DropoutMasks:
    """Masks of all dropout layers of a model.

    Outside of `seeded` and before `set_rows`, a layer draws a seed from torch's global stream for each mask.

    Examples:
        >>> masks, ones = DropoutMasks(), torch.ones(1, 2, 4)
        >>> with masks.seeded(1):
        ...     first, again, other = (masks.drop(ones, 0.5, number) for number in (0, 0, 1))
        >>> torch.equal(first, again), sorted(set(first.flatten().tolist()))
        (True, [0.0, 2.0])
    """

    def __init__(self) -> None:
        self._now: _Pass | None = None
        self._steps: dict[torch.device, Tensor] = {}

    def set_rows(self, counts: Sequence[int] | None, seeds: Sequence[int] | None) -> None:
        """Set whose rows come next, until the next call.

        ``counts`` are the rows of each client, None if all are one's; an input may have all of them several times over.
        ``seeds``, in [0, 2**64), are those of each client; None draws them from torch's global stream.
        """
        self._now = None if seeds is None else _Pass(seeds, counts)

    def seeded(self, seed: int) -> AbstractContextManager[None]:
        """Run the body with the masks of one seed, in [0, 2**64), which has all rows."""
        return _During(self, _Pass([seed], None))

    def checkpoint_contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return ``context_fn`` of ``torch.utils.checkpoint``, which recomputes activations with the masks of now."""
        return nullcontext(), _During(self, self._now)

    def drop(
        self, x: Tensor, rate: float, number: int, dtype: torch.dtype | None = None, shares: bool = True
    ) -> Tensor:
        """Return the input cast to a type, with entries set to 0 and the rest scaled up, so that the mean stays.

        Args:
            x: ``(rows, ..., features)``. For the same mask whatever the padding, tokens are the second dimension.
            rate: share of entries to drop, in [0, 1].
            number: number of the layer; that of the first layer counts for all that get the same object.
            dtype: type of the result, by default that of the input.
            shares: whether layers that get the same object share mask and result, which must then not be changed in place.
        """
        dtype = dtype or x.dtype
        if x.is_meta:  # shapes alone
            return functional.dropout(x.to(_mask_type(dtype)), rate).to(dtype)
        state = self._now
        # A recomputation for a backward pass has to save as many tensors as the first pass, so it shares none of that.
        key = (state, x._version, rate, dtype, backward_pass())
        shared = getattr(x, _SHARED, None) if shares else None
        if state is not None and shared is not None and shared[0] == key:
            product: Tensor = shared[1]
            return product
        if state is None:
            state = _Pass([int(torch.randint(2**63 - 1, ()))], None)
        product = (x.to(dtype) * self._mask(x, state, rate, number, dtype)).to(dtype)
        if self._now is not None and shares and torch.is_grad_enabled():
            # Lives as long as the input, so that no list of activations has to be cleared; without a graph, where nothing
            # else keeps it, that would be the largest part of the memory of a forward-only visit.
            setattr(x, _SHARED, (key, product))
        return product

    def _mask(self, x: Tensor, state: "_Pass", rate: float, number: int, dtype: torch.dtype) -> Tensor:
        dropped = round(rate * LANES)
        if dropped == LANES:
            return torch.zeros(x.shape, dtype=dtype, device=x.device)
        whole = state.texts.whole(x)
        entries = whole[0].numel()
        start = _mixed(state.row_keys(len(whole), x.device) + _signed(number * _GOLDEN))
        numbers = _mixed(start[:, None] + self._progression(-(-entries // 4), x.device))
        lanes = numbers.view(torch.int16)[:, :entries].view(x.shape)  # four of each number, signed
        return (lanes >= dropped - LANES // 2).to(_mask_type(dtype)).mul_(LANES / (LANES - dropped))

    def _progression(self, length: int, device: torch.device) -> Tensor:
        """Return ``(length,)`` multiples of the golden ratio, those of the longest input so far cut off."""
        known = self._steps.get(device)
        if known is None or len(known) < length:
            known = self._steps[device] = torch.arange(length, device=device) * _signed(_GOLDEN)
        return known[:length]


def _mask_type(dtype: torch.dtype) -> torch.dtype:
    # The product of 16-bit numbers would round the scale as well, to one part in 256.
    return torch.float32 if dtype.itemsize == 2 else dtype


class _During(AbstractContextManager[None]):
    """Context with a pass's masks; a second backward pass enters it a second time."""

    def __init__(self, masks: DropoutMasks, state: "_Pass | None") -> None:
        self.masks, self.state = masks, state

    def __enter__(self) -> None:
        self.before, self.masks._now = self.masks._now, self.state

    def __exit__(self, *error: object) -> None:
        self.masks._now = self.before


class Texts:
    """Shape of the texts of a pass, by which inputs are told apart that have all tokens in one dimension.

    Such are those of OPT's feed-forward layers and of most routers to experts: ``(rows * tokens, features)``.

    Examples:
        >>> texts, whole = Texts(), torch.ones(2, 3, 5)
        >>> texts.whole(whole).shape, texts.whole(whole.flatten(0, 1)).shape
        (torch.Size([2, 3, 5]), torch.Size([2, 3, 5]))
    """

    def __init__(self) -> None:
        self.known = 0, 0

    def whole(self, x: Tensor) -> Tensor:
        """Return an input with rows and tokens in separate dimensions, as an earlier one had them; others as they are."""
        rows, tokens = self.known
        if x.dim() == 2 and tokens > 1 and len(x) == rows * tokens:
            return x.view(rows, tokens, -1)
        if x.dim() > 2:
            self.known = len(x), math.prod(x.shape[1:-1])
        return x


class _Pass:
    """Seeds and rows of clients during one forward pass, and the pass itself as a key."""

    def __init__(self, seeds: Sequence[int], counts: Sequence[int] | None) -> None:
        self.seeds, self.counts, self.texts = list(seeds), counts, Texts()
        self._keys: dict[tuple[int, torch.device], Tensor] = {}

    def row_keys(self, rows: int, device: torch.device) -> Tensor:
        """Return a 64-bit key of each row, of its client's seed and its place among the client's rows."""
        if (rows, device) not in self._keys:
            counts = [rows] if self.counts is None else self.counts
            tiles, rest = divmod(rows, sum(counts))
            if rest:
                raise ValueError(f"dropout of {rows} rows, which are not those of clients with {counts}")
            each = [
                (seed, tile * count + place)
                for tile in range(tiles)
                for seed, count in zip(self.seeds, counts, strict=True)
                for place in range(count)
            ]
            seeds, places = torch.tensor([(_signed(seed), place) for seed, place in each]).unbind(dim=1)
            self._keys[rows, device] = _mixed(_mixed(seeds) + places * _signed(_GOLDEN)).to(device)
        return self._keys[rows, device]


def _signed(value: int) -> int:
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def _mixed(z: Tensor) -> Tensor:
    """Return SplitMix64's mixing of 64-bit numbers, in place."""
    # Torch shifts the sign in from the left, and the masks clear it.
    z.bitwise_xor_((z >> 30).bitwise_and_((1 << 34) - 1)).mul_(_signed(_FIRST))
    z.bitwise_xor_((z >> 27).bitwise_and_((1 << 37) - 1)).mul_(_signed(_SECOND))
    return z.bitwise_xor_((z >> 31).bitwise_and_((1 << 33) - 1))


class SeededDropout(nn.Module):
    """Dropout layer of a LoRA adapter with masks of `DropoutMasks`.

    ``number`` is that of the layer; the weight of ``weight_of`` gives the result's type where none is given.
    """

    def __init__(self, rate: float, masks: DropoutMasks, number: int, weight_of: nn.Module) -> None:
        super().__init__()
        self.rate, self.masks, self.number = rate, masks, number
        self._weight_of = (weight_of,)  # in a tuple: it is no part of this layer

    def forward(self, x: Tensor, dtype: Any = None) -> Tensor:
        """Return the input cast to a type, by default the weight's, in training with entries dropped."""
        dtype = dtype or self._weight_of[0].weight.dtype
        return self.masks.drop(x, self.rate, self.number, dtype) if self.training else x.to(dtype)

    def extra_repr(self) -> str:  # noqa: D102
        return f"rate={self.rate}"


def seed_dropout(network: nn.Module, masks: DropoutMasks) -> None:
    """Give the LoRA layers of a PEFT model dropout of those masks instead of torch's; a second call changes nothing."""
    from peft.tuners.lora import LoraLayer

    layers = [layer for layer in network.modules() if isinstance(layer, LoraLayer)]
    for number, layer in enumerate(layers):
        for adapter, dropout in layer.lora_dropout.items():
            if type(dropout) is nn.Dropout:
                made = SeededDropout(dropout.p, masks, number, layer.lora_A[adapter])
                layer.lora_dropout[adapter] = made.train(dropout.training)
                # Dropout casts the input: PEFT would make another object of it in each layer that shares it.
                layer.cast_input_dtype_enabled = False
