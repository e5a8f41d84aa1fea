"""Embedded worlds of known truth, and a tiny language model that can read and write their texts.

``votes`` and ``oracle`` hold voters with known tastes, ``instructions`` and ``writing`` domains of facts; ``world`` has
their words. ``benchmarks/toy_pretrain.py`` made the model.
"""

from fedlight.pretrained.hub import EMBEDDED
from fedlight.toy import instructions as _instructions
from fedlight.toy import votes as _votes
from fedlight.toy import writing as _writing

MODEL = EMBEDDED["toy"]

__all__ = ["MODEL", "rows"]


def rows(name: str, **options: float | str) -> list[dict[str, str]]:
    """Return rows of the embedded worlds.

    Args:
        name: ``"instructions"``, ``"writing"``, or a name of `fedlight.toy.votes.rows`.
        options: see `fedlight.toy.instructions.InstructionOptions`,
            `fedlight.toy.writing.WritingOptions` and `fedlight.toy.votes.WorldOptions`.

    Raises:
        ValueError: an unknown name or option, or a value out of range.

    Examples:
        >>> len(rows("instructions", split="test", topic_rows=2))
        96
    """
    if name == "instructions":
        return _instructions.instructions(**options)  # type: ignore[arg-type]
    if name == "writing":
        return _writing.writing(**options)  # type: ignore[arg-type]
    return _votes.rows(name, **options)
