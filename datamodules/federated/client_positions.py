"""Check of a user's assignment of training examples to clients."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from fedlight.datamodules.clients.partition import Clients


def read_positions(given: Any, num_examples: int) -> Clients:
    """Return client id as text -> int64 positions in the training set, in the order given.

    An id is a text or a whole number. Positions are whole numbers from 0 in a list, tuple, range, numpy array or tensor, or
    a mask of ``num_examples`` truth values.

    Raises:
        ValueError: an id or a position is invalid, or an example is given to two clients or twice to one. Clients are
            weighted by their numbers of examples, and no client may train on another's.

    Examples:
        >>> clients = read_positions({7: range(2), "b": [3, 2]}, num_examples=4)
        >>> {client: own.tolist() for client, own in clients.items()}
        {'7': [0, 1], 'b': [3, 2]}
    """
    if not isinstance(given, Mapping):
        raise ValueError(
            f"clients gave a {type(given).__name__}: give a dict, client id -> positions in the training set"
        )
    clients: Clients = {}
    for client_id, positions in given.items():
        name = _read_id(client_id)
        if name in clients:
            raise ValueError(f"clients has the client {name!r} twice, as a text and as a number: rename one")
        clients[name] = _read_client(name, positions, num_examples)
    _refuse_shared(clients, num_examples)
    return clients


def _read_id(client_id: Any) -> str:
    if isinstance(client_id, (str, int, np.integer)) and not isinstance(client_id, bool):  # True is an int
        return str(client_id)
    raise ValueError(
        f"client id {client_id!r} is a {type(client_id).__name__}: give a text or a whole number"
    )


def _read_client(client: str, given: Any, num_examples: int) -> np.ndarray:
    if isinstance(given, Tensor):
        given = given.cpu().numpy()  # numpy reads no tensor of a GPU
    if not isinstance(given, (Sequence, np.ndarray)) or isinstance(given, (str, bytes)):
        raise ValueError(
            f"client {client!r} has a {type(given).__name__} as positions: give a list, range, array or tensor of "
            "whole numbers"
        )
    try:
        positions = np.asarray(given)
    except ValueError:  # rows of unequal length
        positions = np.empty((0, 0))
    if positions.ndim != 1:
        raise ValueError(f"client {client!r}: positions must be one row of whole numbers, not nested ones")
    if positions.dtype == bool:
        if len(positions) != num_examples:
            raise ValueError(
                f"client {client!r} has a mask of {len(positions)} truth values, but the training set has "
                f"{num_examples} examples: give one for each of them, or positions"
            )
        return np.flatnonzero(positions)
    if len(positions) and not np.issubdtype(positions.dtype, np.integer):
        values = positions.tolist()  # Python's numbers, for the message
        wrong = next((value for value in values if not isinstance(value, int)), values[0])
        raise ValueError(
            f"client {client!r} has the position {wrong!r}, which is no whole number: give whole "
            "numbers from 0 (numpy: .astype(int))"
        )
    outside = positions[(positions < 0) | (positions >= num_examples)]
    if len(outside):
        raise ValueError(
            f"client {client!r} has the position {outside[0]}, but the training set has {num_examples} examples, "
            f"0 to {num_examples - 1}"
        )
    return positions.astype(np.int64)


def _refuse_shared(clients: Clients, num_examples: int) -> None:
    """Raise ValueError for an example that two clients have, or one client twice."""
    owner = np.full(num_examples, -1)  # number of each example's client, -1: none yet
    for number, (client, positions) in enumerate(clients.items()):
        taken = positions[owner[positions] >= 0]
        if len(taken):
            other = list(clients)[owner[taken[0]]]
            raise ValueError(
                f"position {taken[0]} is at client {other!r} and at client {client!r}: give each example to one client, or "
                "put it into the data set twice"
            )
        owner[positions] = number
        values, counts = np.unique(positions, return_counts=True)
        if (counts > 1).any():
            raise ValueError(
                f"client {client!r} has the position {values[counts > 1][0]} twice: give it once. A WeightedRandomSampler "
                "in the loader reads some examples more often"
            )
