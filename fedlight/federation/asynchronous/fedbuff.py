"""FedBuff: the server steps when a buffer of updates is full, and asks another client whenever one is through.

Nguyen et al., "Federated Learning with Buffered Asynchronous Aggregation", AISTATS 2022, https://arxiv.org/abs/2106.06639,
Algorithms 1 and 2. At most M_c clients ("concurrency") train at a time. Client i receives the model w_{t-x}, x server steps
before the step t that uses its update, and sends its movement d_i relative to it. With K updates in the buffer

    w_{t+1} = w_t + lr * (1 / K) * sum of s(x_i) d_i,        s(x) = (1 + x)^-1/2 in the paper's experiments

The other weights of a staleness x, with x = 0 always weighing 1, are those of FedAsync (Xie et al., "Asynchronous Federated
Optimization", 2019, https://arxiv.org/abs/1903.03934): constant 1, polynomial (1 + x)^-a, hinge 1 up to b and
1 / (a (x - b) + 1) above. With ``buffer_size=1`` and the algorithm's ``weighting="normalized"`` the step is FedAsync's
w + lr * s(x) d_i, whose mixing weight alpha is ``federated.server.lr``. FedAsync mixes models, w + alpha s(x) (v_i - w_t),
where FedBuff and this file add movements, w + alpha s(x) (v_i - w_{t-x}); for x = 0 both are the same.

The factor 1 / K, and what else an update weighs, are the algorithm's: ``weighting="uniform"`` is the paper's.

Deviations. A client whose update waits in the buffer is not asked again before the server step, so a step has one update of
each client at most. When all asked clients have dropped out and none is at work, the server steps with the updates that
wait.
"""

from math import inf
from typing import Literal

from fedlight.support.checks import Checked, refuse_below

Weights = Literal["polynomial", "hinge", "constant"]


class FedBuff(Checked):
    """Settings of ``federated.fleet.buffered``: size of the buffer, clients at a time, weights of stale updates.

    Args:
        buffer_size: updates of a server step, K of the paper, at least 1; 1 is plain asynchronous averaging.
        concurrency: most clients that train at a time, at least 1; None: ``federated.clients_per_round``.
        staleness: weight of an update by the number x of server steps since its client received the model: ``polynomial``,
            ``(1 + x)^-a``; ``hinge``, 1 up to ``b`` and ``1 / (a * (x - b) + 1)`` above; ``constant``, 1.
        a: exponent or slope of the weights, at least 0.
        b: server steps of staleness that the hinge does not punish, at least 0.

    Raises:
        ValueError: a value is out of its range.

    Examples:
        >>> [round(FedBuff().weight(steps), 3) for steps in (0, 1, 3)]
        [1.0, 0.707, 0.5]
        >>> [FedBuff(staleness="hinge", a=1.0, b=2).weight(steps) for steps in (0, 2, 3, 5)]
        [1.0, 1.0, 0.5, 0.25]
    """

    def __init__(
        self,
        buffer_size: int = 10,
        concurrency: int | None = None,
        staleness: Weights = "polynomial",
        a: float = 0.5,
        b: int = 4,
    ) -> None:
        refuse_below(1, buffer_size=buffer_size, concurrency=concurrency)
        refuse_below(0, b=b)
        if not 0 <= a < inf:
            raise ValueError(f"a={a} must be at least 0; 0 weighs all updates alike")
        self.buffer_size, self.concurrency = buffer_size, concurrency
        self.staleness, self.a, self.b = staleness, a, b

    def weight(self, staleness: int) -> float:
        """Return the factor of an update, in (0, 1], that is ``staleness`` server steps old."""
        if self.staleness == "constant":
            return 1.0
        if self.staleness == "polynomial":
            return float((1.0 + staleness) ** -self.a)  # the paper's experiments have a = 1/2
        return 1.0 / (self.a * max(0, staleness - self.b) + 1.0)
