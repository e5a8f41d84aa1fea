"""A tiny project of somebody who knows nothing of federation, and how it is run with fedlight's two callbacks.

24 examples of a regression, four clients with 4, 5, 7 and 8 of them, two rounds of two clients, three steps each. Rows of
the matrix change one thing about it.
"""

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.fabric.utilities import move_data_to_device
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fedlight import ByClient, FederatedLoop

SIZES = {"ann": 4, "ben": 5, "cleo": 7, "dan": 8}
CLIENTS_PER_ROUND, LOCAL_STEPS, BATCH_SIZE = 2, 3, 2


def rows_of_clients() -> dict[str, np.ndarray]:
    """Whose rows are which of the 24; not in one piece each."""
    order = np.random.default_rng(0).permutation(24)
    return dict(zip(SIZES, np.split(order, np.cumsum([*SIZES.values()])[:-1]), strict=True))


def by_client(dataset: Any) -> dict[str, np.ndarray]:
    """What is given to `ByClient`."""
    return rows_of_clients()


def examples() -> TensorDataset:
    """Three features, one target; the first feature tells the rows apart."""
    x = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x @ torch.tensor([[1.0], [-2.0], [0.5]])).tanh())


def loader(**settings: Any) -> DataLoader:
    """An ordinary training loader."""
    return DataLoader(examples(), **{"batch_size": BATCH_SIZE, "shuffle": True} | settings)


class Net(L.LightningModule):
    """An ordinary module.

    Args:
        optimizer: parameters -> optimizer.
        scheduler: optimizer -> schedule, or None.
        interval: of the schedule.
        schedule: what else is said of it to Lightning.
    """

    def __init__(
        self,
        optimizer: Callable[..., Any] = lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        scheduler: Callable[..., Any] | None = None,
        interval: str = "epoch",
        **schedule: Any,
    ) -> None:
        super().__init__()
        self.net: nn.Module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        self.optimizer, self.scheduler = optimizer, scheduler
        self.schedule = {"interval": interval, **schedule}

    def loss(self, batch):
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def configure_optimizers(self):
        optimizer = self.optimizer(self.parameters())
        if self.scheduler is None:
            return optimizer
        schedule = {"scheduler": self.scheduler(optimizer), **self.schedule}
        return {"optimizer": optimizer, "lr_scheduler": schedule}


def changed(
    change: Callable[[nn.Sequential], Any], kind: type[Net] = Net, **settings: Any
) -> Callable[[], Net]:
    """Makes a module whose two layers, with a tanh between them, ``change`` has changed."""

    def make() -> Net:
        made = kind(**settings)
        change(made.net)
        return made

    return make


class Validated(Net):
    """The same with validation, test and prediction."""

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.loss(batch))

    def test_step(self, batch, batch_idx):
        self.log("test/loss", self.loss(batch))

    def predict_step(self, batch, batch_idx):
        return self.net(batch[0])


@dataclass(frozen=True)
class Batch:
    """A training batch as the module got it, and the state of the random stream at that moment."""

    content: Any
    random: torch.Tensor


@dataclass(frozen=True)
class Project:
    """What a row runs.

    Attributes:
        module: makes the module.
        data: makes what is given to ``fit``: a loader or a datamodule.
        trainer: arguments of the ``Trainer`` beside the quiet ones, or a function that makes them.
        callbacks: makes the callbacks beside the federation's, for a folder.
        loop: arguments of `FederatedLoop`.
        clients: training set -> client -> positions.
        federation: makes the federation's callbacks, where it is not the two of the guide.
        prepare: what is done to the trainer before it trains.
        warns: beginnings of warnings that Lightning or torch gives for this, with or without a federation.
    """

    module: Callable[[], L.LightningModule] = Net
    data: Callable[[], Any] = loader
    trainer: Mapping[str, Any] | Callable[[], Mapping[str, Any]] = field(default_factory=dict)
    callbacks: Callable[[Path], Sequence[L.Callback]] = lambda folder: ()
    loop: Mapping[str, Any] = field(default_factory=dict)
    clients: Callable[[Any], Mapping[str, Any]] = by_client
    federation: Callable[[FederatedLoop], list[L.Callback]] | None = None
    prepare: Callable[[L.Trainer], Any] = lambda trainer: None
    rounds: int = 2
    warns: tuple[str, ...] = ()

    def make_module(self) -> L.LightningModule:
        """The module as it is at the start, always the same."""
        torch.manual_seed(0)
        made = self.module()
        if isinstance(made, L.LightningModule):
            made.configure_model()
        return made


