"""Differential privacy of clients: clipping, Gaussian noise, and the epsilon that follows.

Central: McMahan et al., "Learning Differentially Private Recurrent Language Models", ICLR 2018,
https://arxiv.org/abs/1710.06963, algorithm 1: the server clips each movement to norm S and adds noise to their mean. Here
the mean is over the clients that sent the tensor, not over the expected number, and cohorts have a fixed size. Local: the
client clips and adds the noise itself, so the server need not be trusted.

All data of one client are protected: neighbouring federations have the same number of clients, and one client holds
different data. Its clipped movement can then turn from S to -S, so a sum moves by up to 2 S: that is the sensitivity, and
the ``noise_multiplier``, which is noise over S, counts half. Epsilon is computed by Google's dp-accounting. It holds for
movements alone. It does not cover reported losses and numbers of examples, nor other decisions of an algorithm from the
data, such as which adapter a client trains; and noise in floating point is not exactly Gaussian. It does not cover
participation where devices decide it: with a deadline, over-selection or a device's memory, participation depends on the
length of clients' texts, so one client's data can push another out of a round, and more than one movement changes.
"""

import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedlight.federation.algorithm import Aggregation
from fedlight.federation.client import State, Update
from fedlight.federation.codecs import Codec, Side
from fedlight.federation.exact_sum import ExactSums
from fedlight.support.checks import Checked, check_range, refuse_below

DELTA = 1e-5
ROUNDING = 1e-14
"""Part of delta for rounding errors in composing the losses of a round."""
CLIP_RATE = 0.2
"""Rate with which a clipping norm follows the norms of the movements."""
CLIP_SHARE = 0.05
"""Share of the privacy budget for counting the movements within the clipping norm."""
TAIL = 1e-15
"""Probability of losses that are counted as infinite when unlike rounds are composed."""
LEAST_UNITS = 64
"""Least noise of a client that shares it with others, in units of the grid that its numbers lie on."""
MISSING = "privacy needs the accountant dp-accounting: pip install 'fedlight[privacy]'"


Numbers = NDArray[np.float64]
Rounds = Iterable[tuple[int, int]] | Mapping[tuple[int, int], int]
"""Clients sampled and number of clients of each round; or the number of rounds with each such pair."""


