"""Exact sums of tensors: the same bits in any order of the addends, and for any number of partial sums.

Every finite fp64 number is a whole multiple of 2^-1074. A sum is held as such an integer, in digits of 56 bits with a sign,
one int64 tensor for each digit that some element needs (a long accumulator: Kulisch and Miranker, "Computer Arithmetic in
Theory and Practice", 1981; Collange et al., "Numerical reproducibility for the parallel reduction on multi- and many-core
architectures", Parallel Computing 49, 2015). The sum is rounded to fp64 once, when it is read. Digits are added as they are
needed, so nothing overflows before the sum itself leaves the range of fp64, where it becomes infinite.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedlight.federation.state import State

BITS = 56
"""Of a digit; int64 leaves 7 for the sum of digits, so carries are due after ``MOST_ADDENDS``."""
MOST_ADDENDS = 127
LOWEST = -1074
"""Digit 0 counts multiples of ``2**LOWEST``, the smallest fp64 number above 0."""
CHUNK = 2**15
"""Elements that are worked on at once, so that temporary tensors stay in the processor's cache."""


class ExactSum:
    """Sum of tensors of one shape. NaN and infinities add up as in IEEE 754, where their order does not matter either.

    Memory: 8 bytes per element and digit; of movements, which span about 100 bits, two or three digits.

    Examples:
        >>> total = ExactSum((1,))
        >>> for value in (1e30, 1.0, -1e30, 1e-30):
        ...     total.add(torch.tensor([value], dtype=torch.float64))
        >>> total.rounded().item() == 1.0 + 1e-30, total.rounded().item()
        (True, 1.0)
    """

    def __init__(self, shape: Sequence[int]) -> None:
        self._shape = tuple(shape)
        self._digits: dict[int, Tensor] = {}
        self._addends = 0
        self._not_finite: Tensor | None = None

    def add(self, value: Tensor, times: float = 1.0) -> None:
        """Add ``times * value``, the product rounded to fp64; ``value`` is real, of any number type, and not changed.

        Raises:
            ValueError: it has another shape than the sum, or is complex.
        """
        self._expect(value.shape)
        if value.is_complex():
            raise ValueError(f"an exact sum takes real numbers, not {value.dtype}: add both parts apart")
        if self._addends == MOST_ADDENDS:
            self._carry()
        self._addends += 1
        flat = value.detach().reshape(-1)
        for start in range(0, len(flat), CHUNK):
            where = slice(start, start + CHUNK)
            rest = flat[where].to("cpu", torch.float64, copy=True).mul_(times)
            if not math.isfinite(peak := _peak(rest)):
                peak = self._set_aside(rest, where)
            for index in range(max(math.frexp(peak)[1] - 1 - LOWEST, 0) // BITS, -1, -1):
                if not rest.any():
                    break
                unit = math.ldexp(1.0, BITS * index + LOWEST)
                # Division by a power of two is exact, and so is the difference: no bit of an addend is lost.
                digit = torch.div(rest, unit, rounding_mode="trunc")
                rest.sub_(digit, alpha=unit)
                self._digit(index).view(-1)[where] += digit.to(torch.int64)

    def partial(self) -> dict[str, Any]:
        """Return the sum so far as tensors and plain values, for `merge`."""
        return {
            "shape": self._shape,
            "digits": {index: digit.clone() for index, digit in self._digits.items()},
            "addends": self._addends,
            "not_finite": self._not_finite,
        }

    def merge(self, partial: Mapping[str, Any]) -> None:
        """Add another sum's `partial`, which is not changed; raise ValueError if its shape is not that of the sum."""
        self._expect(partial["shape"])
        other = ExactSum(self._shape)
        other._addends = partial["addends"]
        other._digits = {index: digit.clone() for index, digit in partial["digits"].items()}
        if self._addends + other._addends > MOST_ADDENDS:
            self._carry()
            other._carry()
        self._addends += other._addends
        for index, digit in other._digits.items():
            self._digit(index).add_(digit)
        if partial["not_finite"] is not None:
            self._not_finite = partial["not_finite"] + (0.0 if self._not_finite is None else self._not_finite)

    def rounded(self) -> Tensor:
        """Return the sum in fp64, correctly rounded (half to even); a sum of 0 is +0."""
        total = torch.zeros(self._shape, dtype=torch.float64)
        if self._digits:
            lowest, zeros = min(self._digits), torch.zeros(self._shape, dtype=torch.int64)
            digits = [self._digits.get(i, zeros).view(-1) for i in range(lowest, max(self._digits) + 1)]
            for start in range(0, total.numel(), CHUNK):
                where = slice(start, start + CHUNK)
                part = [digit[where].clone() for digit in digits]
                total.view(-1)[where] = _rounded(part, BITS * lowest + LOWEST)
        if self._not_finite is not None:
            total += self._not_finite
            total.masked_fill_(total.isnan(), math.nan)  # one bit pattern for every NaN
        return total

    def _expect(self, shape: Sequence[int]) -> None:
        if self._shape != tuple(shape):
            raise ValueError(
                f"a tensor of shape {tuple(shape)} cannot be added to a sum of shape {self._shape}"
            )

    def _digit(self, index: int) -> Tensor:
        if index not in self._digits:
            self._digits[index] = torch.zeros(self._shape, dtype=torch.int64)
        return self._digits[index]

    def _set_aside(self, values: Tensor, where: slice) -> float:
        """Add NaN and infinities apart, put 0 in their place, and return the largest magnitude that is left."""
        if self._not_finite is None:
            self._not_finite = torch.zeros(self._shape, dtype=torch.float64)
        odd = ~values.isfinite()
        self._not_finite.view(-1)[where] += values.where(odd, 0.0)
        return _peak(values.masked_fill_(odd, 0.0))

    def _carry(self) -> None:
        """Bring all digits into [-2^55, 2^55), so that the sum counts as one addend."""
        for index in range(min(self._digits, default=0), max(self._digits, default=0) + 3):
            if (digit := self._digits.get(index)) is not None:
                carried = (digit + 2 ** (BITS - 1)) >> BITS
                digit.sub_(carried << BITS)
                if carried.any():
                    self._digit(index + 1).add_(carried)
        self._addends = 1


class ExactSums:
    """Exact sums by name, such as those of a federated state."""

    def __init__(self) -> None:
        self._sums: dict[str, ExactSum] = {}

    def add(self, name: str, value: Tensor, times: float = 1.0) -> None:
        """Add ``times * value`` to the sum of this name, the product rounded to fp64."""
        self._sums.setdefault(name, ExactSum(value.shape)).add(value, times)

    def partial(self) -> dict[str, Any]:
        """Return the sums so far as tensors and plain values, and start anew."""
        sums, self._sums = self._sums, {}
        return {name: total.partial() for name, total in sums.items()}

    def merge(self, partial: Mapping[str, Any]) -> None:
        """Add the sums of another `partial`."""
        for name, part in partial.items():
            self._sums.setdefault(name, ExactSum(part["shape"])).merge(part)

    def result(self) -> State:
        """Return the sums in fp64, correctly rounded, and start anew; a name without addends is absent."""
        sums, self._sums = self._sums, {}
        return {name: total.rounded() for name, total in sums.items()}


def _peak(values: Tensor) -> float:
    """Return the largest magnitude; NaN where there is one."""
    least, most = torch.aminmax(values)
    return max(most.item(), -least.item())


def _carry_up(digits: list[Tensor]) -> None:
    """Bring all digits but the highest into [0, 2^56), in place."""
    for lower, higher in pairwise(digits):
        carried = lower >> BITS  # rounds down, so the highest digit has the number's sign
        lower.sub_(carried << BITS)
        higher.add_(carried)


def _rounded(digits: list[Tensor], exponent: int) -> Tensor:
    """Return ``sum(digits[i] * 2**(BITS * i + exponent))`` in fp64, correctly rounded.

    Digits are int64 of one shape, lowest first, and changed in place.
    """
    digits.append(torch.zeros_like(digits[0]))
    _carry_up(digits)
    sign = torch.where(digits[-1] < 0, -1, 1)
    for digit in digits:
        digit.mul_(sign)
    _carry_up(digits)  # digits of the magnitude
    high, low, place = digits[-1], torch.zeros_like(sign), torch.full_like(sign, len(digits) - 1)
    inexact = torch.zeros_like(sign, dtype=torch.bool)  # whether anything is left below ``high`` and ``low``
    for index in range(len(digits) - 2, -1, -1):
        empty = high == 0
        low = torch.where(~empty & (place == index + 1), digits[index], low)
        inexact |= ~empty & (place > index + 1) & (digits[index] != 0)
        place = torch.where(empty, index, place)
        high = torch.where(empty, digits[index], high)
    # The first 57 bits or more, the last of which says whether bits below it are lost: rounds like all bits would.
    shift = (62 - torch.frexp(high.double()).exponent.long()).clamp(max=BITS)
    inexact |= (low & ((1 << (BITS - shift)) - 1)) != 0
    leading = (high << shift) | (low >> (BITS - shift)) | inexact
    with np.errstate(over="ignore"):
        power = (BITS * place + exponent - shift).numpy()
        return torch.from_numpy(np.ldexp((leading * sign).double().numpy(), power))
