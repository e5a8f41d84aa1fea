"""Aggregations that compare whole updates: Krum, Bulyan, the geometric median and FLTrust.

Robust means of coordinates (`fedlight.federation.aggregation`) do not see an update that is odd as a whole and usual in each
coordinate. With n updates x_i, each as one vector, of which f may be lies:

    Krum       the x_i with the least score, the sum of |x_i - x_j|^2 over the n - f - 2 nearest others;
               Blanchard et al., "Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent", NeurIPS 2017,
               https://arxiv.org/abs/1703.02757, sections 4 and 6 (multi-Krum)
    Bulyan     n - 2 f updates, by Krum again and again; then the mean of each coordinate's n - 4 f nearest to its median;
               El Mhamdi et al., "The Hidden Vulnerability of Distributed Learning in Byzantium", ICML 2018,
               https://arxiv.org/abs/1802.07927, section 4
    RFA        the z with the least sum of |z - x_i|, by the smoothed Weiszfeld algorithm;
               Pillutla et al., "Robust Aggregation for Federated Learning", IEEE TSP 2022,
               https://arxiv.org/abs/1912.13445, algorithm 2
    FLTrust    sum of t_i |x_0| / |x_i| x_i over sum of t_i, with the server's update x_0 and t_i = max(0, cos(x_i, x_0));
               Cao et al., "FLTrust: Byzantine-robust Federated Learning via Trust Bootstrapping", NDSS 2021,
               https://arxiv.org/abs/2012.13995, algorithm 2

Deviations: f is a share of a round's updates, since cohorts differ in size. Clients count alike, whatever an algorithm's
weights, which the paper on RFA has: numbers of examples are claims, and a liar would claim many.

Updates are combined in the order of their clients' ids. Sums are taken block by block in one thread and added in order, so
neither the order of the clients nor the number of processes changes a bit. Each process has a share of the blocks.
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


class ComparesUpdates(Checked, Aggregation):
    """Aggregation that needs all updates of a round at once, each as one vector.

    Updates of other tensors, such as those of another selector of FedBiscuit, are combined apart.
    """

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
        """Return the updates with their clients, and start anew."""
        updates, self._updates = self._updates, []
        return {"updates": updates}

    def merge(self, partial: Mapping[str, Any]) -> None:
        self._updates.extend((client, movement) for client, movement in partial["updates"])

    @property
    def sums(self) -> "ComparesUpdates":
        """This aggregation: processes call its ``add_up``, as they do that of exact sums."""
        return self

    def add_up(self, team: Team) -> None:
        """Have each process combine its share of the coordinates; `result` then is that of all, and `partial` empty.

        A process receives as much as under `fedlight.federation.aggregation.TrimsCoordinates.add_up`, and the sums.
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
        alike: dict[Layout, list[tuple[str, Tensor]]] = defaultdict(list)
        for client, movement in self.partial()["updates"]:
            layout = tuple((name, tuple(movement[name].shape)) for name in sorted(movement))
            alike[layout].append((client, _vector(movement, layout)))
        layouts = {digest_of(layout): layout for layout in alike}
        if team is not None:
            layouts = layouts_of_all(team, layouts, team.gather([*layouts], "whole updates"))
        total: State = {}
        for layout in sorted(layouts.values()):
            rows = alike.pop(layout, [])
            if team is not None:
                rows = [
                    row
                    for share in team.swap(_shares(rows, layout, team.size), "shares of updates")
                    for row in share
                ]
            rows.sort(key=lambda row: row[0])
            clients = [client for client, _ in rows]
            self.check(clients)
            # Numbers that are not finite reach an aggregation from Python alone: the loop leaves their clients out.
            with np.errstate(over="ignore", invalid="ignore"):
                updates = np.stack([row.numpy() for _, row in rows])
                values = from_numpy(self.combined(updates, clients, lambda each: _sum_up(each, team)))
            if team is not None:
                values = cat(team.gather(values, "combined shares"))
            for name, shape, place in places_of(layout):
                if name in total:
                    raise ValueError(
                        f"{type(self).__name__} compares whole updates, and clients have sent {name} beside different "
                        "tensors: take CoordinateMedian, which combines each tensor over the clients that have sent it"
                    )
                total[name] = values[place].reshape(shape)
        return total


