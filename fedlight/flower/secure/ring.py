"""Exact sums as integers modulo 2^192, where nodes can hide their addends.

An addend is a whole multiple of 2^-146, below 2^45 in magnitude, held in four digits of 48 bits, which are digits of an
exact sum (`fedlight.federation.exact_sum`). Movements of fp32 parameters times a weight fit unless the product is below
2^-94 (5e-29): then bits below the unit are rounded away, which is counted. Sums of integers are the same in any order, so
the sum of a round is that of an unmasked one, bit for bit, where nothing was rounded.
"""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedlight.federation.exact_sum import BITS, BLOCK, LOWEST, digest_of

DIGITS = 4
"""Digits of an element, the lowest first."""
BYTES = DIGITS * BITS // 8
FIRST_DIGIT = 20
"""Digit of an exact sum whose unit is that of the ring."""
MOST_OF_LAST = 2**33
"""Largest magnitude of the highest digit of a node's sum, 2^31 as a number: so many of them that 16,384 nodes fit."""
UNIT = BITS * FIRST_DIGIT + LOWEST
"""The ring's unit is ``2**UNIT``."""
PAYLOAD = "masked"
"""Name of the payload with elements."""
Ring = NDArray[np.int64]
"""Elements of the ring, ``(DIGITS, elements)``, each digit in [0, 2^48)."""
_MASK = 2**BITS - 1


def zeros(elements: int) -> Ring:
    """Return so many zeros."""
    return np.zeros((DIGITS, elements), dtype=np.int64)


def add(total: Ring, addend: Ring) -> None:
    """Add elements to ``total``, in place.

    Examples:
        >>> total = from_bytes(bytes([255] * BYTES))
        >>> add(total, from_bytes(bytes([1] + [0] * (BYTES - 1))))
        >>> total.tolist()
        [[0], [0], [0], [0]]
    """
    total += addend
    _carry(total)


def negative(values: Ring) -> Ring:
    """Return what added to ``values`` gives zeros."""
    return _carry(-values)


def to_bytes(values: Ring) -> bytes:
    """Return elements as bytes, digit by digit, each the lowest byte first."""
    # The two highest bytes of a digit of 48 bits are zeros, and are not sent.
    return values.astype("<i8", copy=False)[..., None].view(np.uint8)[..., : BITS // 8].tobytes()


def from_bytes(data: bytes) -> Ring:
    """Return the elements that `to_bytes` wrote."""
    digits = np.zeros((DIGITS, len(data) // BYTES, 8), dtype=np.uint8)
    digits[..., : BITS // 8] = np.frombuffer(data, dtype=np.uint8).reshape(DIGITS, -1, BITS // 8)
    return digits.view("<i8")[..., 0].astype(np.int64)


def encode(partial: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]) -> tuple[Ring, int]:
    """Return a `WeightedSum.partial` as elements, and how many of them were rounded.

    The elements are those of the tensors of ``shapes``, in this order, and the sum of weights.

    Raises:
        ValueError: a sum is not finite, or too large for the ring, or of other tensors.

    Examples:
        >>> import torch
        >>> from fedlight.federation.algorithm import WeightedSum
        >>> from fedlight.federation.client import Update
        >>> mean = WeightedSum("weight")
        >>> mean.add(Update("a", {"w": torch.tensor([-1.5, 2.0**-146])}, weight=2.0))
        >>> values, rounded = encode(mean.partial(), {"w": (2,)})
        >>> [float(number * Fraction(2) ** UNIT) for number in as_integers(values)], rounded
        ([-3.0, 2.2420775429197073e-44, 2.0], 0)
    """
    layout = tuple((name, tuple(shape)) for name, shape in shapes.items())
    size = sum(int(np.prod(shape)) for _, shape in layout)
    total, rounded = zeros(size + 1), 0
    for names, number, part in partial["sums"]:
        if tuple((name, tuple(shape)) for name, shape in names) != layout:
            raise ValueError("the updates of a node have other tensors than were due")
        if part is not None:
            where = slice(number * BLOCK, min((number + 1) * BLOCK, size))
            total[:, where], lost = _from_digits(part, where.stop - where.start)
            rounded += lost
    weight = sum((Fraction(*ratio) for _, ratio in partial["divisors"]), Fraction())  # exact like the sums
    scaled = weight / Fraction(2) ** UNIT
    whole = round(scaled)
    if not 0 <= weight < 2.0**31:
        raise ValueError(f"the weights of a node add up to {float(weight):g}, which is too large")
    total[:, -1] = [(whole >> (BITS * place)) & _MASK for place in range(DIGITS)]
    return total, rounded + int(whole != scaled)


def decode(total: Ring, shapes: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """Return a sum of what `encode` gave as a `WeightedSum.partial`, which another one merges.

    Raises:
        ValueError: there are other numbers of elements than tensors of these shapes have.
    """
    layout = tuple((name, tuple(shape)) for name, shape in shapes.items())
    size = sum(int(np.prod(shape)) for _, shape in layout)
    if total.shape != (DIGITS, size + 1):
        raise ValueError(f"the sum has {total.shape[1]:,} elements instead of {size + 1:,}")
    weight = Fraction(*as_integers(total[:, -1:])) * Fraction(2) ** UNIT
    sums: list[Any] = []
    for number in range(-(-size // BLOCK)):
        part = total[:, number * BLOCK : min((number + 1) * BLOCK, size)]
        rows = enumerate([*part[:-1], highest(part)], FIRST_DIGIT)
        digits = {index: torch.from_numpy(row.astype(np.float64)) for index, row in rows}
        # Digits of a sum's addends are below 2^47, these below 2^48.
        block = {"shape": (part.shape[1],), "digits": digits, "addends": 2, "not_finite": None}
        sums.append((layout, number, block))
    return {
        "sums": sums,
        "divisors": [(digest_of(tuple(shapes)), weight.as_integer_ratio())] if weight else [],
    }


def as_integers(values: Ring) -> list[int]:
    """Return elements as signed integers, multiples of the unit."""
    by_element = zip(*values[:-1], highest(values), strict=True)
    return [sum(int(digit) << (BITS * place) for place, digit in enumerate(each)) for each in by_element]


def highest(values: Ring) -> NDArray[np.int64]:
    """Return the highest digit of each element with the element's sign, in [-2^47, 2^47)."""
    return (values[-1] ^ 2 ** (BITS - 1)) - 2 ** (BITS - 1)  # two's complement of 48 bits


def _carry(values: Ring) -> Ring:
    """Bring all digits into [0, 2^48), in place; what leaves the highest digit is dropped."""
    for low, high in pairwise(values):  # >> rounds down, so digits below zero borrow
        high += low >> BITS
        low &= _MASK
    values[-1] &= _MASK
    return values


def _from_digits(part: Mapping[str, Any], size: int) -> tuple[Ring, int]:
    """Return a block of an exact sum, and how many of its elements were rounded."""
    if part["not_finite"] is not None:
        raise ValueError("an update is not finite")
    total, below = zeros(size), np.zeros(size)
    for index, tensor in part["digits"].items():
        digit, place = tensor.view(-1).numpy(), index - FIRST_DIGIT
        if place < 0:
            below += np.ldexp(digit, BITS * place)
            continue
        if place >= DIGITS - 1 and np.abs(digit).max() > (MOST_OF_LAST if place == DIGITS - 1 else 0):
            raise ValueError("an update is too large for a masked sum: lower the lr")
        if place < DIGITS:
            total[place] += digit.astype(np.int64)
    whole = np.rint(below)
    total[0] += whole.astype(np.int64)
    return _carry(total), int((below != whole).sum())
