"""Values of the Trainer that mean nothing, and that Lightning takes: it divides by them later, or passes them over."""

import lightning as L

LEAST = {
    "accumulate_grad_batches": (1, "batches for each step of the optimizer"),
    "gradient_clip_val": (0, "the largest norm or value of a gradient, null for any"),
    "check_val_every_n_epoch": (1, "epochs from one validation to the next"),
    "log_every_n_steps": (0, "steps from one line of the log to the next"),
    "num_sanity_val_steps": (-1, "batches of a validation before training, -1 for all"),
    "min_epochs": (0, "epochs"),
}
"""Setting -> its least value, and what it counts."""


def refuse_senseless(trainer: L.Trainer) -> None:
    """Refuses what no training could mean.

    Raises:
        ValueError: a setting is below its least value.
    """
    for setting, (least, meaning) in LEAST.items():
        value = getattr(trainer, setting)
        if value is not None and not value >= least:
            raise ValueError(f"trainer.{setting}={value} must be at least {least}: it is {meaning}")
