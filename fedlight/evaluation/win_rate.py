"""Win rate of one model's answers over another's, by a score that judges each answer."""

from collections.abc import Sequence


def win_rate(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Share of prompts on which ours scores higher; a tie counts one half.

    Args:
        ours: scores of our answers, one per prompt, ``(prompts,)``.
        theirs: scores of the other model's answers to the same prompts.

    Returns:
        In [0, 1]; 0.5 for equally good answers.

    Raises:
        ValueError: no prompt, or not the same number of both.

    Example:
        >>> win_rate([3.0, 1.0, 2.0, 5.0], [1.0, 2.0, 2.0, 0.0])
        0.625
    """
    if not ours or len(ours) != len(theirs):
        raise ValueError(f"win_rate needs the same prompts twice, got {len(ours)} and {len(theirs)} scores")
    return sum((a > b) + 0.5 * (a == b) for a, b in zip(ours, theirs, strict=True)) / len(ours)
