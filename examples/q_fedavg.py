"""q-FedAvg, an algorithm in one file: clients whose loss is higher count more, so that no client is left behind.

Li et al., "Fair Resource Allocation in Federated Learning", ICLR 2020, https://arxiv.org/abs/1905.10497, Algorithm 2. It
minimizes ``sum_k p_k / (q + 1) * F_k(w)^(q + 1)``. Client k trains from w to w_k at learning rate lr. With ``L = 1 / lr``
and ``dw_k = L * (w - w_k)``:

    Delta_k = F_k(w)^q * dw_k
    h_k     = q * F_k(w)^(q - 1) * |dw_k|^2 + L * F_k(w)^q
    w      <- w - sum_k Delta_k / sum_k h_k

The paper samples clients by p_k; they are sampled uniformly here, so Delta_k and h_k are multiplied by p_k. F_k(w) is
estimated by the loss of the client's first batch.
"""

from fedlight import Algorithm, State, Update, Visiting, Work


class QFedAvg(Algorithm):
    """Federated averaging under the q-fair objective, for SGD with one learning rate.

    Args:
        q: how much more clients of high loss count, at least 0; 0 is FedAvg with ``weighting="normalized"``.

    Raises:
        ValueError: ``q`` is below 0, or ``training_step`` returns no loss above 0.
    """

    def __init__(self, q: float = 1.0) -> None:
        super().__init__("normalized")  # sums of movements are divided by the sum of their weights, here h_k
        if not 0 <= q < float("inf"):
            raise ValueError(f"q={q} must be at least 0; 0 is FedAvg")
        self.q = q

    def finish_visit(self, visiting: Visiting, movement: State, work: Work) -> Update | None:
        """Return ``-Delta_k / h_k`` with weight ``p_k * h_k``; nothing for a client that has not made a step."""
        if work.lr == 0:
            return None
        loss, scale = work.first_loss, 1 / work.lr
        if loss is None or loss <= 0:
            raise ValueError(f"q-FedAvg needs a loss above 0, and training_step returned {loss}")
        squared = sum((scale * value).square().sum().item() for value in movement.values())
        h = self.q * loss ** (self.q - 1) * squared + scale * loss**self.q
        moved = {name: value * (loss**self.q * scale / h) for name, value in movement.items()}
        return Update(visiting.client.id, moved, visiting.client.share * h)
