"""Codecs of payloads: fewer bits for each value (Quantize) or fewer values (TopK).

A codec works on one flat vector, all tensors of a state one after the other; the size of each is known at both ends and is
not sent. Further tensors that a codec needs for decoding, such as scales and positions, are its side tensors.

* Blockwise 8-bit and NF4 quantization are bitsandbytes': Dettmers et al., "8-bit Optimizers via Block-wise Quantization",
  ICLR 2022, https://arxiv.org/abs/2110.02861, and "QLoRA", NeurIPS 2023, https://arxiv.org/abs/2305.14314.
* Top-k with error feedback: Stich et al., "Sparsified SGD with Memory", NeurIPS 2018, https://arxiv.org/abs/1809.07599,
  taken tensor by tensor.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from fedlight.support.checks import Checked

Side = dict[str, Tensor]
"""Side tensors of a codec, by name."""


class Codec(Checked, ABC):
    """Encoder and decoder of a payload's values.

    Attributes:
        error_feedback: whether the client keeps the coding error and adds it to its next movement.
        movements_only: whether it would ruin parameters and is refused on the way down.
    """

    error_feedback: bool = False
    movements_only: bool = False

    def encoded_sizes(self, sizes: Sequence[int]) -> list[int]:
        """Return how many values each tensor has after encoding: by default as many as before."""
        return list(sizes)

    @abstractmethod
    def encode(self, values: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Side]:
        """Return encoded values and side tensors of finite fp32 values, ``(sum(sizes),)``."""

    @abstractmethod
    def decode(self, values: Tensor, side: Mapping[str, Tensor], sizes: Sequence[int]) -> Tensor:
        """Return the decoded values, fp32, ``(sum(sizes),)``; ``sizes`` are those before encoding."""


class Quantize(Codec):
    """Codec with fewer bits for each value; it ends a chain.

    ``fp16`` and ``bf16`` scale each tensor by a power of two, so that its largest value is near 2**15: fp16 cannot overflow,
    and the small movements of a low learning rate keep their digits. ``int8`` (255 even steps) and ``nf4`` have a fp32 scale
    for each block of values, its largest magnitude. A tensor's last block may be short. Zero stays zero.

    Args:
        to: number format; bytes of a value are 2 (fp16, bf16), 1 (int8) and 0.5 (nf4).
        block: values that share a scale: 64, 128, 256, 512 or 1024; None is 256 for int8 and 64 for nf4, with the scales
            1/3.94 and 1/7.11 of fp32. fp16 and bf16 have no blocks.
        error_feedback: whether the client keeps the rounding error and adds it to its next movement.

    Raises:
        ValueError: ``to`` or ``block`` is none of these.

    Examples:
        >>> codec = Quantize("int8", block=64)
        >>> sent, side = codec.encode(torch.tensor([0.0, 127.0, -63.6]), [3])
        >>> sent.dtype, side["scales"].tolist(), codec.decode(sent, side, [3]).tolist()
        (torch.uint8, [127.0], [0.0, 127.0, -64.0])
    """

    def __init__(
        self,
        to: Literal["fp16", "bf16", "int8", "nf4"] = "nf4",
        block: Literal[64, 128, 256, 512, 1024] | None = None,
        error_feedback: bool = False,
    ) -> None:
        if block is not None and to in ("fp16", "bf16"):
            raise ValueError(
                f"Quantize.block={block} has no meaning for {to}: leave it out, or take int8 or nf4"
            )
        self.to = to
        self.block = block or {"nf4": 64, "int8": 256}.get(to, 1)
        self.error_feedback = error_feedback

    def encode(self, values: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Side]:
        if self.to in ("fp16", "bf16"):
            return self._halved(values, sizes)
        from bitsandbytes import functional as bnb

        # No block spans two tensors: movements of two layers may differ by orders of magnitude.
        whole = torch.cat([pad(part, (0, -len(part) % self.block)) for part in values.split(list(sizes))])
        if self.to == "nf4":
            codes, state = bnb.quantize_4bit(whole, blocksize=self.block, quant_type="nf4")
        else:
            codes, state = bnb.quantize_blockwise(whole, code=_even_steps(), blocksize=self.block)
        filled, sent = self._code_sizes(sizes)
        return _cut(codes.reshape(-1), filled, sent), {"scales": state.absmax}  # padding is not sent

    def decode(self, values: Tensor, side: Mapping[str, Tensor], sizes: Sequence[int]) -> Tensor:
        if self.to in ("fp16", "bf16"):
            return _scaled(values, side["exponents"], sizes)
        from bitsandbytes import functional as bnb

        filled, sent = self._code_sizes(sizes)
        parts = zip(values.split(sent), filled, strict=True)
        codes = torch.cat([pad(part, (0, size - len(part))) for part, size in parts])
        lengths = self._filled(sizes)
        shared = {"absmax": side["scales"], "blocksize": self.block, "dtype": torch.float32}
        if self.to == "nf4":
            levels = bnb.get_4bit_type("nf4", device="cpu")
            shape = torch.Size([sum(lengths)])
            state = bnb.QuantState(shape=shape, code=levels, quant_type="nf4", **shared)
            whole = bnb.dequantize_4bit(codes, state)
        else:
            whole = bnb.dequantize_blockwise(codes, bnb.QuantState(code=_even_steps(), **shared))
        return _cut(whole.reshape(-1), lengths, sizes)

    def _halved(self, values: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Side]:
        largest = torch.segment_reduce(values.abs(), "max", lengths=torch.tensor(list(sizes)), initial=0.0)
        # The largest is then in [2^14, 2^15): fp16 ends at 65,504.
        exponents = (torch.frexp(largest).exponent - 15).to(torch.int16)
        dtype = torch.float16 if self.to == "fp16" else torch.bfloat16
        return _scaled(values, -exponents, sizes).to(dtype), {"exponents": exponents}

    def _filled(self, sizes: Sequence[int]) -> list[int]:
        return [size + -size % self.block for size in sizes]

    def _code_sizes(self, sizes: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the bytes of each tensor with the padding of its last block, and without it."""
        in_a_byte = 2 if self.to == "nf4" else 1  # two codes of 4 bits
        filled = [size // in_a_byte for size in self._filled(sizes)]
        return filled, [-(-size // in_a_byte) for size in sizes]  # a half byte is sent whole


class TopK(Codec):
    """Codec that sends the values of largest magnitude of each tensor, with their positions; the rest arrives as zero.

    Args:
        share: share of each tensor's values, in (0, 1]; rounded up, so every tensor sends at least one. The position of a
            value takes 4 bytes more (int32).
        error_feedback: whether the client keeps the values that it did not send and adds them to its next movement; without
            it, values that are always small are never sent. A client that is sampled seldom adds stale values: in ten
            rounds with a fifth of the clients each it was better without (docs/results/system.md).

    Raises:
        ValueError: ``share`` is out of its range.

    Examples:
        >>> codec = TopK(share=0.5)
        >>> sent, side = codec.encode(torch.tensor([1.0, -3.0, 2.0, 0.0]), [4])
        >>> sent.tolist(), side["positions"].tolist(), codec.decode(sent, side, [4]).tolist()
        ([-3.0, 2.0], [1, 2], [0.0, -3.0, 2.0, 0.0])
    """

    movements_only = True

    def __init__(self, share: float = 0.1, error_feedback: bool = True) -> None:
        if not 0 < share <= 1:
            raise ValueError(f"TopK.share={share} of a tensor's values is sent and must be in (0, 1]")
        self.share = share
        self.error_feedback = error_feedback

    def encoded_sizes(self, sizes: Sequence[int]) -> list[int]:
        # 0.07 * 100 is 7.000...1: a number that is whole but for the rounding counts as whole.
        return [min(size, max(1, math.ceil(self.share * size - 1e-9))) for size in sizes]

    def encode(self, values: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Side]:
        """Return the largest values in the order of their positions, which are counted within each tensor."""
        parts, kept = values.split(list(sizes)), self.encoded_sizes(sizes)
        # Rising, as `decode` demands.
        positions = [
            part.abs().topk(k, sorted=False).indices.sort().values
            for part, k in zip(parts, kept, strict=True)
        ]
        sent = [part[where] for part, where in zip(parts, positions, strict=True)]
        return torch.cat(sent), {"positions": torch.cat(positions).to(torch.int32)}

    def decode(self, values: Tensor, side: Mapping[str, Tensor], sizes: Sequence[int]) -> Tensor:
        kept, decoded = self.encoded_sizes(sizes), torch.zeros(sum(sizes))
        sent = zip(values.split(kept), side["positions"].split(kept), strict=True)
        for part, (some, where) in zip(decoded.split(list(sizes)), sent, strict=True):
            # They come from a client, and an index below 0 would count from the end.
            beyond = len(where) > 0 and (where[0] < 0 or where[-1] >= len(part))
            if beyond or (where[1:] <= where[:-1]).any():
                raise ValueError("positions of a payload are no places of a tensor in their order")
            part[where.long()] = some
        return decoded


def _even_steps() -> Tensor:
    """Return the 256 numbers of int8 for bitsandbytes."""
    # The default of bitsandbytes has no -1 and rounds 0 to a little more.
    return (torch.arange(-128, 128) / 127).clamp_(min=-1)


def _cut(values: Tensor, lengths: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """Return the first ``sizes`` values of parts of ``lengths``."""
    parts = zip(values.split(list(lengths)), sizes, strict=True)
    return torch.cat([part[:size] for part, size in parts])


def _scaled(values: Tensor, exponents: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return each tensor's values times two to its exponent."""
    scales = torch.exp2(exponents.double()).repeat_interleave(torch.tensor(list(sizes)))
    return values.double().mul_(scales).float()  # that power may not fit into fp32
