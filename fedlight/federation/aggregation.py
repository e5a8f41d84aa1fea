"""Robust ways to combine the movements of a round: statistics that a few clients cannot move far.

The order of the clients changes no bit of a result, nor does splitting them: aggregations of parts of a round give a partial
each, which another one merges. Sums are exact (`fedlight.federation.exact_sum`) and their memory does not grow with the
cohort. The coordinate-wise median and the trimmed mean are those of Yin et al., "Byzantine-Robust Distributed Learning:
Towards Optimal Statistical Rates", ICML 2018, https://arxiv.org/abs/1803.01498, definitions 1 and 2; deviations are named at
the classes.
"""

import math
from abc import abstractmethod
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from torch import Tensor, cat, float64, stack, zeros

from fedlight.federation.algorithm import Aggregation
from fedlight.federation.client import State, Update
from fedlight.federation.exact_sum import Team, digest_of, layouts_of_all, places_of
from fedlight.support.checks import Checked


class TrimsCoordinates(Checked, Aggregation):
    """Mean of each coordinate without as many of its smallest as of its largest values.

    The clients count alike, whatever an algorithm's weights. The movements of the cohort stay in memory for the round; of
    several processes each has those of its clients, and a share of the coordinates of all. NaN counts as larger than every
    number. A subclass says how many values to trim.
    """

    def __init__(self) -> None:
        self._movements: dict[str, list[Tensor]] = defaultdict(list)
        self._totals: State | None = None

    @abstractmethod
    def trimmed(self, num_clients: int) -> int:
        """Return how many values to leave out at each end, fewer than half of the clients."""

    def add(self, update: Update) -> None:
        for name, value in update.movement.items():
            self._movements[name].append(value)

    def partial(self) -> dict[str, Any]:
        """Return the movements by name, and start anew."""
        movements, self._movements = self._movements, defaultdict(list)
        return dict(movements)

    def merge(self, partial: Mapping[str, Any]) -> None:
        for name, values in partial.items():
            self._movements[name].extend(values)

    @property
    def sums(self) -> "TrimsCoordinates":
        """This aggregation: processes call its ``add_up``, as they do that of exact sums."""
        return self

    def add_up(self, team: Team) -> None:
        """Have each process combine its share of the coordinates; `result` then is that of all, and `partial` empty.

        For K clients with updates of D bytes, a process that trains k of them, one of N, receives ``(K - k) D / N`` bytes of
        updates. Then it receives ``(N - 1) / N`` of the result.
        """
        movements = self.partial()
        layout = tuple(sorted((name, tuple(values[0].shape)) for name, values in movements.items()))
        known = {digest_of(layout): layout}
        layouts = layouts_of_all(team, known, team.gather([*known], "updates by coordinate"))
        everything = tuple(sorted({entry for layout in layouts.values() for entry in layout}))
        size = sum(math.prod(shape) for _, shape in everything)
        cuts = [size * rank // team.size for rank in range(team.size + 1)]
        shares: list[State] = [{} for _ in range(team.size)]
        for name, _, place in places_of(everything):
            for rank in range(bisect_right(cuts, place.start) - 1, bisect_left(cuts, place.stop)):
                part = slice(max(0, cuts[rank] - place.start), cuts[rank + 1] - place.start)
                if name in movements:
                    shares[rank][name] = stack([value.reshape(-1)[part] for value in movements[name]])
        for share in team.swap(shares, "shares of updates"):
            self.merge(share)
        parts = team.gather(self.result(), "combined shares")
        self._totals = {}
        for name, shape in everything:
            slices = [part[name] for part in parts if name in part]  # none of a tensor without elements
            self._totals[name] = cat(slices).reshape(shape) if slices else zeros(shape, dtype=float64)

    def result(self) -> State:
        total, self._totals = self._totals or {}, None
        for name, values in self.partial().items():
            trimmed, ordered = self.trimmed(len(values)), stack(values).sort(dim=0).values
            first, *others = ordered[trimmed : len(values) - trimmed]
            # Torch's mean adds in an order that depends on the place of a coordinate, which processes have unlike.
            total[name] = first.clone()
            for value in others:
                total[name] += value
            total[name] /= 1 + len(others)
            total[name] += 0.0  # -0.0, which sorts as 0.0 does, becomes 0.0
        return total


class CoordinateMedian(TrimsCoordinates):
    """Middle value of each coordinate, for an even number of clients the mean of the middle two."""

    def trimmed(self, num_clients: int) -> int:
        """Return all but the middle one or two, halved."""
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
