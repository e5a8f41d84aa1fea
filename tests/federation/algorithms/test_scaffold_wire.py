import lightning as L
import numpy as np
import pytest
import torch
from plain_lightning import federate, module, trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fedlight import FederatedLoop, FederatedWrapper, Quantize, Scaffold, TopK, Wire

WIRES = {
    "nf4": {"up": Quantize("nf4")},
    "nf4 with feedback": {"up": Quantize("nf4", error_feedback=True)},
    "top-k": {"up": TopK(0.1)},
    "top-k without feedback": {"up": TopK(0.1, error_feedback=False)},
    "both ways": {"up": [TopK(0.3), Quantize("int8")], "down": Quantize("nf4")},
}


def controls(loop):
    """The server's control, and the mean of those that the ten clients keep, which start at 0."""
    ours = loop.algorithm.state_dict()["control"]
    own = [loop.memory.load(name).get("control", {}) for name in loop.clients]
    assert len(own) == 10
    mean = {name: sum(one[name].double() for one in own if name in one) / 10 for name in ours}
    return [torch.cat([state[name].flatten() for name in sorted(ours)]) for state in (ours, mean)]


def controls_over(channel):
    model, algorithm = module(optimizer="SGD", lr=0.05, dropout=0.0), Scaffold("uniform")
    return controls(federate(8, model=model, clients_per_round=5, algorithm=algorithm, channel=channel)[1])


@pytest.fixture(scope="module")
def exact():
    return controls_over(None)[0]


@pytest.mark.parametrize("wire", WIRES)
def test_the_servers_control_is_the_mean_of_the_clients(wire, exact):
    ours, mean = controls_over(Wire(**WIRES[wire]))
    assert (ours - mean).norm() < 1e-6 * mean.norm()
    assert (ours - exact).norm() > 0.01 * mean.norm()  # the wire does lose something


class Slope(L.LightningModule):
    """Its gradient is the batch, wherever it is."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2))

    def training_step(self, batch, batch_idx):
        return (batch[0] @ self.w).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


class Slopes(L.LightningDataModule):
    def setup(self, stage):
        self.data = TensorDataset(torch.tensor([[4.0, 3.0]]))

    def train_dataloader(self):
        return DataLoader(self.data, batch_size=1)


@pytest.mark.parametrize("feedback", [True, False])
def test_a_change_that_was_not_sent_is_sent_once(feedback):
    """Half of the control goes up in a round: first 4, then 3, and no more. Feedback is for the parameters alone."""
    found = []

    class Watch(L.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            found.append(loop.memory.load("a"))

    wire = Wire(up=TopK(0.5, error_feedback=feedback))
    loop = FederatedLoop(Scaffold(), clients_per_round=1, local_steps=2, channel=wire)
    data = FederatedWrapper(Slopes(), lambda _: {"a": np.arange(1)})
    trainer(4, [loop, Watch()], limit_val_batches=0).fit(Slope(), data)
    own = [memory["control"]["w"].tolist() for memory in found]
    assert own == [[4.0, 0.0], [4.0, 3.0], [4.0, 3.0], [4.0, 3.0]]
    assert loop.algorithm.state_dict()["control"]["w"].tolist() == [4.0, 3.0]
    assert all(list(memory.get("wire", {})) == (["w"] if feedback else []) for memory in found)
