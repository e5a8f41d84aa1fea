"""Who takes part: a pure function of the run's seed and the round."""

from collections.abc import Sequence

import numpy as np

from fedlight.federation.client import Client
from fedlight.support.seeding import derive_seed


def uniform_cohort(
    clients: Sequence[Client], clients_per_round: int, seed: int, round_idx: int
) -> list[Client]:
    """Return ``clients_per_round`` clients, drawn uniformly without replacement, in the order of ``clients``.

    The draw is a function of the seed and the round.

    Example:
        >>> clients = [Client(name, 1, 0.25) for name in "abcd"]
        >>> [c.id for c in uniform_cohort(clients, 2, seed=0, round_idx=0)]
        ['c', 'd']
        >>> [c.id for c in uniform_cohort(clients, 4, seed=0, round_idx=0)]
        ['a', 'b', 'c', 'd']
    """
    generator = np.random.default_rng(derive_seed(seed, "cohort", round_idx))
    chosen = generator.choice(len(clients), size=clients_per_round, replace=False)
    return [clients[i] for i in sorted(chosen.tolist())]
