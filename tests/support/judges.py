"""Four clients, three selectors, and a module that says of each example which selectors are right."""

import lightning as L
import numpy as np
import torch
from torchmetrics import MeanMetric

from fedlight.callbacks.loop.federated_loop import FederatedLoop
from fedlight.datamodules.federated.datamodule import FederatedDataModule
from fedlight.federation.algorithms.fedavg import FedAvg

GROUPS = {"a": "warm", "b": "warm", "c": "terse", "d": "terse"}
# Client by client: the margin by which each of three selectors is right on an example. Above 0.5 it is.
MARGINS = {
    "a": [[1, 1, 0], [1, 1, 0], [1, 0, 0], [1, 0, 0]],
    "b": [[0, 1, 1], [0, 0, 1]],
    "c": [[0, 1, 0], [0, 1, 0], [1, 1, 1]],
    "d": [[0, 0, 0.25]],
}
ORDER = [9, 0, 4, 6, 1, 5, 7, 2, 8, 3]  # whose turn it is in the loader: d a b c a b c a c a
OWNERS = "aaaabbcccd"


class Judge(L.LightningModule):
    """A trained shift is added to every margin; the more it is, the more is right."""

    def __init__(self, selectors=3, answers=True):
        super().__init__()
        self.shift = torch.nn.Parameter(torch.zeros(1))
        self.selectors, self.answers = selectors, answers
        self.mean = MeanMetric()

    def training_step(self, batch, batch_idx):
        return (self.shift - batch.mean()).square().mean()

    def validation_step(self, batch, batch_idx):
        return self._evaluate("val", batch)

    def test_step(self, batch, batch_idx):
        return self._evaluate("test", batch)

    def _evaluate(self, stage, batch):
        assert not self.training
        correct = batch[:, : self.selectors] + self.shift > 0.5
        assert not correct.requires_grad
        self.mean.update(batch)
        self.log(f"{stage}/mean", self.mean)
        self.log_dict({f"{stage}/shift": self.shift.mean()})
        return {"correct": correct, "vote": 2 * correct.sum(1) > self.selectors} if self.answers else None

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Margins(FederatedDataModule):
    """The same examples to train on, to validate and to test; knows whose they are and, if told to, the groups."""

    def __init__(self, knows=True, groups=GROUPS):
        super().__init__(batch_size=1, eval_batch_size=4)
        self.knows, self.client_groups = knows, groups

    def setup(self, stage):
        pooled = torch.tensor([own for margins in MARGINS.values() for own in margins])
        self.train_set = self.val_set = self.test_set = pooled[ORDER]
        owners = np.array([*OWNERS])[ORDER]
        self.client_indices = {client: np.flatnonzero(owners == client) for client in MARGINS}
        if self.knows:
            self.val_client_indices = self.test_client_indices = self.client_indices

    def collate(self, examples):
        return torch.stack(examples)


class Grouping(FedAvg):
    """Groups in rounds 1 and 3; in round 3 client d moves."""

    def __init__(self):
        super().__init__("normalized")
        self.groups, self.losses, self.grouped_round = {}, {}, None

    def start_round(self, round_idx, cohort, federation):
        if round_idx in (1, 3):
            self.grouped_round = round_idx
            self.groups = {"a": 0, "b": 2, "c": 1, "d": 0 if round_idx == 1 else 1}
            self.losses = {client: [0.5, round_idx / 4, 2.0] for client in federation.clients}

    def state_dict(self):
        return {"groups": self.groups, "losses": self.losses, "grouped_round": self.grouped_round}

    def load_state_dict(self, state):
        self.groups, self.losses, self.grouped_round = (
            state["groups"],
            state["losses"],
            state["grouped_round"],
        )


class Dies(L.Callback):
    """Ends the run in a round, at its second batch or, with ``at="end"``, when it is over."""

    def __init__(self, round_idx, at):
        self.round_idx, self.at = round_idx, at

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if (trainer.current_epoch, batch_idx, self.at) == (self.round_idx, 1, "batch"):
            raise KeyError("killed")

    def on_train_epoch_end(self, trainer, pl_module):
        if (trainer.current_epoch, self.at) == (self.round_idx, "end"):
            raise KeyError("killed")


class Saves(L.Callback):
    """Saves each round: ``validation0.ckpt`` when ModelCheckpoint does that watches a metric, ``end0.ckpt`` at its end."""

    def on_validation_end(self, trainer, pl_module):
        if not trainer.sanity_checking:
            trainer.save_checkpoint(f"{trainer.default_root_dir}/validation{trainer.current_epoch}.ckpt")

    def on_train_epoch_end(self, trainer, pl_module):
        trainer.save_checkpoint(f"{trainer.default_root_dir}/end{trainer.current_epoch}.ckpt")


def trainer(folder, *callbacks, rounds=5, **options):
    """A quiet trainer in a folder."""
    settings = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    settings |= {"enable_checkpointing": False, "accelerator": "cpu", "default_root_dir": folder} | options
    return L.Trainer(max_epochs=rounds, callbacks=[*callbacks], **settings)


def fit(folder, *callbacks, algorithm=None, rounds=5, ckpt_path=None, data=None, module=None, **options):
    """A federated run of three clients a round; gives the module and the trainer."""
    loop = FederatedLoop(algorithm or Grouping(), clients_per_round=3, local_steps=2)
    module, run = module or Judge(), trainer(folder, loop, *callbacks, rounds=rounds, **options)
    run.fit(module, datamodule=data or Margins(), ckpt_path=ckpt_path, weights_only=True)
    return module, run
