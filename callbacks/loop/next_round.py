"""When the next round is planned: behind the checkpoint of the round that is over."""

from collections.abc import Callable

import lightning as L
from lightning.pytorch.callbacks import Checkpoint


class NextRound(Checkpoint):
    """Plans the next round once the round before is saved.

    A plan may take minutes, where clients make training data for themselves: who stops the run in them has lost nothing, and
    early stopping has spoken before. Lightning calls checkpoints and early stopping behind all other callbacks, and this is
    the last of them.

    Args:
        plan: what is to be done.
    """

    def __init__(self, plan: Callable[[L.Trainer], None]) -> None:
        self.plan = plan

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Plans."""
        self.plan(trainer)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Leaves the trainer's callbacks as they were: this is no checkpoint that one could go on from."""
        trainer.callbacks = others(trainer)  # type: ignore[attr-defined]


def plan_behind_checkpoints(trainer: L.Trainer, plan: Callable[[L.Trainer], None]) -> None:
    """Has the trainer do this when a round is over and saved."""
    trainer.callbacks = [*others(trainer), NextRound(plan)]  # type: ignore[attr-defined]


def others(trainer: L.Trainer) -> list[L.Callback]:
    """The callbacks that the trainer was given."""
    return [one for one in trainer.callbacks if not isinstance(one, NextRound)]  # type: ignore[attr-defined]
