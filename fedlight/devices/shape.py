"""Shape of a batch, and how its cost follows from the costs of a few other shapes."""

from dataclasses import dataclass


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
