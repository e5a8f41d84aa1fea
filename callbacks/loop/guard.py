"""Settings, trainers and checkpoints that a federated run refuses before it starts."""

import os
from collections.abc import Mapping
from typing import Any, NoReturn, Protocol, runtime_checkable

import lightning as L
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch.plugins import DeepSpeedPrecision, FSDPPrecision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.utils._pytree import tree_leaves

from fedlight.callbacks.loop.run import SharesOut
from fedlight.federation.protocols import FederatedData, TrainsRounds
from fedlight.processes.strategy import ClientParallelStrategy
from fedlight.support.settings_record import (
    constructor_arguments,
    described,
    differences,
    digest,
    refuse_other_settings,
)


def refuse_cut_rounds(trainer: L.Trainer, rounds_done: int) -> None:
    """Raise ValueError for trainer settings that would end a round early or mix clients, or for a used loop."""
    if any(kind.__module__.startswith("pytorch_lightning.") for kind in type(trainer).__mro__):
        raise ValueError(
            "the trainer is of the package pytorch_lightning, whose classes are not those of lightning, so settings that "
            "cannot work would pass: replace pytorch_lightning by lightning.pytorch in the program, which is the same code"
        )
    if trainer.current_epoch == 0 and rounds_done > 0:
        raise ValueError(
            f"this FederatedLoop has done {rounds_done} rounds already: make a new one for a new run, "
            "or go on with the same trainer and a larger max_epochs"
        )
    refuse_senseless(trainer)
    for setting, fine, remedy in (  # the first two change the settings below them
        ("fast_dev_run", False, "set max_epochs=1 and local_steps=1"),
        ("overfit_batches", 0.0, "leave it at 0, and set local_steps"),
        ("max_steps", -1, "give max_epochs, which counts rounds"),
        ("min_steps", None, "give min_epochs, which counts rounds"),
        ("limit_train_batches", 1.0, "set local_steps"),
        ("val_check_interval", 1.0, "use check_val_every_n_epoch"),
    ):
        value = getattr(trainer, setting)
        # 1 batch is not 1.0, all of them.
        if value != fine or isinstance(value, int) != isinstance(fine, int):
            raise ValueError(f"trainer.{setting}={value} would cut a round of the federation: {remedy}")
    # Lightning broadcasts should_stop after each batch: ranks with unlike numbers of batches would hang.
    if trainer.world_size != 1:
        raise ValueError(
            f"trainer.devices={trainer.num_devices} and trainer.num_nodes={trainer.num_nodes} make {trainer.world_size} "
            "processes, and a federation is trained in one, or in several of which each trains other clients: set "
            "--trainer.strategy client_parallel, or set --trainer.devices 1 --trainer.num_nodes 1"
        )
    started = int(os.environ.get("WORLD_SIZE", "1")) if TorchElasticEnvironment.detect() else 1
    if started > 1 and not isinstance(trainer.strategy, ClientParallelStrategy):
        raise ValueError(
            f"torchrun has started {started} processes, each of which would train the whole federation: set "
            "--trainer.strategy client_parallel, or start one process without torchrun"
        )
    if isinstance(trainer.strategy, ParallelStrategy):  # even of one process
        refuse_parallel("strategy", trainer.strategy)
    if isinstance(trainer.precision_plugin, (DeepSpeedPrecision, FSDPPrecision)):
        refuse_parallel("precision", trainer.precision_plugin)
    if trainer.max_epochs in (None, -1, 0):
        raise ValueError(f"trainer.max_epochs={trainer.max_epochs}: give the number of rounds, at least 1")
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        # By name, as pytorch_lightning has the same ones, and Lightning takes its callbacks, too.
        kinds = {kind.__name__ for kind in type(callback).__mro__}
        if kinds & {"StochasticWeightAveraging", "WeightAveraging"}:
            raise ValueError(
                f"{type(callback).__name__} averages weights across clients while they train: take it out"
            )
        if kinds & {"BatchSizeFinder", "LearningRateFinder"}:
            raise ValueError(
                f"{type(callback).__name__} tries values on training batches before the first round, whoever's they are: "
                "use it in a run without the federation, and set what it finds"
            )


def refuse_other_data(trainer: Any, read_once: bool) -> None:
    """Raise ValueError for a trainer that reloads the training loader where the project's loader is read by client, once."""
    every = trainer.reload_dataloaders_every_n_epochs
    if every and read_once:
        raise ValueError(
            f"trainer.reload_dataloaders_every_n_epochs={every} asks for another training loader in later epochs, but whose "
            "example is whose is said once: leave it at 0 (loaders for validation are made anew in every round), or "
            "derive the datamodule from FederatedDataModule"
        )


def refuse_parallel(setting: str, part: object) -> NoReturn:
    """Raise ValueError for a part that spreads batches or parameters over processes, even over one."""
    raise ValueError(
        f"trainer.{setting}={type(part).__name__} spreads batches or parameters over processes, but a client's visit is "
        "one's work: set trainer.strategy=client_parallel, under which each process trains other clients, or "
        f"leave trainer.{setting} out and set devices=1"
    )


def refuse_own_iteration(module: L.LightningModule) -> None:
    """Raise ``ValueError`` for a training step that reads the loader itself, so that batches have no numbers."""
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise ValueError(
            f"{type(module).__name__}.training_step(dataloader_iter) takes batches from the loader itself, so nobody can "
            "tell where a client's visit ends: take the batch, training_step(batch, batch_idx)"
        )


