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
from collections.abc import Sequence

import numpy as np

from fedlight.federation.aggregation import KeepsUpdates, SumUp


class ToleratesLiars(KeepsUpdates):
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
                "federated.clients_per_round (of buffered rounds fleet.buffered.buffer_size), lower the share, or take "
                "CoordinateMedian, which works with any number"
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
        >>> from fedlight import Update
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


class GeometricMedian(KeepsUpdates):
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
        >>> from fedlight import Update
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


class FLTrust(KeepsUpdates):
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
        >>> from fedlight import Update
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


def _squared_distances(updates: np.ndarray, sum_up: SumUp) -> np.ndarray:
    """Return the squared distances between updates, ``(clients, clients)``."""
    return np.stack([sum_up(np.square(updates - update)) for update in updates])


def _by_score(distances: np.ndarray, liars: int) -> np.ndarray:
    """Return the updates in the order of Krum's scores, the least first, by their squared distances."""
    others = np.sort(distances, axis=1)[:, 1:]  # its own distance is 0
    scores = others[:, : max(1, len(distances) - liars - 2)].sum(axis=1)
    return np.argsort(scores, kind="stable")  # NaN comes last
