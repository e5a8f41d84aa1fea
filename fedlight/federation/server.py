"""Server optimizers of a round's combined movement: plain averaging, momentum, adaptive steps.

FedAvgM: Hsu et al., "Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification", 2019,
https://arxiv.org/abs/1909.06335. FedAdagrad, FedAdam, FedYogi: Reddi et al., "Adaptive Federated Optimization", ICLR 2021,
https://arxiv.org/abs/2003.00295, Algorithm 2, which leaves the start of v open (at least tau ** 2): here it is tau ** 2
exactly. There is no bias correction. With the combined movement d of a round, tensor by tensor:

    FedAvgM     v <- beta v + d                                          w <- w + lr v
    the others  m <- beta1 m + (1 - beta1) d, from m = 0                 w <- w + lr m / (sqrt(v) + tau)
    FedAdagrad  v <- v + d^2
    FedAdam     v <- beta2 v + (1 - beta2) d^2
    FedYogi     v <- v - (1 - beta2) d^2 sign(v - d^2)

Moments are fp64, as movements are. A tensor that no client sent keeps its value and its moments.
"""

from math import inf

from torch import Tensor, full_like, zeros_like

from fedlight.federation.algorithm import ServerOptimizer


class FedAvgM(ServerOptimizer):
    """Momentum over rounds; ``beta = 0`` is `Average`.

    Args:
        lr: server learning rate, above 0.
        beta: share of the velocity that a round keeps, in [0, 1).

    Raises:
        ValueError: a value is out of its range.

    Examples:
        >>> import torch
        >>> server, state, moved_by = FedAvgM(beta=0.5), {"w": torch.tensor([1.0])}, {"w": torch.tensor([4.0])}
        >>> state = server.step(state, moved_by)
        >>> state["w"].item(), server.step(state, moved_by)["w"].item()
        (5.0, 11.0)
    """

    def __init__(self, lr: float = 1.0, beta: float = 0.9) -> None:
        super().__init__(lr, ("velocity",))
        _check_ranges(beta=beta)
        self.beta = beta

    def direction(self, name: str, movement: Tensor) -> Tensor:
        velocity = self._moments["velocity"]
        velocity[name] = movement + self.beta * velocity[name] if name in velocity else movement.clone()
        return velocity[name]


class FedAdagrad(ServerOptimizer):
    """Adaptive steps that shrink with the sum of squared movements of all rounds.

    Args:
        lr: server learning rate, above 0.
        beta1: share of the first moment that a round keeps, in [0, 1); 0 is Adagrad without momentum.
        tau: added to the root of the second moment, above 0; the second moment starts at its square.

    Raises:
        ValueError: a value is out of its range.

    Examples:
        >>> import torch
        >>> server = FedAdagrad(lr=3.0, beta1=0.0, tau=3.0)  # second moment 9 + 16, so 1 + 3 * 4 / (5 + 3)
        >>> server.step({"w": torch.tensor([1.0])}, {"w": torch.tensor([4.0])})["w"].item()
        2.5
    """

    def __init__(self, lr: float = 1e-3, beta1: float = 0.9, tau: float = 1e-3) -> None:
        super().__init__(lr, ("first", "second"))
        _check_ranges(tau, beta1=beta1)
        self.beta1, self.tau = beta1, tau

    def direction(self, name: str, movement: Tensor) -> Tensor:
        first, second = self._moments["first"], self._moments["second"]
        m = first.get(name, zeros_like(movement))  # m starts at 0, v at tau^2
        first[name] = self.beta1 * m + (1 - self.beta1) * movement
        second[name] = self.second(second.get(name, full_like(movement, self.tau**2)), movement)
        return first[name] / (second[name].sqrt() + self.tau)  # Algorithm 2 has no bias correction

    def second(self, v: Tensor, movement: Tensor) -> Tensor:
        """Return the new second moment."""
        return v + movement**2


class FedAdam(FedAdagrad):
    """Adaptive steps that shrink with a running mean of squared movements.

    Args:
        lr: server learning rate, above 0.
        beta1: share of the first moment that a round keeps, in [0, 1).
        beta2: share of the second moment that a round keeps, in [0, 1).
        tau: added to the root of the second moment, above 0; the second moment starts at its square.

    Raises:
        ValueError: a value is out of its range.
    """

    def __init__(self, lr: float = 1e-3, beta1: float = 0.9, beta2: float = 0.99, tau: float = 1e-3) -> None:
        super().__init__(lr, beta1, tau)
        _check_ranges(beta2=beta2)
        self.beta2 = beta2

    def second(self, v: Tensor, movement: Tensor) -> Tensor:
        return self.beta2 * v + (1 - self.beta2) * movement**2


class FedYogi(FedAdam):
    """FedAdam whose second moment changes by no more than a squared movement, and so decays slowly.

    ``beta2``, in [0, 1), says how much: a round changes the second moment by ``1 - beta2`` squared movements. The other
    arguments are those of `FedAdam`.
    """

    def second(self, v: Tensor, movement: Tensor) -> Tensor:
        square = movement**2
        return v - (1 - self.beta2) * square * (v - square).sign()


def _check_ranges(tau: float | None = None, **betas: float) -> None:
    for name, value in betas.items():
        if not 0 <= value < 1:
            raise ValueError(f"{name}={value} must be at least 0 and below 1 at the server")
    if tau is not None and not 0 < tau < inf:
        raise ValueError(
            f"tau={tau} must be above 0 and finite at the server: it bounds the steps of tensors that hardly move"
        )
