"""The LightningCLI behind ``fedlight fit|validate|test|predict``; apart from cli.py, since torch loads for seconds."""

import warnings
from typing import Any

import lightning as L
from jsonargparse import set_parsing_settings
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from fedlight.callbacks.federated_loop import FederatedLoop


class FedlightCLI(LightningCLI):
    """Any LightningModule with any LightningDataModule, federated where ``federated:`` is given.

    Args:
        args: the command and its arguments.
    """

    def __init__(self, args: list[str]) -> None:
        # Lightning's own call of a function that torch is about to rename.
        warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated")
        set_parsing_settings(omegaconf_absolute_to_relative_paths=True)
        super().__init__(
            L.LightningModule,
            L.LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            auto_configure_optimizers=False,
            seed_everything_default=0,
            save_config_kwargs={"overwrite": True},
            parser_kwargs={"parser_mode": "omegaconf+"},
            args=args,
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Adds ``federated:``, whose absence means centralised training."""
        parser.add_lightning_class_args(FederatedLoop, "federated", subclass_mode=True, required=False)

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parses ``args`` alone; Lightning's own method warns that the process has arguments as well."""
        self.config = parser.parse_args(args)

    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list[Any]) -> L.Trainer:
        return super()._instantiate_trainer(config, [c for c in callbacks if c is not None])
