"""Numbers that suit the size of the data: clients of a round, batch, rounds, tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedlight.first_config.columns import Guess

LOCAL_STEPS = 5
FEWEST_ROUNDS, MOST_ROUNDS = 6, 12
LARGEST_BATCH = 8
MOST_IN_A_ROUND = 5
MOST_TOKENS = 1024
VALIDATED = 500  # examples of validation in all, about


@dataclass(frozen=True)
class Sizes:
    """Numbers of a first run."""

    clients: int  # clients with rows
    clients_per_round: int  # of them in a round
    rounds: int  # rounds
    batch_size: int  # examples of an optimizer step; even
    local_steps: int  # optimizer steps of a visit
    val_max: int  # most examples of a client in validation


def choose_sizes(rows_of_clients: Sequence[int]) -> Sizes:
    """Return numbers for a first run of minutes, for clients with these numbers of examples.

    Examples:
        >>> choose_sizes([100] * 300)
        Sizes(clients=300, clients_per_round=5, rounds=12, batch_size=8, local_steps=5, val_max=2)
        >>> choose_sizes([6, 9, 7])
        Sizes(clients=3, clients_per_round=3, rounds=6, batch_size=4, local_steps=5, val_max=166)
    """
    clients, median = len(rows_of_clients), float(np.median(rows_of_clients))
    a_round = min(clients, MOST_IN_A_ROUND)
    # Half of the clients fill a batch. It is even, since both orders of a pair are in one.
    batch = max(2, min(LARGEST_BATCH, 1 << int(np.log2(max(median, 1)))))
    passes = sum(rows_of_clients) / (a_round * LOCAL_STEPS * batch)
    rounds = int(np.clip(np.ceil(passes), FEWEST_ROUNDS, MOST_ROUNDS))
    return Sizes(clients, a_round, rounds, batch, LOCAL_STEPS, max(2, VALIDATED // clients))


def explain(sizes: Sizes, rows_of_clients: Sequence[int]) -> list[Guess]:
    """Return the numbers with their reasons."""
    low, middle, high = (f"{value:,.0f}" for value in np.percentile(rows_of_clients, (0, 50, 100)))
    clients = f"{sizes.clients:,}, {sizes.clients_per_round} in a round"
    rounds = f"{sizes.rounds} of {sizes.local_steps} steps with {sizes.batch_size} examples"
    reason = f"a first run: one pass, but {FEWEST_ROUNDS} to {MOST_ROUNDS} rounds; half of the clients fill a batch"
    spread = f"{low} to {high} rows each, {middle} in the middle"
    return [Guess("clients", clients, spread, sure=sizes.clients > 1), Guess("rounds", rounds, reason)]


def choose_tokens(lengths: Sequence[int], positions: int | None) -> tuple[int, float]:
    """Return ``max_tokens`` for texts of these lengths, with the end token, and the share of them that fits into it.

    Examples:
        >>> choose_tokens([40] * 99 + [5000], 32768), choose_tokens([40, 600], 512)
        ((64, 0.99), (512, 0.5))
    """
    limit = min(positions or MOST_TOKENS, MOST_TOKENS)
    wanted = int(np.ceil((np.percentile(lengths, 95) + 2) / 32)) * 32
    size = min(max(wanted, 64), limit)  # a text beyond the positions has no place in the model
    return size, float(np.mean(np.asarray(lengths) <= size))