class Private:
    """Part of a run with an epsilon: movements clipped to ``clip_norm``, and Gaussian noise.

    Attributes:
        bounded: what ``clip_norm`` bounds.
        secret_sampling: whether the participation in a round is unknown to the observers.
        epsilon: epsilon that no run exceeds; None where ``noise_multiplier`` is given.
        clip_quantile: quantile of the movements' norms that the clipping norm follows; None where it stays.
        norm: clipping norm of the next round.
        bands: number of rounds whose noises are correlated; None where clients do not take part in turn.
        earlier: name -> noises of the last rounds over their deviation, newest first, on which the next one depends.
    """

    bounded = "a client's movement"
    secret_sampling = False
    clip_quantile: float | None = None
    bands: int | None = None
    _is_secret = False

    def __init__(
        self,
        clip_norm: float,
        noise_multiplier: float | None = None,
        delta: float = DELTA,
        epsilon: float | None = None,
    ) -> None:
        if not 0 < clip_norm < math.inf:
            raise ValueError(f"clip_norm={clip_norm} bounds the norm of {self.bounded} and must be above 0")
        if (noise_multiplier is None) == (epsilon is None):
            raise ValueError(
                f"{type(self).__name__} has noise_multiplier={noise_multiplier} and epsilon={epsilon}: give one of them; "
                "the noise for the planned rounds follows from an epsilon such as 4.0"
            )
        if noise_multiplier is not None and not 0 <= noise_multiplier < math.inf:
            raise ValueError(
                f"noise_multiplier={noise_multiplier} is noise over clip_norm and must be at least 0; 0 adds none"
            )
        if epsilon is not None and not 0 < epsilon < math.inf:
            raise ValueError(f"epsilon={epsilon} must be above 0; below 10 it promises something")
        _check_delta(delta)
        self.clip_norm, self.delta, self.epsilon = clip_norm, delta, epsilon
        self.noise_multiplier = self._noise = noise_multiplier
        self.norm = clip_norm
        self.earlier: dict[str, list[Tensor]] = {}

    def check_delta(self, most: int, whose: str, given: str) -> None:
        """Raise ValueError unless delta < 1 / ``most``, the number of those that are protected."""
        if self.delta * most >= 1:
            raise ValueError(
                f"{type(self).__name__}: delta={self.delta:g} is not below one over the {most:,} {whose}, so that giving "
                f"away {given} would count as private: set it to {0.1 / most:.0e} or less"
            )

    @property
    def noise(self) -> float:
        """Standard deviation of the noise over ``clip_norm``; with an epsilon a run sets it."""
        if self._noise is None:
            raise ValueError(
                f"{type(self).__name__}: a run sets the noise for epsilon={self.epsilon}; elsewhere give noise_multiplier"
            )
        return self._noise

    @noise.setter
    def noise(self, value: float) -> None:
        self._noise = value

    def keep_secret(self) -> None:
        """Draw all noise from the operating system from now on: no seed reveals it, and no run repeats it."""
        self._is_secret = True

    def _normal(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        if self._is_secret:
            return secret_normal(shape.numel()).reshape(shape).to(dtype)
        return torch.randn(shape, dtype=dtype)

    def spent(self, rounds: Rounds) -> float:
        """Return epsilon at ``delta`` after these rounds, towards an observer of every round's model.

        Without secret sampling the observer may know the cohorts, and epsilon is that of a client in all these rounds.

        Raises:
            ValueError: a round is out of its range.
            ModuleNotFoundError: dp-accounting is missing.
        """
        return self._spent(self.noise, Counter(rounds))

    def _spent(self, noise: float, rounds: Counter[tuple[int, int]]) -> float:
        if self.secret_sampling:
            return sampled_epsilon(noise, self.delta, rounds)
        return gaussian_epsilon(noise, self.delta, rounds.total())

    def noise_for(self, rounds: Rounds) -> float:
        """Return the least noise, within 1 in 10,000, with which ``epsilon`` is not exceeded after these rounds."""
        assert self.epsilon is not None
        counts, enough = +Counter(rounds), 1.0
        if not counts:
            raise ValueError(
                f"epsilon={self.epsilon:g} needs no noise for no rounds: raise trainer.max_epochs"
            )
        while self._spent(enough, counts) > self.epsilon:
            enough *= 2
        too_little = enough / 2
        while self._spent(too_little, counts) <= self.epsilon:
            enough, too_little = too_little, too_little / 2
        while enough - too_little > 1e-4 * enough:
            middle = (enough + too_little) / 2
            if self._spent(middle, counts) <= self.epsilon:
                enough = middle
            else:
                too_little = middle
        return enough


class PrivateMean(Checked, Private, Aggregation):
    """Mean of clipped movements plus Gaussian noise (central privacy).

    All clients have the same weight, whatever the algorithm's weighting. In the emulator the noise comes from torch's global
    stream, which the loop seeds for each round, so that the seed reveals it; in a deployment from the operating system.

    With a ``clip_quantile`` gamma, the clipping norm C follows that quantile of the movements' norms: Andrew et al.,
    "Differentially Private Learning with Adaptive Clipping", NeurIPS 2021, https://arxiv.org/abs/1905.03871, algorithm 1.
    With b of n movements within C, C becomes ``C * exp(-CLIP_RATE * ((b + noise) / n - gamma))`` after each round. One
    replaced client changes b by 1 and the sum by 2 C, so with the noise multiplier z the sum has z_sum and b has s_b,
    ``1 / z**2 = 1 / z_sum**2 + 1 / (2 * s_b)**2``, theorem 1. The paper sets s_b; here b has ``CLIP_SHARE`` of 1 / z**2.

    With ``bands`` b the observers may know the cohorts: clients take part in turn (`cohort_in_turn`), and the noises of b
    rounds cancel in part. A sum has the noise ``w_t = z_t - c_1 w_(t-1) - ... - c_(b-1) w_(t-b+1)``, with independent z_t
    and the `root_coefficients` c. It is that of prefix sums factored as B C, with the Toeplitz matrix C of the diagonals c:
    Kalinin and Lampert, "Banded Square Root Matrix Factorization for Differentially Private Model Training", NeurIPS 2024,
    https://arxiv.org/abs/2405.13763. Columns of rounds that are b apart do not overlap, so a client of k rounds moves C x by
    up to ``2 S |c| sqrt(k)``: Choquette-Choo et al., "(Amplified) Banded Matrix Factorization", NeurIPS 2023,
    https://arxiv.org/abs/2306.08153. `spent` takes these k rounds. The noise of a tensor that no client sends is drawn, too.

    Args:
        clip_norm: largest L2 norm of a client's whole movement, all tensors together, above 0; with a ``clip_quantile`` that
            of the first round.
        noise_multiplier: standard deviation of the noise in the sum over ``clip_norm``, at least 0; in the mean over n
            clients it is ``noise_multiplier * clip_norm / n`` for each coordinate.
        secret_sampling: whether participation in a round is known to the server alone; it makes epsilon smaller.
        delta: chance that the logged epsilon does not hold, above 0 and below one over the number of clients.
        epsilon: largest epsilon of a run, instead of ``noise_multiplier``: the noise follows for the planned rounds, and the
            run ends before a round that would exceed it.
        clip_quantile: share in (0, 1) of the movements whose norms the clipping norm exceeds in the long run; None keeps it.
        bands: None for cohorts by lot; else clients take part in turn, whatever ``secret_sampling``, and so many rounds have
            correlated noise, from 1, which is independent noise, to the rounds between two of a client. The
            ``noise_multiplier`` is that of z.

    Raises:
        ValueError: a value is out of its range, not one of ``noise_multiplier`` and ``epsilon`` is given, or ``bands``
            beside a ``clip_quantile``, under which rounds have unlike sensitivities.

    Examples:
        >>> mean = PrivateMean(clip_norm=5.0, noise_multiplier=0.0)
        >>> mean.add(Update("a", {"w": torch.tensor([6.0, 8.0])}, weight=1.0))
        >>> mean.add(Update("b", {"w": torch.tensor([0.0, 1.0])}, weight=9.0))
        >>> mean.result()["w"].tolist()
        [1.5, 2.5]
    """

    def __init__(
        self,
        clip_norm: float,
        noise_multiplier: float | None = None,
        secret_sampling: bool = True,
        delta: float = DELTA,
        epsilon: float | None = None,
        clip_quantile: float | None = None,
        bands: int | None = None,
    ) -> None:
        super().__init__(clip_norm, noise_multiplier, delta, epsilon)
        if clip_quantile is not None and not 0 < clip_quantile < 1:
            raise ValueError(
                f"clip_quantile={clip_quantile} is a share of the movements and must be in (0, 1)"
            )
        refuse_below(1, bands=bands)
        if bands is not None and clip_quantile is not None:
            raise ValueError(
                f"bands={bands} needs one clipping norm for all rounds: leave clip_quantile={clip_quantile} out"
            )
        self.in_turn, self.bands = bands is not None, bands
        self.secret_sampling, self.clip_quantile = secret_sampling and not self.in_turn, clip_quantile
        self._coefficients = root_coefficients(bands or 1)
        self.sums = ExactSums()
        self._senders: Counter[str] = Counter()
        self._clients: set[str] = set()
        self._within = 0

    def add(self, update: Update) -> None:
        """Add the clipped movement.

        Raises:
            ValueError: the movement is not finite, or the client's second one of this round, which the noise would not hide.
        """
        self._take_clients([update.client_id])
        movement = update.movement
        scale = _clipping(list(movement.values()), self.norm, f"the movement of client {update.client_id!r}")
        self._within += scale == 1
        self._senders.update(movement.keys())
        self.sums.add(movement, scale)

    def partial(self) -> dict[str, Any]:
        """Return the sum of clipped movements, without noise, and who sent them; start anew."""
        senders, clients, within = self._senders, self._clients, self._within
        self._senders, self._clients, self._within = Counter(), set(), 0
        sums = self.sums.partial()
        return {"sums": sums, "senders": dict(senders), "clients": sorted(clients), "within": within}

    def merge(self, partial: Mapping[str, Any]) -> None:
        """Add the clipped movements of another partial; raise ValueError if a client has sent an update to both."""
        self._take_clients(partial["clients"])
        self._senders.update(partial["senders"])
        self._within += partial["within"]
        self.sums.merge(partial["sums"])

    def result(self) -> State:
        """Return the mean of each tensor over the clients that sent it, with noise, and start anew."""
        total, senders, clients, within = self.sums.result(), self._senders, len(self._clients), self._within
        self._senders, self._clients, self._within = Counter(), set(), 0
        deviation = self.noise * self.norm
        if self.clip_quantile is not None:
            deviation /= math.sqrt(1 - CLIP_SHARE)
        # In the order of names, so that noise does not depend on the order of clients.
        for name in sorted({*total, *self.earlier}):
            noise = self._next_noise(name, (total[name] if name in total else self.earlier[name][0]).shape)
            if name in total:
                total[name].add_(noise, alpha=deviation).div_(senders[name])
        if self.clip_quantile is not None and clients:
            drawn = self._normal(torch.Size(), torch.float64).item()
            counted = within + self.noise / (2 * math.sqrt(CLIP_SHARE)) * drawn
            # A share, or much noise on few clients would carry the norm away; this costs no privacy.
            share = min(1.0, max(0.0, counted / clients))
            self.norm *= math.exp(-CLIP_RATE * (share - self.clip_quantile))
        return total

    def _next_noise(self, name: str, shape: torch.Size) -> Tensor:
        """Return the noise of a tensor over its deviation, and keep it for the rounds that depend on it."""
        noise, earlier = self._normal(shape, torch.float64), self.earlier.get(name, [])
        for coefficient, before in zip(self._coefficients[1:].tolist(), earlier, strict=False):
            noise -= coefficient * before
        if len(self._coefficients) > 1:
            self.earlier[name] = [noise, *earlier][: len(self._coefficients) - 1]
        return noise

    def _spent(self, noise: float, rounds: Counter[tuple[int, int]]) -> float:
        if self.bands is None:
            return super()._spent(noise, rounds)
        return gaussian_epsilon(noise / float(np.linalg.norm(self._coefficients)), self.delta, rounds.total())

    def _take_clients(self, client_ids: Sequence[str]) -> None:
        for client_id in client_ids:
            if client_id in self._clients:
                raise ValueError(
                    f"PrivateMean: client {client_id!r} sent a second update in one round, and its noise hides one: "
                    "take an algorithm with one visit per client"
                )
        self._clients.update(client_ids)


class ClipAndNoise(Private, Codec):
    """Codec that clips a client's whole movement and adds Gaussian noise before anything is sent (local privacy).

    It must be the first codec of a chain, so that later ones work on private values. In the emulator the noise comes from
    torch's global stream, which the loop seeds for each visit; on a node of a deployment from the operating system, and the
    server cannot reproduce it.

    With ``shared_by`` above 1 the clients of a round make the noise of their sum together, for a server that sees the sum
    alone (secure aggregation): Kairouz, Liu and Steinke, "The Distributed Discrete Gaussian Mechanism for Federated Learning
    with Secure Aggregation", ICML 2021, https://arxiv.org/abs/2102.06387. A client's movement is cut to whole multiples of a
    unit, towards zero, so that its norm does not grow, and its noise is a `discrete_normal` of them. Both are exact in fp32,
    and their sum in the ring. By theorem 1 the sum has rho-concentrated privacy with rho = 2 / ``noise_multiplier``^2, up to
    a term that is below 1e-10000 where a client's noise has `LEAST_UNITS` units.

    Args:
        clip_norm: largest L2 norm of the whole movement, all tensors together, above 0.
        noise_multiplier: standard deviation of each coordinate's noise over ``clip_norm``, at least 0.
        delta: chance that the logged epsilon does not hold, above 0 and below one over the number of clients.
        epsilon: largest epsilon of a run, instead of ``noise_multiplier``: the noise follows for the planned rounds, and the
            run ends before a round that would exceed it.
        shared_by: clients whose noise together has ``noise_multiplier``; each adds the root of ``shared_by`` times less. A
            round of fewer moves nothing. In a deployment as many nodes have to take part.

    Raises:
        ValueError: a value is out of its range, or not one of ``noise_multiplier`` and ``epsilon`` is given.

    Examples:
        >>> ClipAndNoise(clip_norm=5.0, noise_multiplier=0.0).encode(torch.tensor([6.0, 8.0]), [2])
        (tensor([3., 4.]), {})
    """

    movements_only = True

    def __init__(
        self,
        clip_norm: float,
        noise_multiplier: float | None = None,
        delta: float = DELTA,
        epsilon: float | None = None,
        shared_by: int = 1,
    ) -> None:
        super().__init__(clip_norm, noise_multiplier, delta, epsilon)
        if shared_by < 1:
            raise ValueError(f"shared_by={shared_by} is a number of clients and must be at least 1")
        self.shared_by = shared_by

    def encode(self, values: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Side]:
        scale = _clipping([values], self.clip_norm, "the movement")
        if self.shared_by > 1:
            return self._on_grid(values.double() * scale), {}
        noise = self._normal(values.shape, torch.float32)
        return (values * scale).add_(noise, alpha=self.noise * self.clip_norm), {}

    def decode(self, values: Tensor, side: Mapping[str, Tensor], sizes: Sequence[int]) -> Tensor:
        """Return the values as they are: neither clipping nor noise can be undone."""
        return values

    def _on_grid(self, clipped: Tensor) -> Tensor:
        """Return a client's part of the sum, fp32: clipped values and noise as multiples of one unit."""
        deviation = self.noise * self.clip_norm / math.sqrt(self.shared_by)
        unit = 2.0 ** math.ceil(math.log2((self.clip_norm + 12 * deviation) / 2**23))  # fp32 has 24 bits
        if 0 < deviation < LEAST_UNITS * unit:
            raise ValueError(
                f"ClipAndNoise: noise_multiplier={self.noise:g} shared by {self.shared_by:,} clients is too little to be "
                "exact: raise it, or lower shared_by"
            )
        uniform = secret_uniform if self._is_secret else _seeded_uniform
        noise = torch.from_numpy(discrete_normal(deviation / unit, clipped.numel(), uniform))
        return ((clipped / unit).trunc_().add_(noise) * unit).float()

    def _spent(self, noise: float, rounds: Counter[tuple[int, int]]) -> float:
        if self.shared_by == 1:
            return super()._spent(noise, rounds)
        return concentrated_epsilon(2 / noise**2 * rounds.total() if noise else math.inf, self.delta)


def root_coefficients(number: int) -> Numbers:
    """Return the first coefficients of ``(1 - x) ** -0.5``, ``(number,)`` fp64: those of a root of the prefix sums.

    Examples:
        >>> root_coefficients(4).tolist()
        [1.0, 0.5, 0.375, 0.3125]
    """
    places = np.arange(1, number)
    return np.cumprod([1.0, *(2 * places - 1) / (2 * places)])


def discrete_normal(deviation: float, size: int, uniform: Callable[[int], Numbers]) -> Numbers:
    """Return independent whole numbers, each x as likely as ``exp(-x^2 / (2 deviation^2))`` says, ``(size,)`` fp64.

    Canonne, Kamath and Steinke, "The Discrete Gaussian for Differential Privacy", NeurIPS 2020,
    https://arxiv.org/abs/2004.00010, algorithms 2 and 3: candidates of a discrete Laplace distribution, of which some are
    kept. Its scale is a power of two, so that part of a candidate is a uniform whole number. The choice to keep is in fp64:
    within five deviations a probability is right to a share of 1e-12.

    Args:
        deviation: scale, about the standard deviation, in units, at least 0.
        size: how many.
        uniform: returns so many independent numbers in (0, 1).
    """
    numbers, scale = np.zeros(size), 2.0 ** max(0, math.ceil(math.log2(deviation or 1.0)))
    open_places = np.arange(size if deviation else 0)
    while open_places.size:
        low, high, sign, keep = uniform(4 * open_places.size).reshape(4, -1)
        rest = np.floor(scale * low)
        magnitude, negative = rest + scale * np.floor(-np.log(high)), sign < 0.5
        least = np.exp(-rest / scale - (magnitude - deviation**2 / scale) ** 2 / (2 * deviation**2))
        kept = (keep < least) & ~(negative & (magnitude == 0))  # zero has one sign
        numbers[open_places[kept]] = np.where(negative, -magnitude, magnitude)[kept]
        open_places = open_places[~kept]
    return numbers


def secret_uniform(size: int) -> Numbers:
    """Return independent numbers in (0, 1) of the operating system's entropy, ``(size,)`` fp64.

    A torch generator has 32 bits of seed, which can be tried out.
    """
    bits = np.frombuffer(os.urandom(8 * size), np.uint64)
    return np.asarray(((bits >> np.uint64(12)) + 0.5) / 2**52)


def _seeded_uniform(size: int) -> Numbers:
    return np.asarray(torch.rand(size, dtype=torch.float64).clamp_(min=2.0**-54).numpy())


def secret_normal(size: int) -> Tensor:
    """Return independent standard normal numbers of the operating system's entropy, ``(size,)`` fp64.

    Box and Muller, "A Note on the Generation of Random Normal Deviates", 1958, https://doi.org/10.1214/aoms/1177706645.
    """
    uniform = secret_uniform(2 * math.ceil(size / 2)).reshape(2, -1)
    radius, angle = np.sqrt(-2 * np.log(uniform[0])), 2 * np.pi * uniform[1]
    return torch.from_numpy(np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:size])