def refuse_kept(trainer: L.Trainer, module: L.LightningModule) -> None:
    """Raise ValueError for hyperparameters that hold a callback of the federation, and through it the trainer."""
    for owner in (module, trainer.datamodule):  # type: ignore[attr-defined]
        for name, value in owner.hparams.items() if owner is not None else ():
            if any(isinstance(leaf, (TrainsRounds, SharesOut)) for leaf in tree_leaves(value)):
                raise ValueError(
                    f"hparams.{name} of {type(owner).__name__} holds a callback of the federation, which no checkpoint "
                    f"can keep, since it holds the trainer: leave it out, save_hyperparameters(ignore=[{name!r}])"
                )


def refuse_cut_short(trainer: L.Trainer, round_idx: int, num_batches: int) -> None:
    """Raise ``ValueError`` for an epoch that ended before its round, unless the trainer was told to stop."""
    if not trainer.should_stop:
        raise ValueError(
            f"round {round_idx + 1} was cut short: its epoch ended before the last of its {num_batches} batches, as it does "
            "where an on_train_batch_start gives -1. Have it give nothing, and set local_steps; or make a new "
            "trainer, if this one goes on after an error"
        )


def refuse_middle_of_epoch(epoch: int, batch_idx: int) -> NoReturn:
    """Raise ValueError: Lightning resumes inside an epoch, which no checkpoint of a federated run does."""
    raise ValueError(
        f"the trainer goes on at batch {batch_idx} of epoch {epoch}, but a round is trained as a whole: the checkpoint that "
        "was resumed is not of a federated run. Load its weights into the module, and fit without ckpt_path"
    )


TRAINED = "_has_trained"
"""Attribute of algorithms and server optimizers that have been through a round, and so of their copies, also in files."""


def refuse_used(trainer: L.Trainer, rounds_done: int, *parts: Any) -> None:
    """Raise ValueError for an algorithm or server optimizer that would begin a new run with what it knows of another."""
    for part in parts if rounds_done == 0 and trainer.ckpt_path is None else ():
        if TRAINED in vars(part) and part.state_dict():
            raise ValueError(
                f"this {type(part).__name__} remembers the rounds of another FederatedLoop: make a new one for a new run"
            )


def check_cohort(num_clients: int, **settings: int) -> None:
    """Raise ValueError for a setting, by its name, that asks for more clients than there are."""
    for name, value in settings.items():
        if value > num_clients:
            raise ValueError(
                f"{name}={value} is more than the {num_clients} clients of the data: set {name}={num_clients} or less"
            )


LEAST = {
    "accumulate_grad_batches": (1, "batches for each step of the optimizer"),
    "gradient_clip_val": (0, "the largest norm or value of a gradient, null for any"),
    "check_val_every_n_epoch": (1, "epochs from one validation to the next"),
    "log_every_n_steps": (0, "steps from one line of the log to the next"),
    "num_sanity_val_steps": (-1, "batches of a validation before training, -1 for all"),
    "min_epochs": (0, "epochs"),
}
"""Setting -> its least value, and its meaning."""


def refuse_senseless(trainer: L.Trainer) -> None:
    """Raise ValueError for a setting of the trainer below its least value."""
    for setting, (least, meaning) in LEAST.items():
        value = getattr(trainer, setting)
        if value is not None and not value >= least:  # NaN too
            raise ValueError(f"trainer.{setting}={value} must be at least {least}: it is {meaning}")


MAY_CHANGE = ("clients_at_once",)
"""Arguments of the loop on which no result depends beyond rounding."""


@runtime_checkable
class TellsExamples(Protocol):
    """Data that know the examples of their clients without reading them."""

    def examples_digest(self) -> str:
        """Return a digest that is equal for equal examples of the same clients."""


class SameFederation:
    """Description of a federation for its checkpoints, which refuses to resume another federation.

    May change between runs: ``max_epochs``, everything about logging, evaluation and folders, loader processes. Optimizer
    settings are checked by the module (`fedlight.modules.language.checkpoints.check_optimizer_settings`). The loop has each
    argument of its constructor as an attribute.

    Attributes:
        settings: name -> plain value when the loop was made, and those of the data once they are known.
        trains: whether the run trains; evaluation does not compare settings.
    """

    def __init__(self, loop: object) -> None:
        names = [name for name in constructor_arguments(type(loop)) if name not in MAY_CHANGE]
        self.settings: dict[str, Any] = {
            f"federated.{name}": described(getattr(loop, name, None)) for name in names
        }
        self.trains = False
        self._saved: Mapping[str, Any] = {}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Raise ValueError for a checkpoint with other settings."""
        self._saved = saved
        # Those of the data come with `meet`.
        self._refuse_others()

    def meet(self, trainer: L.Trainer, data: FederatedData) -> None:
        """Add the data's settings before training; raise ValueError if the checkpoint, or the rounds before, have others."""
        sizes = dict(sorted(data.client_sizes().items()))
        settings = {
            "data.clients": len(sizes),
            "data.examples": sum(sizes.values()),
            "data.client_sizes": f"digest {digest(sizes)}",
            "data.batches_in_a_pass": sum(data.num_batches(client) for client in sizes),
        }
        if isinstance(data, TellsExamples):
            settings["data.client_examples"] = f"digest {data.examples_digest()}"
        if trainer.current_epoch and (others := differences(self.settings, settings)):
            name, was, now = others[0]
            raise ValueError(
                f"this FederatedLoop has trained with {name}={was}, and now has {now}: give it the same data, or make a new "
                "one for a new run"
            )
        self.settings |= settings | {"trainer.accumulate_grad_batches": trainer.accumulate_grad_batches}
        self._refuse_others()
        self._saved = {}

    def _refuse_others(self) -> None:
        if self.trains:
            refuse_other_settings(self._saved, self.settings, "start anew, without the checkpoint")
