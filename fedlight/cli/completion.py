"""``fedlight completion SHELL``: a script that lets a shell complete commands, recipes, configs and keys (shtab)."""

import argparse
import sys
from collections.abc import Sequence

from fedlight.cli.listing import titles
from fedlight.conf import configs
from fedlight.conf import path as conf_path
from fedlight.lightning_cli.help_page import settings
from fedlight.support.console import OneLineArguments


def main(argv: list[str]) -> None:
    """Print the script for bash or zsh: ``eval "$(fedlight completion bash)"``.

    Raises:
        ModuleNotFoundError: shtab is not installed.
    """
    parser = OneLineArguments("fedlight completion", description='eval "$(fedlight completion bash)"')
    parser.add_argument("shell", choices=("bash", "zsh"))
    shell = parser.parse_args(argv).shell
    try:
        import shtab
    except ModuleNotFoundError as error:
        # Without a module's name, so that it is shown in one line: see `one_line_errors`.
        raise ModuleNotFoundError(
            "shtab is missing, which writes the script: pip install 'fedlight[completion]'"
        ) from error
    from fedlight.cli.main import COMMANDS

    sys.stdout.write(shtab.complete(commands(COMMANDS), shell=shell) + "\n")


def commands(names: Sequence[str]) -> argparse.ArgumentParser:
    """Return a parser of all commands, with those words that can be completed."""
    parser = argparse.ArgumentParser("fedlight")
    subparsers = parser.add_subparsers(dest="command")
    for name in names:
        command = subparsers.add_parser(name, help=name)  # shtab leaves out commands without help
        if name in ("fit", "validate", "test", "predict"):
            command.add_argument("--config", choices=configs())
            for part, classes in KEYS.items():
                for setting in (setting for kind in classes for setting in settings(kind)):
                    command.add_argument(f"--{part}.{setting.name}")
        elif name == "run":
            command.add_argument("name", choices=[name for name, _ in titles(conf_path("recipes"))])
            for option in ("--seeds", "--output", "--only", "--processes", "--twin", "--dry-run"):
                command.add_argument(option)
    return parser


KEYS = {
    "federated": ("FederatedLoop",),
    "model": ("modules.language.module.LanguageModule",),
    "data": ("FederatedDataModule",),
}
"""Part of a config -> classes whose keys are completed."""