def concentrated_epsilon(rho: float, delta: float) -> float:
    """Return epsilon at ``delta`` of ``rho``-concentrated differential privacy (zCDP), the least over its Renyi orders.

    Canonne, Kamath and Steinke 2020 (see `discrete_normal`), proposition 12; Bun and Steinke, "Concentrated Differential
    Privacy", TCC 2016, https://arxiv.org/abs/1605.02065.

    Examples:
        >>> round(concentrated_epsilon(0.5, 1e-5), 2)
        4.73
    """
    _check_delta(delta)
    if not rho:
        return 0.0
    above = np.geomspace(1e-4, 1e8, 20_001)  # order - 1
    order = above + 1
    bound = order * rho + np.log(above / order) - (math.log(delta) + np.log(order)) / above
    return max(0.0, float(bound.min()))


def gaussian_epsilon(noise_multiplier: float, delta: float, times: int) -> float:
    """Return the exact epsilon at ``delta`` of a client whose clipped movement was summed with noise ``times`` times.

    Balle and Wang, "Improving the Gaussian Mechanism for Differential Privacy", ICML 2018, https://arxiv.org/abs/1805.06530.
    The ``noise_multiplier`` is the standard deviation of the noise over the clipping norm, at least 0.

    Raises:
        ValueError: ``delta`` is not in (0, 1), or the noise is not at least 0.
        ModuleNotFoundError: dp-accounting is missing.
    """
    _check_delta(delta)
    check_range("noise_multiplier", noise_multiplier, 0, math.inf)
    try:
        from dp_accounting import get_epsilon_gaussian
    except ImportError as error:
        raise ModuleNotFoundError(MISSING) from error
    if not times:
        return 0.0
    # Half, because the sensitivity is 2 S; several sums equal one with the noise over the root of their number.
    return float(get_epsilon_gaussian(noise_multiplier / 2 / math.sqrt(times), delta))