def given(**trainer: Any) -> Project:
    """A project whose trainer has these arguments."""
    return Project(trainer=trainer)


class Run:
    """A project with the federation's callbacks.

    Args:
        project: what is run.
        folder: for what it writes.
        more: callbacks of the test.

    Attributes:
        rounds: for each round its visits in order, client and batches.
        steps: calls of ``training_step``, whoever made them.
    """

    def __init__(self, project: Project, folder: Path, more: Sequence[L.Callback] = ()) -> None:
        self.project, self.folder = project, folder
        self.rounds: list[list[tuple[str, list[Batch]]]] = []
        self.steps = 0
        self.module = project.make_module()
        self.loop = FederatedLoop(
            **{"clients_per_round": CLIENTS_PER_ROUND, "local_steps": LOCAL_STEPS} | dict(project.loop)
        )
        federation = (
            project.federation(self.loop) if project.federation else [ByClient(project.clients), self.loop]
        )
        self._callbacks = [*federation, *project.callbacks(folder), _Recorder(self), *more]

    def fit(self, **how: Any) -> "Run":
        """Makes the trainer and trains."""
        with warnings.catch_warnings():
            for message in self.project.warns:
                warnings.filterwarnings("ignore", message)
            self.trainer = self.make_trainer()
            data = self.project.data()
            place = "datamodule" if isinstance(data, L.LightningDataModule) else "train_dataloaders"
            given = {"model": self.module} | ({place: data} if data is not None else {})
            self.trainer.fit(**given | how)
        return self

    def ask(self) -> None:
        """Makes the trainer and has the loop look at it, without starting anything."""
        self.trainer = self.make_trainer()
        self.loop.setup(self.trainer, self.module, "fit")

    def make_trainer(self) -> L.Trainer:
        """With all callbacks; the module counts its steps from now on."""
        self._count()
        quiet = {
            "max_epochs": self.project.rounds,
            "accelerator": "cpu",
            "logger": False,
            "log_every_n_steps": 1,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": self.folder,
        }
        given = self.project.trainer
        trainer = L.Trainer(callbacks=self._callbacks, **quiet | dict(given() if callable(given) else given))
        self.project.prepare(trainer)
        return trainer

    def _count(self) -> None:
        """Has the class of the module count its training steps; callbacks can be switched off, a method cannot."""
        if not isinstance(self.module, L.LightningModule):
            return
        kind = type(self.module)
        run, plain = self, kind.training_step

        class Counted(kind):
            @wraps(plain)
            def training_step(self, *batch, **named):
                run.steps += 1
                return plain(self, *batch, **named)

        Counted.__name__, Counted.__qualname__ = kind.__name__, kind.__qualname__
        self.module.__class__ = Counted

    def weights(self) -> dict[str, torch.Tensor]:
        """Of the module as it is now."""
        return weights(self.module)


class _Recorder(L.Callback):
    def __init__(self, run: Run) -> None:
        self.run = run

    def on_train_epoch_start(self, trainer, pl_module):
        self.run.rounds.append([])

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        visits, visit = self.run.rounds[-1], self.run.loop.visit
        if visit is None:
            return
        if not visits or visits[-1][0] != visit.client_id:
            visits.append((visit.client_id, []))
        visits[-1][1].append(Batch(move_data_to_device(copy.deepcopy(batch), "cpu"), torch.get_rng_state()))


def weights(module: nn.Module) -> dict[str, torch.Tensor]:
    """A copy of the parameters by name."""
    return {name: p.detach().cpu().clone() for name, p in module.named_parameters()}
