"""What is said and logged of the candidates of a round."""

from collections import Counter
from collections.abc import Mapping

from fedlight.datamodules.synthesis.synthesis import SURVIVED, TRIED

TOO_LONG = "too_long"
"""Why a candidate was dropped that does not fit into ``max_tokens`` with its prompt."""


def metrics(counts: Mapping[str, int], notes: Mapping[str, int]) -> dict[str, float]:
    """Counts by the names under which they are logged.

    Args:
        counts: see `Synthesis`.
        notes: see `Synthesis`.

    Example:
        >>> metrics(Counter(tried=3, survived=1, refusal=2), {"fewer_demonstrations": 0})
        {'tried': 3.0, 'survived': 1.0, 'dropped/refusal': 2.0, 'fewer_demonstrations': 0.0}
    """
    dropped = {f"dropped/{name}": value for name, value in counts.items() if name not in (TRIED, SURVIVED)}
    named = {TRIED: counts.get(TRIED, 0), SURVIVED: counts.get(SURVIVED, 0), **dropped, **notes}
    return {name: float(value) for name, value in named.items()}


def said(round_idx: int, sizes: Mapping[str, int], counts: Counter[str], notes: Counter[str]) -> str:
    """One line on what was made.

    Args:
        round_idx: from 0.
        sizes: candidates of each client.
        counts: see `Synthesis`.
        notes: see `Synthesis`.

    Example:
        >>> counts = Counter(tried=4, survived=1, refusal=2, near_example=1)
        >>> said(0, {"a": 1, "b": 0}, counts, Counter(fewer_demonstrations=2))
        'round 1: 2 clients made 1 candidate in 4 tries (dropped: 2 refusal, 1 near example; 2 fewer demonstrations);
         1 client has none'
    """
    dropped = [(name, value) for name, value in counts.most_common() if name not in (TRIED, SURVIVED)]
    parts = [f"{value:,} {name.replace('_', ' ')}" for name, value in dropped if value]
    others = [f"; {value:,} {name.replace('_', ' ')}" for name, value in notes.items() if value]
    made = f"{_number(len(sizes), 'client')} made {_number(counts[SURVIVED], 'candidate')} in {counts[TRIED]:,} tries"
    text = f"round {round_idx + 1}: {made} (dropped: {', '.join(parts) or 'none'}{''.join(others)})"
    without = sum(not size for size in sizes.values())
    return text + (
        f"; {_number(without, 'client')} {'has' if without == 1 else 'have'} none" if without else ""
    )


def _number(count: int, what: str) -> str:
    return f"{count:,} {what}" + ("" if count == 1 else "s")
