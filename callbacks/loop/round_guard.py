"""What a federated run refuses before it starts: settings that cut a round, checkpoints of another run."""

from collections.abc import Mapping
from typing import Any, NoReturn

import lightning as L
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    LearningRateFinder,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.plugins import DeepSpeedPrecision, FSDPPrecision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from fedlight.callbacks.loop.trainer_values import refuse_senseless


def refuse_cut_rounds(trainer: L.Trainer, rounds_done: int) -> None:
    """Raises ``ValueError`` for trainer settings under which a round would end early or mix clients.

    And where a trainer starts anew with a loop that has done rounds already.
    """
    if trainer.current_epoch == 0 and rounds_done > 0:
        raise ValueError(
            f"this FederatedLoop has done {rounds_done} rounds already: make a new one for a new run, "
            "or go on with the same trainer and a larger max_epochs"
        )
    refuse_senseless(trainer)
    for setting, fine, remedy in (  # the first two set those below them
        ("fast_dev_run", False, "set max_epochs=1 and federated.local_steps=1"),
        ("overfit_batches", 0.0, "leave it at 0, and set federated.local_steps"),
        ("max_steps", -1, "give max_epochs, which counts rounds"),
        ("min_steps", None, "give min_epochs, which counts rounds"),
        ("limit_train_batches", 1.0, "set federated.local_steps"),
        ("val_check_interval", 1.0, "use check_val_every_n_epoch"),
    ):
        value = getattr(trainer, setting)
        if value != fine or isinstance(value, int) != isinstance(
            fine, int
        ):  # 1 batch is not 1.0, all of them
            raise ValueError(f"trainer.{setting}={value} would cut a round of the federation: {remedy}")
    if trainer.world_size != 1:
        raise ValueError(
            f"trainer.devices={trainer.num_devices} and trainer.num_nodes={trainer.num_nodes} make {trainer.world_size} "
            "processes, and a federation is trained in one: set --trainer.devices 1 --trainer.num_nodes 1"
        )
    if isinstance(trainer.strategy, ParallelStrategy):
        refuse_parallel("strategy", trainer.strategy)
    if isinstance(trainer.precision_plugin, (DeepSpeedPrecision, FSDPPrecision)):
        refuse_parallel("precision", trainer.precision_plugin)
    if trainer.max_epochs in (None, -1, 0):
        raise ValueError(f"trainer.max_epochs={trainer.max_epochs}: give the number of rounds, at least 1")
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, (StochasticWeightAveraging, WeightAveraging)):
            raise ValueError(
                f"{type(callback).__name__} averages weights across clients while they train: take it out"
            )
        if isinstance(callback, (BatchSizeFinder, LearningRateFinder)):
            raise ValueError(
                f"{type(callback).__name__} tries values on training batches before the first round, whoever's they are: "
                "use it in a run without the federation, and set what it finds"
            )


def refuse_other_data(trainer: Any, read_once: bool) -> None:
    """Raises ``ValueError`` where a project gives other training data in later epochs, and its loader is read by client.

    Args:
        trainer: whose setting says so.
        read_once: whether the project's loader is asked for once.
    """
    every = trainer.reload_dataloaders_every_n_epochs
    if every and read_once:
        raise ValueError(
            f"trainer.reload_dataloaders_every_n_epochs={every} asks for another training loader in later epochs, but whose "
            "example is whose is said once: leave it at 0 (loaders for validation are made anew in every round), or "
            "derive the datamodule from FederatedDataModule"
        )


def refuse_parallel(setting: str, part: object) -> NoReturn:
    """Raises ``ValueError`` for what spreads batches or parameters over processes, also where there is only one."""
    raise ValueError(
        f"trainer.{setting}={type(part).__name__} spreads batches or parameters over processes, but a client's visit is "
        f"one's work: leave trainer.{setting} out and set devices=1"
    )


def refuse_own_iteration(module: L.LightningModule) -> None:
    """Raises ``ValueError`` for a training step that reads the loader itself, whereby batches lose their numbers."""
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise ValueError(
            f"{type(module).__name__}.training_step(dataloader_iter) takes batches from the loader itself, so nobody can "
            "tell where a client's visit ends: take the batch, training_step(batch, batch_idx)"
        )


def refuse_cut_short(trainer: L.Trainer, round_idx: int, num_batches: int) -> None:
    """Raises ``ValueError`` at the end of an epoch whose round was not over, unless the trainer was told to stop."""
    if not trainer.should_stop:
        raise ValueError(
            f"round {round_idx + 1} was cut short: its epoch ended before the last of its {num_batches} batches, as it does "
            "where an on_train_batch_start gives -1. Have it give nothing, and set federated.local_steps"
        )


def refuse_other_epoch(epoch: int, rounds_done: int, planned: int | None) -> None:
    """Raises ``ValueError`` where trainer and loop do not count alike, or the round is not the one that was planned."""
    if epoch != rounds_done:
        raise ValueError(
            f"the trainer has counted {epoch} epochs, but {rounds_done} rounds are done. If it goes on from a checkpoint, "
            "that is not of a federated run: give one that is. If it was stopped inside a round before, make a new "
            "trainer and give fit the newest checkpoint, ckpt_path=..."
        )
    if planned != rounds_done:
        raise ValueError(
            f"round {rounds_done + 1} is not planned: trainer.should_stop was set when the round before was over and now it "
            "is not. Take out the callback that sets it back"
        )


def refuse_middle_of_epoch(epoch: int, batch_idx: int) -> NoReturn:
    """Raises ``ValueError`` where Lightning goes on inside an epoch, which no checkpoint of a federated run has it do."""
    raise ValueError(
        f"the trainer goes on at batch {batch_idx} of epoch {epoch}, but a round is trained as a whole: the checkpoint that "
        "was resumed is not of a federated run. Load its weights into the module, and fit without ckpt_path"
    )


def refuse_other_accumulation(now: int, planned: int) -> None:
    """Raises ``ValueError`` where a callback has changed how many batches an optimizer step has after they were planned."""
    if now != planned:
        raise ValueError(
            f"trainer.accumulate_grad_batches is {now}, but the visits of this round were planned with {planned}: change it "
            "with Lightning's GradientAccumulationScheduler, which says beforehand what it will be"
        )


def refuse_inside_round(state: Mapping[str, Any]) -> None:
    """Raises ``ValueError`` for what earlier versions saved inside a round; today no checkpoint has this mark."""
    if state.get("inside_round"):
        raise ValueError(
            f"this checkpoint was written inside round {state['rounds_done'] + 1} by an earlier version and holds one "
            "client's local weights: resume from one that was written after a round"
        )


def check_cohort(clients_per_round: int, num_clients: int) -> None:
    """Raises ``ValueError`` where a round needs more clients than there are."""
    if clients_per_round > num_clients:
        raise ValueError(
            f"federated.clients_per_round={clients_per_round} is more than the {num_clients} clients "
            f"of the data: set --federated.clients_per_round {num_clients} or less"
        )
