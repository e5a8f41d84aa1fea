"""The LightningCLI behind ``fedlight fit|validate|test|predict``; apart from cli.py, since torch loads for seconds."""

import importlib
import os
import pkgutil
import re
import sys
import warnings
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NoReturn

import lightning as L
from jsonargparse import set_parsing_settings
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from fedlight.callbacks.federated_loop import FederatedLoop
from fedlight.federation.full_disk import full_disk_named
from fedlight.modules.checkpoints import check_readable
from fedlight.run_folder import alone_in
from fedlight.run_record import recorded

PACKAGES = (
    *("modules", "datamodules", "callbacks", "federation", "federation.algorithms", "devices"),
    *("evaluation.tasks", "augmentation"),
)


class OneLineParser(LightningArgumentParser):
    """Says in one line what is wrong, not in a page of everything that could have been given."""

    def parse_args(self, args: Any = None, *others: Any, **options: Any) -> Any:
        """Has ``null`` mean nothing inside a class, too: on its way there jsonargparse 4.53 makes the text None of it."""
        given = sys.argv[1:] if args is None else args
        args = [re.sub(r"^(--[^=]+)=None$", r"\1=null", argument) for argument in given]
        return super().parse_args(args, *others, **options)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Ends the program with exit code 2; ``FEDLIGHT_TRACEBACK=1`` shows the parser's whole message."""
        if os.environ.get("FEDLIGHT_TRACEBACK") or not self.exit_on_error:  # parsers of nested classes raise
            super().error(message, ex)
        print(f"fedlight: {tell(message)}\n(FEDLIGHT_TRACEBACK=1 shows more)", file=sys.stderr)
        sys.exit(2)


def tell(message: str) -> str:
    """The telling part of a nested message of the parser, with the key it is about.

    Example:
        >>> tell('Parser key "federated": Parser key "algorithm": - Expected a dot import path string: FedAvgg')
        "federated.algorithm: there is no class 'FedAvgg'; give its name if fedlight has it, else package.module.Name"
    """
    key = ".".join(dict.fromkeys(re.findall(r'Parser key "([^"]+)"', message)))
    where = f"{key}: " if key else ""
    if found := re.search(r"(Option '.*' is not accepted)", message):
        return where + found[1]
    if found := re.search(
        r"(?:Expected a dot import path string|Not a valid subclass of [^:]*)[:.] *(\S+)", message
    ):
        return f"{where}there is no class {found[1]!r}; give its name if fedlight has it, else package.module.Name"
    # What is optional has two types, and a class in a class as many layers of what the parser says of them.
    layers = ("NoneType", "Does not validate against any of the Union")
    lines = [line.strip() for line in message.splitlines() if not any(layer in line for layer in layers)]
    reasons = [line[line.index("Expected") :] for line in lines if "Expected" in line]
    reasons += [line[2:] for line in lines if line.startswith("- ")]
    given = re.findall(r"Given value: (.*)", message)
    if reasons and reasons[0].startswith("Expected") and "Got value" not in reasons[0] and given:
        return f"{where}{reasons[0]}, given {given[0]}"
    if reasons:
        return f"{where}{reasons[0]}"
    return where + " ".join(re.sub(r'Parser key "[^"]+": ', "", message).split())


def know_short_names() -> None:
    """Imports the files whose classes a config may name without their package: what is not imported is not found."""
    for package in PACKAGES:
        where = importlib.import_module(f"fedlight.{package}")
        for file in pkgutil.iter_modules(where.__path__):
            importlib.import_module(f"{where.__name__}.{file.name}")


class FedlightCLI(LightningCLI):
    """Any LightningModule with any LightningDataModule, federated where ``federated:`` is given.

    Args:
        args: the command and its arguments.
    """

    def __init__(self, args: list[str]) -> None:
        # Lightning's own call of a function that torch is about to rename.
        warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated")
        know_short_names()
        set_parsing_settings(omegaconf_absolute_to_relative_paths=True)
        self.command, self.given = args[0], args
        super().__init__(
            L.LightningModule,
            L.LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            auto_configure_optimizers=False,
            seed_everything_default=0,
            save_config_kwargs={"overwrite": True},
            parser_class=OneLineParser,
            parser_kwargs={"parser_mode": "omegaconf+"},
            args=args,
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Adds ``federated:``, whose absence means centralised training."""
        parser.add_lightning_class_args(FederatedLoop, "federated", subclass_mode=True, required=False)

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        """The one that is wanted: a parser takes half a second to build."""
        return {self.command: super().subcommands()[self.command]}

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parses ``args`` alone; Lightning's own method warns that the process has arguments as well."""
        self.config = parser.parse_args(args)

    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list[Any]) -> L.Trainer:
        return super()._instantiate_trainer(config, [c for c in callbacks if c is not None])

    def instantiate_classes(self) -> None:
        """Says of a refused setting what its class said, without the parser's words around it."""
        try:
            super().instantiate_classes()
        except ValueError as error:
            raise ValueError(tell(str(error))) from error

    def _parse_ckpt_path(self) -> None:
        """Refuses a damaged checkpoint before any work.

        Lightning's own method has the settings in the checkpoint replace those in the config, unasked.
        """
        path = self.config[self.command].get("ckpt_path")
        if path and Path(path).suffix == ".ckpt" and "://" not in str(path):
            check_readable(path)
        if path:  # that is what going on means
            warnings.filterwarnings("ignore", message="Checkpoint directory .* exists and is not empty")

    def _run_subcommand(self, subcommand: str) -> None:
        try:
            with full_disk_named(Path(self.trainer.default_root_dir)), self._alone(), self._recorded():
                super()._run_subcommand(subcommand)
        except SystemExit as stop:  # what Lightning makes of a Ctrl-C
            if isinstance(stop.__context__, KeyboardInterrupt):
                raise KeyboardInterrupt(self._way_on()) from None
            raise

    def _has_folder(self) -> bool:
        """Was a folder given for what the command leaves, and is this the process that writes there?"""
        config, trainer = self.config[self.command], self.trainer
        return bool(
            config.trainer.default_root_dir and not trainer.fast_dev_run and trainer.is_global_zero  # type: ignore[attr-defined]
        )

    def _alone(self) -> AbstractContextManager[None]:
        """Keeps other commands out of the folder."""
        if not self._has_folder():
            return nullcontext()
        return alone_in(Path(self.trainer.default_root_dir), "--trainer.default_root_dir")

    def _recorded(self) -> AbstractContextManager[None]:
        """Says in ``run.json`` what is done."""
        if not self._has_folder():
            return nullcontext()
        seed = self.config[self.command].seed_everything
        return recorded(Path(self.trainer.default_root_dir), self.command, self.given, seed)

    def _way_on(self) -> str:
        newest = getattr(self.trainer.checkpoint_callback, "best_model_path", "")
        return f"after a checkpoint: --ckpt_path {newest} goes on from there" if newest else ""