class ToleratesLiars(ComparesUpdates):
    """Aggregation for at most f = ``floor(share * n)`` liars among n updates, which n has to be large enough for.

    Args:
        share: largest share of liars.
        factor: what f is multiplied by in the least number of updates, ``factor * f + 3``.
    """

    def __init__(self, share: float, factor: int) -> None:
        if not 0 <= share < 1 / factor:
            raise ValueError(
                f"{type(self).__name__}: share={share} of liars must be in [0, {1 / factor}), as it needs "
                f"{factor} f + 3 updates for f liars"
            )
        super().__init__()
        self.share, self._factor = share, factor

    def most_liars(self, number: int) -> int:
        """Return f of so many updates."""
        return math.floor(self.share * number + 1e-9)  # 0.29 * 100 is 28.999...

    def check(self, clients: Sequence[str]) -> None:
        number = len(clients)
        liars = self.most_liars(number)
        if number < self._factor * liars + 3:
            raise ValueError(
                f"{type(self).__name__} needs {self._factor} f + 3 = {self._factor * liars + 3} updates in a round for the "
                f"f = {liars} liars that aggregation.share={self.share} allows for, and this round has {number}: raise "
                "federated.clients_per_round, lower the share, or take CoordinateMedian, which works with any number"
            )


class Krum(ToleratesLiars):
    """Krum: the one update that has the nearest neighbours. Multi-Krum: the mean of the n - f - 2 such updates.

    It holds for f liars among n >= 2 f + 3 updates, so for nearly half of them. One update is a noisy mean: multi-Krum
    learns faster, and n - f - 2 is the most for which its paper's bound holds. Of equal scores the first client's wins.

    Args:
        share: largest share of liars, in [0, 0.5).
        multi: whether it is multi-Krum.

    Raises:
        ValueError: ``share`` is out of its range; in ``result``, for fewer updates than ``2 f + 3``.

    Examples:
        >>> import torch
        >>> krum = Krum(share=0.2)
        >>> for client, value in {"a": 1.0, "b": 2.0, "c": 2.5, "d": 4.0, "e": -1e9}.items():
        ...     krum.add(Update(client, {"w": torch.tensor([value])}, weight=1.0))
        >>> krum.result()["w"].item()
        2.0
    """

    def __init__(self, share: float = 0.2, multi: bool = False) -> None:
        super().__init__(share, factor=2)
        self.multi = multi

    def combined(self, updates: np.ndarray, clients: Sequence[str], sum_up: SumUp) -> np.ndarray:
        liars = self.most_liars(len(updates))
        best = _by_score(_squared_distances(updates, sum_up), liars)
        kept = best[: len(updates) - liars - 2] if self.multi else best[:1]
        return np.asarray(updates[np.sort(kept)].mean(axis=0))


class Bulyan(ToleratesLiars):
    """Bulyan over Krum: of each coordinate the mean of the n - 4 f values nearest to the median of n - 2 f updates.

    It holds for f liars among n >= 4 f + 3 updates, so for nearly a quarter of them. Krum's choice may be far off in a
    single coordinate among many; a mean near the median is not. The last choices are from fewer than ``2 f + 3`` updates,
    where a score is over one neighbour at least.

    Args:
        share: largest share of liars, in [0, 0.25).

    Raises:
        ValueError: ``share`` is out of its range; in ``result``, for fewer updates than ``4 f + 3``.
    """

    def __init__(self, share: float = 0.2) -> None:
        super().__init__(share, factor=4)

    def combined(self, updates: np.ndarray, clients: Sequence[str], sum_up: SumUp) -> np.ndarray:
        liars = self.most_liars(len(updates))
        distances, left = _squared_distances(updates, sum_up), [*range(len(updates))]
        chosen = [left.pop(_by_score(distances[np.ix_(left, left)], liars)[0]) for _ in updates[2 * liars :]]
        values = np.sort(updates[chosen], axis=0)  # so that ties do not depend on the clients
        order = np.argsort(np.abs(values - np.median(values, axis=0)), axis=0, kind="stable")
        return np.asarray(np.take_along_axis(values, order[: len(updates) - 4 * liars], axis=0).mean(axis=0))


class GeometricMedian(ComparesUpdates):
    """RFA: the point with the least sum of distances to the updates; liars do not move it far while fewer than half lie.

    Each step is a mean with the weights ``1 / max(smoothing, |z - x_i|)``. The first is from the coordinate-wise median: a
    mean, as in the paper, may be so far away that all steps are needed to come back. The last is the one that lowers the
    sum of distances by less than a share of 1e-12.

    Args:
        smoothing: distances below it count as it, above 0; the paper's nu.
        steps: most steps, at least 1.

    Raises:
        ValueError: a setting is out of its range.

    Examples:
        >>> import torch
        >>> median = GeometricMedian()
        >>> for client, value in {"a": [0.0, 0.0], "b": [2.0, 0.0], "c": [1.0, 1.0], "d": [1.0, -9.0]}.items():
        ...     median.add(Update(client, {"w": torch.tensor(value)}, weight=1.0))
        >>> [round(value, 3) + 0.0 for value in median.result()["w"].tolist()]
        [1.0, 0.0]
    """

    def __init__(self, smoothing: float = 1e-6, steps: int = 100) -> None:
        if not 0 < smoothing < math.inf or steps < 1:
            raise ValueError(f"smoothing={smoothing} must be above 0, and steps={steps} at least 1")
        super().__init__()
        self.smoothing, self.steps = smoothing, steps

    def combined(self, updates: np.ndarray, clients: Sequence[str], sum_up: SumUp) -> np.ndarray:
        point, before = np.median(updates, axis=0), math.inf
        for _ in range(self.steps):
            distances = np.sqrt(sum_up(np.square(updates - point)))
            if not distances.sum() < before * (1 - 1e-12):
                break
            before = distances.sum()
            weights = 1 / np.maximum(self.smoothing, distances)
            point = (weights[:, None] * updates).sum(axis=0) / weights.sum()
        return np.asarray(point)


