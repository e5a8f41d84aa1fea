"""The LightningCLI behind ``fedlight fit|validate|test|predict``; apart from cli.py, since torch loads for seconds."""

import os
import re
import sys
import warnings
from typing import Any, NoReturn

import lightning as L
from jsonargparse import set_parsing_settings
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from fedlight.callbacks.federated_loop import FederatedLoop


class OneLineParser(LightningArgumentParser):
    """Says in one line what is wrong, not in a page of everything that could have been given."""

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
    if found := re.search(r"(?:Expected a dot import path string|Not a valid subclass of [^:]*)[:.] *(\S+)", message):
        return f"{where}there is no class {found[1]!r}; give its name if fedlight has it, else package.module.Name"
    if expected := [line for line in re.findall(r"- (Expected .*)", message) if "NoneType" not in line]:
        given = re.findall(r"Given value: (.*)", message)
        return f"{where}{expected[0]}" + (f", given {given[0]}" if given else "")
    return " ".join(message.split())


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
            parser_class=OneLineParser,
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
