"""Trains a model from a config: a project with its folders, LightningCLI and callbacks.

Run, in this folder:
    python train.py fit --config configs/digits.yaml
    python train.py fit --config configs/digits.yaml --config configs/federated.yaml
The second config is all that federation takes: `src/` and this file do not mention it.
"""

import lightning as L
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI


class ProjectCLI(LightningCLI):
    """Any model with any data of `src/`; the schedule of the learning rate is as long as the training."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Ties settings that belong together."""
        parser.link_arguments("trainer.max_epochs", "model.init_args.epochs")


def main() -> ProjectCLI:
    """What `python train.py` does."""
    return ProjectCLI(
        L.LightningModule,
        L.LightningDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        seed_everything_default=42,
        save_config_kwargs={"overwrite": True},
        auto_configure_optimizers=False,
    )


if __name__ == "__main__":
    main()
