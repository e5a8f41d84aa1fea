"""Shapes of batches, and the cost of any shape from the costs of a few: texts have hundreds of lengths.

The cost of a step is a polynomial in the shape of its batch: linear in the examples and in the share of labelled tokens,
quadratic in the length of the texts (attention). Each counted size doubles the one before it, and between two of them FLOPs
follow exactly, but for labelled tokens, whose numbers are rounded. The peak of memory is the largest of several such
polynomials: it follows exactly as long as the same moment of the step is the peak, else very nearly.
"""

from dataclasses import dataclass
from fractions import Fraction
from itertools import product


@dataclass(frozen=True, order=True)
class BatchShape:
    """Size of a batch: all that its cost depends on.

    Args:
        examples: number of examples, or of pairs where a batch has pairs.
        tokens: tokens of each text, with padding; 0 where the data are not text.
        responses: labelled tokens of the whole batch; 0 where the task has none.

    Raises:
        ValueError: a number is out of range.
    """

    examples: int
    tokens: int = 0
    responses: int = 0

    def __post_init__(self) -> None:
        if self.examples < 1 or self.tokens < 0 or self.responses < 0:
            raise ValueError(f"{self} must have an example or more, and no negative number of tokens")


LINE, CURVE = (1, 2), (1, Fraction(3, 2), 2)
"""Nodes of the interpolation between a power of two and the next, as multiples of the lower one."""


def anchors(shape: BatchShape) -> dict[BatchShape, Fraction]:
    """Return shapes and weights: the cost of this shape is the weighted sum of theirs; a pure function.

    Examples:
        >>> for anchor, weight in anchors(BatchShape(examples=4, tokens=40)).items():
        ...     print(anchor.tokens, weight)
        32 3/8
        48 3/4
        64 -1/8
    """
    if shape.tokens < 8:
        return {shape: Fraction(1)}
    positions = shape.examples * (shape.tokens - 1)  # the first token of a text is never labelled
    shares = (
        _around(Fraction(shape.responses, positions), LINE) if shape.responses else {Fraction(0): Fraction(1)}
    )
    weights: dict[BatchShape, Fraction] = {}
    for (examples, a), (tokens, b), (share, c) in product(
        _around(Fraction(shape.examples), LINE).items(),
        _around(Fraction(shape.tokens), CURVE).items(),
        shares.items(),
    ):
        anchor = BatchShape(int(examples), int(tokens), round(share * examples * (tokens - 1)))
        weights[anchor] = weights.get(anchor, Fraction(0)) + a * b * c
    return weights


def _around(value: Fraction, nodes: tuple[int | Fraction, ...]) -> dict[Fraction, Fraction]:
    """Return Lagrange's weights of ``nodes`` times the power of two below ``value``, without zeros."""
    low = Fraction(2) ** (value.numerator.bit_length() - value.denominator.bit_length())
    if low > value:  # the length in bits leaves two powers
        low /= 2
    x = value / low
    weights = {}
    for node in nodes:
        weight = Fraction(1)
        for other in nodes:
            if other != node:
                weight *= (x - other) / (node - other)
        if weight:
            weights[low * node] = weight
    return weights