def sampled_epsilon(noise_multiplier: float, delta: float, rounds: Rounds) -> float:
    """Return an upper bound of epsilon at ``delta`` when clients are sampled uniformly, without replacement and in secret.

    Each round has a dominating pair for one client's data replaced, sensitivity 2 S: `_profile`. The pairs are composed as
    privacy loss distributions: Zhu, Dong and Wang, "Optimal Accounting of Differential Privacy via Characteristic Function",
    AISTATS 2022, https://arxiv.org/abs/2106.08567. Each is discretized to a distribution that dominates it: Doroshenko et
    al., "Connect the Dots: Tighter Discrete Approximations of Privacy Loss Distributions", PoPETs 2022,
    https://arxiv.org/abs/2207.04380, as computed by dp-accounting. The result is never more than `gaussian_epsilon`, and is
    that where delta is below 1e-14 for each round. Sampled clients that dropped out count as sampled.

    Raises:
        ValueError: ``delta`` is out of its range, or more clients are sampled than there are.
        ModuleNotFoundError: dp-accounting is missing.

    Examples:
        >>> round(sampled_epsilon(2.0, 1e-5, [(10, 1000)] * 100), 2), round(gaussian_epsilon(2.0, 1e-5, times=100), 1)
        (0.77, 91.8)
    """
    counts = Counter(rounds)
    without_secret = gaussian_epsilon(noise_multiplier, delta, counts.total())
    for sampled, clients in counts:
        if not 0 < sampled <= clients:
            raise ValueError(f"a round of {sampled} sampled clients out of {clients} cannot be")
    if not counts or not noise_multiplier:
        return without_secret
    # Discretized, the bound may lie slightly above the exact value without secret sampling.
    return min(without_secret, _composed(noise_multiplier, delta, tuple(sorted(counts.items()))))


