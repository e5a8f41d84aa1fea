"""Robust ways to combine the movements of a round: statistics that a few clients cannot move far.

The order of the clients changes no bit of a result, nor does splitting them: aggregations of parts of a round give a partial
each, which another one merges. The coordinate-wise median and the trimmed mean are those of Yin et al., "Byzantine-Robust
Distributed Learning: Towards Optimal Statistical Rates", ICML 2018, https://arxiv.org/abs/1803.01498, definitions 1 and 2;
deviations are named at the classes.
"""

import math
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from torch import Tensor, cat, from_numpy

from fedlight.federation.algorithm import Aggregation
from fedlight.federation.client import State, Update
from fedlight.federation.exact_sum import Layout, Team, digest_of, layouts_of_all, places_of
from fedlight.support.checks import Checked

BLOCK = 2**16
"""Numbers of an update that are added in one go."""
SumUp = Callable[[np.ndarray], np.ndarray]
"""Function from a value at each coordinate here, ``(clients, numbers)``, to the sum over the coordinates of all processes,
``(clients,)``."""


class KeepsUpdates(Checked, Aggregation):
    """Aggregation that needs all updates of a round at once.

    The clients count alike, whatever an algorithm's weights. The updates stay in memory for the round; of several processes
    each has those of its clients, and a share of the coordinates of all.
    """

    whole = True
    """Whether an update counts as one vector, and updates of other tensors are combined apart; else each tensor does."""

    def __init__(self) -> None:
        self._updates: list[tuple[str, State]] = []
        self._total: State | None = None

    @abstractmethod
    def combined(self, updates: np.ndarray, clients: Sequence[str], sum_up: SumUp) -> np.ndarray:
        """Return the combination at each coordinate here, ``(numbers,)``.

        Args:
            updates: updates at these coordinates, ``(clients, numbers)``, in the order of the clients' ids.
            clients: their ids.
            sum_up: function that adds up what is needed of all coordinates; every process calls it equally often.
        """

    def check(self, clients: Sequence[str]) -> None:
        """Raise ValueError for clients of a round that the aggregation has no meaning for, such as too few."""

    def add(self, update: Update) -> None:
        self._updates.append((update.client_id, update.movement))

    def partial(self) -> dict[str, Any]:
        updates, self._updates = self._updates, []
        return {"updates": updates}

    def merge(self, partial: Mapping[str, Any]) -> None:
        self._updates.extend((client, movement) for client, movement in partial["updates"])

    @property
    def sums(self) -> "KeepsUpdates":
        """This aggregation: processes call its ``add_up``, as they do that of exact sums."""
        return self

    def add_up(self, team: Team) -> None:
        """Have each process combine its share of the coordinates; `result` then is that of all, and `partial` empty.

        For K clients with updates of D bytes, a process that trains k of them, one of N, receives ``(K - k) D / N`` bytes of
        updates. Then it receives ``(N - 1) / N`` of the result.
        """
        self._total = self._combined(team)

    def result(self) -> State:
        """Return the combined movement and start anew.

        Raises:
            ValueError: there are too few updates, or clients have sent a tensor beside different others.
        """
        total, self._total = self._total, None
        return self._combined() if total is None else total

    def _combined(self, team: Team | None = None) -> State:
        rows: dict[Layout, list[tuple[str, Tensor]]] = defaultdict(list)
        for client, movement in self.partial()["updates"]:
            layout = tuple((name, tuple(movement[name].shape)) for name in sorted(movement))
            for part in [layout] if self.whole else [(tensor,) for tensor in layout]:
                flat = [movement[name].detach().cpu().double().reshape(-1) for name, _ in part]
                rows[part].append((client, flat[0] if len(flat) == 1 else cat(flat)))  # of one tensor no copy
        known = {digest_of(layout): layout for layout in rows}
        if team is not None:
            known = layouts_of_all(team, known, team.gather([*known], "updates"))
        layouts = sorted(known.values())
        alike = [rows.pop(layout, []) for layout in layouts]
        if team is not None:
            shares = [
                self._shares(each, layout, team.size) for each, layout in zip(alike, layouts, strict=True)
            ]
            swapped = team.swap(
                [[each[rank] for each in shares] for rank in range(team.size)], "shares of updates"
            )
            alike = [[row for share in parts for row in share] for parts in zip(*swapped, strict=True)]
        values = [self._values(each, team) for each in alike]
        if team is not None:
            values = [cat(parts) for parts in zip(*team.gather(values, "combined shares"), strict=True)]
        total: State = {}
        for layout, value in zip(layouts, values, strict=True):
            for name, shape, place in places_of(layout):
                if name in total:
                    raise ValueError(
                        f"{type(self).__name__} compares whole updates, and clients have sent {name} beside different "
                        "tensors: take CoordinateMedian, which combines each tensor over the clients that have sent it"
                    )
                total[name] = value[place].reshape(shape)
        return total

    def _values(self, rows: list[tuple[str, Tensor]], team: Team | None) -> Tensor:
        """Return the combination of clients' updates at the coordinates of this process."""
        rows.sort(key=lambda row: row[0])
        clients = [client for client, _ in rows]
        self.check(clients)
        # Numbers that are not finite reach an aggregation from Python alone: the loop leaves their clients out.
        with np.errstate(over="ignore", invalid="ignore"):
            updates = np.stack([row.numpy() for _, row in rows])
            return from_numpy(self.combined(updates, clients, lambda values: _sum_up(values, team)))

    def _shares(
        self, rows: Sequence[tuple[str, Tensor]], layout: Layout, processes: int
    ) -> list[list[tuple[str, Tensor]]]:
        """Return the part of clients' updates that each process combines; of whole updates it has whole blocks."""
        size, block = sum(math.prod(shape) for _, shape in layout), BLOCK if self.whole else 1
        blocks = -(-size // block)
        cuts = [min(size, block * (blocks * rank // processes)) for rank in range(processes + 1)]
        return [[(client, row[start:stop]) for client, row in rows] for start, stop in pairwise(cuts)]


def _sum_up(values: np.ndarray, team: Team | None) -> np.ndarray:
    """Return the sums over all coordinates of ``values``, which hold those of this process."""
    # Not torch's or BLAS's sums, whose bits depend on the number of threads.
    blocks = (values[:, start : start + BLOCK] for start in range(0, values.shape[1], BLOCK))
    sums = [block.sum(axis=1).tolist() for block in blocks]  # messages hold no arrays
    everyones = [sums] if team is None else team.gather(sums, "sums over coordinates")
    return np.asarray(sum((np.array(each) for sums in everyones for each in sums), np.zeros(len(values))))


class TrimsCoordinates(KeepsUpdates):
    """Mean of each coordinate without as many of its smallest as of its largest values.

    NaN counts as larger than every number. A subclass says how many values to trim.
    """

    whole = False

    @abstractmethod
    def trimmed(self, num_clients: int) -> int:
        """Return how many values to leave out at each end, fewer than half of the clients."""

    def combined(self, updates: np.ndarray, clients: Sequence[str], sum_up: SumUp) -> np.ndarray:
        trimmed = self.trimmed(len(updates))
        first, *others = np.sort(updates, axis=0)[trimmed : len(updates) - trimmed]
        # NumPy's mean adds in an order that depends on the number of coordinates, which processes have unlike.
        total = first.copy()
        for values in others:
            total += values
        return np.asarray(total / (1 + len(others)) + 0.0)  # -0.0, which sorts as 0.0 does, becomes 0.0


class CoordinateMedian(TrimsCoordinates):
    """Middle value of each coordinate, for an even number of clients the mean of the middle two."""

    def trimmed(self, num_clients: int) -> int:
        return (num_clients - 1) // 2


class TrimmedMean(TrimsCoordinates):
    """Mean of each coordinate without the ``floor(share * n)`` smallest and as many of the largest of n values.

    The paper asks for a whole ``share * n``. With fewer than ``1 / share`` clients nothing is trimmed: this is then the
    mean.

    Args:
        share: of the clients, trimmed from each end, in [0, 0.5).

    Raises:
        ValueError: ``share`` is out of its range.

    Examples:
        >>> import torch
        >>> mean = TrimmedMean(share=0.25)
        >>> for client, value in {"a": 1.0, "b": 3.0, "c": -1e9, "d": 1e9}.items():
        ...     mean.add(Update(client, {"w": torch.tensor([value])}, weight=1.0))
        >>> mean.result()["w"].item()
        2.0
    """

    def __init__(self, share: float = 0.1) -> None:
        if not 0 <= share < 0.5:
            raise ValueError(f"share={share} is trimmed from each end and must be in [0, 0.5)")
        super().__init__()
        self.share = share

    def trimmed(self, num_clients: int) -> int:
        """Return ``floor(share * num_clients)``, and at most so many that one client is left."""
        # 0.29 * 100 is 28.999...: a number that is whole but for the rounding counts as whole.
        return min(math.floor(self.share * num_clients + 1e-9), (num_clients - 1) // 2)
