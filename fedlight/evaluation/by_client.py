"""Scores by client: each client's mean, the mean of the worst clients, and the spread over clients."""

import math
from collections.abc import Mapping, Sequence

import numpy as np


def per_client(correct: np.ndarray, indices: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return each client's share of correct examples: client -> ``(columns,)``, in [0, 1].

    ``correct`` is ``(examples, columns)`` bool. Positions beyond the last example, and clients without one, are skipped.

    Examples:
        >>> correct = np.array([[True, True], [False, True], [True, False], [True, False]])
        >>> shares = per_client(correct, {"u": np.array([0, 1]), "v": np.array([2, 3, 4]), "w": np.array([5])})
        >>> {client: share.tolist() for client, share in shares.items()}
        {'u': [0.5, 1.0], 'v': [1.0, 0.0]}
    """
    seen = {client: rows[rows < len(correct)] for client, rows in indices.items()}
    return {client: correct[rows].mean(axis=0) for client, rows in seen.items() if len(rows)}


def worst_share_mean(values: Sequence[float], share: float) -> float:
    """Return the mean of the lowest ``ceil(share * n)`` of n values, at least one; the share lies in (0, 1].

    Examples:
        >>> worst_share_mean([0.9, 0.5, 0.75, 0.25], share=0.3), worst_share_mean([0.9, 0.25], share=1e-12)
        (0.375, 0.25)
    """
    worst = max(1, math.ceil(round(share * len(values), 9)))  # 0.1 * 30 is slightly more than 3
    return math.fsum(sorted(values)[:worst]) / worst


def spread(values: Sequence[float], share: float) -> dict[str, float]:
    """Return the mean of the clients' values, the mean of the worst share of them, and their population deviation.

    Examples:
        >>> spread([0.5, 1.0, 0.5, 1.0], share=0.1)
        {'client_mean': 0.75, 'client_worst_tenth': 0.5, 'client_std': 0.25}
    """
    mean = math.fsum(values) / len(values)
    variance = math.fsum((value - mean) ** 2 for value in values) / len(values)
    worst = "client_worst_tenth" if share == 0.1 else f"client_worst_{share:g}"
    return {"client_mean": mean, worst: worst_share_mean(values, share), "client_std": math.sqrt(variance)}