@lru_cache(maxsize=16)  # one takes 20 ms, and a run with a budget asks three times for the same
def _composed(
    noise_multiplier: float, delta: float, counts: tuple[tuple[tuple[int, int], int], ...]
) -> float:
    """Return epsilon after ``counts`` of rounds with noise; infinite where the grid is too coarse for it."""
    shares: Counter[float] = Counter()
    for (sampled, clients), times in counts:
        shares[sampled / clients] += times
    # Rounding errors of one composition are far below this; what remains of delta is for the mechanism.
    least_delta = delta - ROUNDING * shares.total()
    step = max(_grid(noise_multiplier, share)[1] for share in shares)
    if least_delta <= 0 or step > 1:  # with such a step a round loses hundreds, and sampling hides nothing
        return math.inf
    total: Any = None
    for share, times in shares.items():
        losses = _losses(noise_multiplier, share, step).self_compose(times)
        total = losses if total is None else total.compose(losses, TAIL)
    return float(total.get_epsilon_for_delta(least_delta))


def _profile(noise_multiplier: float, share: float, epsilons: Any) -> Any:
    """Return the largest hockey-stick divergence of one round at each epsilon, for one client's data replaced.

    With the Gaussian pair P = N(1, s^2), Q = N(0, s^2), s = noise_multiplier / 2, and each client in a share q of the
    cohorts, it is that of ((1 - q) Q + q P, Q) at epsilon >= 0, which is q times that of (P, Q) at
    log(1 + (exp(epsilon) - 1) / q): Balle, Barthe and Gaboardi, "Privacy Amplification by Subsampling", NeurIPS 2018,
    https://arxiv.org/abs/1807.01647, sampling without replacement. Replacement has no direction, so below 0 it is
    H(epsilon) = 1 - exp(epsilon) + exp(epsilon) H(-epsilon).
    """
    from scipy.special import log_ndtr, ndtr

    size, s = np.abs(epsilons), noise_multiplier / 2
    log_a = size + np.log(share - (1 - share) * np.expm1(-size)) - math.log(share)
    over = share * (ndtr(0.5 / s - s * log_a) - np.exp(log_a + log_ndtr(-0.5 / s - s * log_a)))
    return np.clip(np.where(epsilons >= 0, over, np.exp(-size) * over - np.expm1(-size)), 0.0, 1.0)


