"""Exact sums as integers modulo 2^192, in which nodes can hide what they add.

An addend is a whole multiple of 2^-146, below 2^45 in magnitude, held in three words of 64 bits. Movements of fp32
parameters times a weight fit unless the product is below 2^-94 (5e-29): then bits below the unit are rounded away, which is
counted. Sums of integers are the same in any order, so the sum of a round is that of an unmasked one, bit for bit, where
nothing was rounded.
"""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedlight.federation.exact_sum import BITS, BLOCK, LOWEST

WORDS = 3
"""Words of 64 bits of an element, the lowest first."""
BYTES = 8 * WORDS
FIRST_DIGIT = 20
"""Digit of an exact sum whose unit is that of the ring."""
DIGITS = WORDS * 64 // BITS
MOST_OF_LAST = 2**33
"""Largest magnitude of the highest digit of a node's sum, 2^31 as a number: so many of them that 16,384 nodes fit."""
UNIT = BITS * FIRST_DIGIT + LOWEST
"""The ring's unit is ``2**UNIT``."""
PAYLOAD = "masked"
"""Name of the payload with elements."""
Ring = NDArray[np.uint64]
"""Elements of the ring, ``(WORDS, elements)``."""


def zeros(elements: int) -> Ring:
    """Return so many zeros."""
    return np.zeros((WORDS, elements), dtype=np.uint64)


def add(total: Ring, addend: Ring) -> None:
    """Add elements to ``total``, in place.

    Examples:
        >>> total = from_bytes(bytes([255] * BYTES))
        >>> add(total, from_bytes(bytes([1] + [0] * (BYTES - 1))))
        >>> total.tolist()
        [[0], [0], [0]]
    """
    carry = np.zeros(total.shape[1], dtype=np.uint64)
    for word in range(WORDS):
        total[word] += carry
        lost = total[word] < carry
        total[word] += addend[word]
        carry = (lost | (total[word] < addend[word])).astype(np.uint64)


def negative(values: Ring) -> Ring:
    """Return what added to ``values`` gives zeros."""
    found = ~values
    one = zeros(values.shape[1])
    one[0] = 1
    add(found, one)
    return found


def to_bytes(values: Ring) -> bytes:
    """Return elements as bytes, word by word, each the lowest byte first."""
    return values.astype("<u8", copy=False).tobytes()


def from_bytes(data: bytes) -> Ring:
    """Return the elements that `to_bytes` wrote."""
    return np.frombuffer(data, dtype="<u8").reshape(WORDS, -1).astype(np.uint64)


def encode(partial: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]) -> tuple[Ring, int]:
    """Return a `WeightedSum.partial` as elements: those of the tensors in the order of their names, and the sum of weights.

    Args:
        partial: sums of updates that all have the tensors of ``shapes``, in this order.
        shapes: name -> shape.

    Returns:
        The elements, and how many of them were rounded.

    Raises:
        ValueError: a sum is not finite, or too large for the ring, or of other tensors.

    Examples:
        >>> import torch
        >>> from fedlight.federation.aggregation import WeightedSum
        >>> from fedlight.federation.client import Update
        >>> mean = WeightedSum("weight")
        >>> mean.add(Update("a", {"w": torch.tensor([-1.5, 2.0**-146])}, weight=2.0))
        >>> values, rounded = encode(mean.partial(), {"w": (2,)})
        >>> [float(one * Fraction(2) ** UNIT) for one in as_integers(values)], rounded
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
    weight = sum((Fraction(*ratio) for _, ratio in partial["divisors"]), Fraction())
    scaled = weight / Fraction(2) ** UNIT
    whole = round(scaled)
    if not 0 <= weight < 2.0**31:
        raise ValueError(f"the weights of a node add up to {float(weight):g}, which is too large")
    total[:, -1] = [(whole >> (64 * word)) & (2**64 - 1) for word in range(WORDS)]
    return total, rounded + int(whole != scaled)


def decode(total: Ring, shapes: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """Return a sum of what `encode` gave as a `WeightedSum.partial`, which another one merges.

    Raises:
        ValueError: there are other numbers of elements than tensors of these shapes have.
    """
    layout = tuple((name, tuple(shape)) for name, shape in shapes.items())
    size = sum(int(np.prod(shape)) for _, shape in layout)
    if total.shape != (WORDS, size + 1):
        raise ValueError(f"the sum has {total.shape[1]:,} elements instead of {size + 1:,}")
    weight = Fraction(*as_integers(total[:, -1:])) * Fraction(2) ** UNIT
    sums: list[Any] = []
    for number in range(-(-size // BLOCK)):
        part = total[:, number * BLOCK : min((number + 1) * BLOCK, size)]
        sums.append((layout, number, _to_digits(part)))
    return {"sums": sums, "divisors": [(tuple(shapes), weight.as_integer_ratio())] if weight else []}


def as_integers(values: Ring) -> list[int]:
    """Return elements as signed integers, multiples of the unit."""
    whole = [
        sum(int(values[word, i]) << (64 * word) for word in range(WORDS)) for i in range(values.shape[1])
    ]
    return [one - 2 ** (64 * WORDS) if one >> (64 * WORDS - 1) else one for one in whole]


def _from_digits(part: Mapping[str, Any], size: int) -> tuple[Ring, int]:
    """Return a block of an exact sum, and how many of its elements were rounded."""
    if part["not_finite"] is not None:
        raise ValueError("an update is not finite")
    total, below = zeros(size), np.zeros(size)
    for index, tensor in part["digits"].items():
        digit = tensor.view(-1).numpy()
        if index < FIRST_DIGIT:
            below += np.ldexp(digit, BITS * (index - FIRST_DIGIT))
            continue
        most = (
            MOST_OF_LAST
            if index == FIRST_DIGIT + DIGITS - 1
            else 0
            if index >= FIRST_DIGIT + DIGITS
            else None
        )
        if most is not None and np.abs(digit).max() > most:
            raise ValueError("an update is too large for a masked sum: lower the lr")
        add(total, _shifted(digit.astype(np.int64), BITS * (index - FIRST_DIGIT)))
    whole = np.rint(below)
    if whole.any():
        add(total, _shifted(whole.astype(np.int64), 0))
    return total, int((below != whole).sum())


def _shifted(values: NDArray[np.int64], bits: int) -> Ring:
    """Return ``values * 2**bits`` as elements."""
    found, low = zeros(values.size), bits % 64
    words = [values.view(np.uint64), *[(values >> 63).view(np.uint64)] * (WORDS - 1)]
    for word in range(bits // 64, WORDS):
        place = word - bits // 64
        found[word] = words[place] << np.uint64(low)
        if low and place:
            found[word] |= words[place - 1] >> np.uint64(64 - low)
    return found


def _to_digits(values: Ring) -> dict[str, Any]:
    """Return elements as the parts of an exact sum."""
    low, middle, high = values
    mask = np.uint64(2**BITS - 1)
    digits = [
        low & mask,
        (low >> np.uint64(48) | middle << np.uint64(16)) & mask,
        (middle >> np.uint64(32) | high << np.uint64(32)) & mask,
        high.view(np.int64) >> 16,
    ]
    found = {FIRST_DIGIT + i: torch.from_numpy(one.astype(np.float64)) for i, one in enumerate(digits)}
    # Digits of a sum's addends are below 2^47, these below 2^48.
    return {"shape": (values.shape[1],), "digits": found, "addends": 2, "not_finite": None}
