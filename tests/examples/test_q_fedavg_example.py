"""The q-FedAvg of the examples against the paper's update written out."""

import lightning as L
import numpy as np
import pytest
import torch
from plain_lightning import federate, trainer, weights
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from written_out import LR, SHARES, Regression, assert_close, local, recorded

from examples.q_fedavg import QFedAvg
from fedlight import FedAvg, FederatedLoop, FederatedWrapper


def loss_at(state, batch):
    net = Regression(dropout=0.0).double()
    net.load_state_dict(state)
    return nn.functional.mse_loss(net.net(batch[0]), batch[1]).item()


@pytest.mark.parametrize("q", [0.5, 2.0])
def test_a_federation_equals_algorithm_2_written_out(q):
    state, end, rounds = recorded(rounds=4, algorithm=QFedAvg(q))
    for of_clients in rounds:
        delta, total = {name: torch.zeros_like(w) for name, w in state.items()}, 0.0
        for client, batches in of_clients.items():
            f, trained = loss_at(state, batches[0]), local(state, batches)
            dw = {name: (state[name] - trained[name]) / LR for name in state}
            norm = sum(float((d**2).sum()) for d in dw.values())
            delta = {name: delta[name] + SHARES[client] * f**q * dw[name] for name in state}
            total += SHARES[client] * (q * f ** (q - 1) * norm + f**q / LR)
        state = {name: state[name] - delta[name] / total for name in state}
    assert_close(end, state)


def test_q_of_zero_is_fedavg():
    found, plain = (
        weights(federate(model=Regression(optimizer="SGD", dropout=0.0), algorithm=algorithm)[0])
        for algorithm in (QFedAvg(0.0), FedAvg("normalized"))
        if L.seed_everything(0, verbose=False) == 0
    )
    for name, value in found.items():
        torch.testing.assert_close(value, plain[name], rtol=1e-6, atol=1e-7)


class Away(L.LightningModule):
    """Client m's loss is ``(w - b_m)^2``: 0 suits three clients and 1 the fourth."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(0.4))

    def training_step(self, batch, batch_idx):
        return (self.w - batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Places(L.LightningDataModule):
    def setup(self, stage):
        self.data = TensorDataset(torch.tensor([0.0, 0.0, 0.0, 1.0]))

    def train_dataloader(self):
        return DataLoader(self.data, batch_size=1)


def test_the_worst_client_is_better_off_with_a_larger_q():
    """The optimum of sum_k F_k^(q + 1) / (q + 1): w / (1 - w) = 3^(-1 / (2 q + 1)), from 0.25 towards 0.5."""
    found = []
    for q in (0.0, 1.0, 3.0):
        model, loop = Away(), FederatedLoop(QFedAvg(q), clients_per_round=4, local_steps=1)
        data = FederatedWrapper(Places(), lambda _: {f"c{i}": np.array([i]) for i in range(4)})
        trainer(60, [loop], limit_val_batches=0).fit(model, data)
        odds = 3 ** (-1 / (2 * q + 1))
        assert model.w.item() == pytest.approx(odds / (1 + odds), abs=0.01)
        found.append(model.w.item())
    assert found == sorted(found)


def test_values_that_cannot_work_are_refused():
    for q in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="must be at least 0"):
            QFedAvg(q)

    class Silent(Regression):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * 0

    with pytest.raises(ValueError, match=r"needs a loss above 0, and training_step returned 0\.0"):
        federate(model=Silent(), algorithm=QFedAvg())