def _grid(noise_multiplier: float, share: float) -> tuple[float, float]:
    """Return the largest privacy loss of a round that counts, and the step of a grid that is fine enough for it."""
    s = noise_multiplier / 2
    most = 0.5 / s**2 + 9 / s  # beyond it are 1e-19 of the losses
    most += math.log(share + (1 - share) * math.exp(-most))
    spread = share * math.sqrt(math.expm1(min(1 / s**2, 100.0)))  # of losses where noise is large
    return most, min(max(spread / 20, most / 5000), most / 500)


@lru_cache(maxsize=64)
def _losses(noise_multiplier: float, share: float, step: float) -> Any:
    """Return the discretized privacy losses of one round, as dp-accounting composes them."""
    from dp_accounting.pld.pld_pmf import create_pmf_pessimistic_connect_dots_fixed_gap

    reach = math.ceil(_grid(noise_multiplier, share)[0] / step)
    deltas = _profile(noise_multiplier, share, np.arange(-reach, reach + 1) * step)
    return create_pmf_pessimistic_connect_dots_fixed_gap(step, -reach, reach, deltas).to_dense_pmf()


def _check_delta(delta: float) -> None:
    if not 0 < delta < 1:
        raise ValueError(f"delta={delta} must be in (0, 1): take less than one over the number of clients")


def _clipping(tensors: Sequence[Tensor], clip_norm: float, whose: str) -> float:
    """Return the factor in (0, 1] that brings the norm of all tensors together down to ``clip_norm``."""
    # In fp64: squares may overflow fp32.
    norm = math.sqrt(sum(value.double().square().sum().item() for value in tensors))
    if not math.isfinite(norm):
        raise ValueError(
            f"{whose} is not finite and cannot be clipped: training diverged, take a smaller learning rate"
        )
    return min(1.0, clip_norm / norm) if norm else 1.0