class FLTrust(ComparesUpdates):
    """FLTrust: updates count by how far they point where the server's own update points, all with its length.

    The server's update is that of one client, which holds rows that the server trusts and is in every round. It gives the
    direction and does not count itself. Any number of the other clients may lie. With rows of another kind than the
    clients', the server also distrusts honest ones. Where nobody is trusted, the model stays as it is.

    Args:
        root: id of the client with the server's rows.

    Raises:
        ValueError: before the first round, ``root`` would not be in every round; in ``result``, it is missing or alone.

    Examples:
        >>> import torch
        >>> trust = FLTrust(root="server")
        >>> for client, value in {"server": [1.0, 0.0], "a": [3.0, 4.0], "liar": [-9.0, 0.0]}.items():
        ...     trust.add(Update(client, {"w": torch.tensor(value)}, weight=1.0))
        >>> [round(value, 6) for value in trust.result()["w"].tolist()]
        [0.6, 0.8]
    """

    def __init__(self, root: str) -> None:
        super().__init__()
        self.root = root

    def check(self, clients: Sequence[str]) -> None:
        if self.root not in clients or len(clients) < 2:
            raise ValueError(
                f"FLTrust compares updates with that of aggregation.root={self.root!r} in every round, and some would lack "
                "it, or others: set root to the client with the server's rows and federated.clients_per_round to all "
                "clients, without groups of clients; or take Krum"
            )

    def combined(self, updates: np.ndarray, clients: Sequence[str], sum_up: SumUp) -> np.ndarray:
        place = clients.index(self.root)
        lengths = np.sqrt(sum_up(np.square(updates)))
        units = updates / np.where(lengths > 0, lengths, 1.0)[:, None]
        trust = np.maximum(0.0, sum_up(units * units[place]))
        # An update that is not finite is no direction.
        trust[~np.isfinite(trust)], units[~np.isfinite(lengths)] = 0.0, 0.0
        lengths[~np.isfinite(lengths)] = 0.0
        trust[place] = 0.0
        total = trust.sum()
        return np.asarray(lengths[place] * (trust[:, None] * units).sum(axis=0) / (total if total else 1.0))


def _vector(movement: Mapping[str, Tensor], layout: Layout) -> Tensor:
    return cat([movement[name].detach().double().cpu().reshape(-1) for name, _ in layout])


def _shares(
    rows: Sequence[tuple[str, Tensor]], layout: Layout, processes: int
) -> list[list[tuple[str, Tensor]]]:
    """Return the part of clients' updates that each process combines, of whole blocks."""
    size = sum(math.prod(shape) for _, shape in layout)
    blocks = -(-size // BLOCK)
    cuts = [min(size, BLOCK * (blocks * rank // processes)) for rank in range(processes + 1)]
    return [[(client, row[start:stop]) for client, row in rows] for start, stop in pairwise(cuts)]


def _sum_up(values: np.ndarray, team: Team | None) -> np.ndarray:
    """Return the sums over all coordinates of ``values``, which hold those of this process."""
    # Not torch's or BLAS's sums, whose bits depend on the number of threads.
    blocks = (values[:, start : start + BLOCK] for start in range(0, values.shape[1], BLOCK))
    sums = [block.sum(axis=1).tolist() for block in blocks]  # messages hold no arrays
    everyones = [sums] if team is None else team.gather(sums, "sums over coordinates")
    return np.asarray(sum((np.array(each) for sums in everyones for each in sums), np.zeros(len(values))))


def _squared_distances(updates: np.ndarray, sum_up: SumUp) -> np.ndarray:
    """Return the squared distances between updates, ``(clients, clients)``."""
    return np.stack([sum_up(np.square(updates - update)) for update in updates])


def _by_score(distances: np.ndarray, liars: int) -> np.ndarray:
    """Return the updates in the order of Krum's scores, the least first, by their squared distances."""
    others = np.sort(distances, axis=1)[:, 1:]  # its own distance is 0
    scores = others[:, : max(1, len(distances) - liars - 2)].sum(axis=1)
    return np.argsort(scores, kind="stable")  # NaN comes last
