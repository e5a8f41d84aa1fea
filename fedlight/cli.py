"""The command line: ``fedlight fit|validate|test|predict`` is a LightningCLI, ``fedlight run`` runs a recipe.

The key ``federated:`` holds the federated loop; without it the same config trains centrally. It stands beside
``trainer:`` rather than in ``trainer.callbacks``, because only there can the command line override a single value of it
(``--federated.clients_per_round 8``). Configs may refer to each other's values with ``${...}``.
"""

import sys
from typing import Any

USAGE = """usage: fedlight COMMAND ...

Federated fine-tuning of language models inside PyTorch Lightning.

  fit, validate, test, predict   train or use one module: fedlight fit --config FILE [--KEY VALUE ...]
                                 all keys: fedlight fit --help; a complete file: add --print_config
  run NAME                       a recipe from first stage to results: fedlight run demo
                                 all recipes: fedlight run --help

A second call of the same run does nothing that is done, and goes on where it was stopped."""


def main(argv: list[str] | None = None) -> None:
    """Entry point of ``fedlight`` and ``python -m fedlight``."""
    argv = sys.argv[1:] if argv is None else argv
    command = argv[0] if argv else "--help"
    if command in ("-h", "--help"):
        print(USAGE)
    elif command == "--version":
        from fedlight import __version__

        print(f"fedlight {__version__}")
    elif command == "run":
        from fedlight.recipes import main as run_recipe

        run_recipe(argv[1:])
    elif command in ("fit", "validate", "test", "predict"):
        from fedlight.errors import one_line_errors

        with one_line_errors():
            lightning_cli(argv)
    else:
        sys.exit(f"fedlight: no command {command!r}\n\n{USAGE}")


def lightning_cli(argv: list[str]) -> Any:
    """Parses and runs one Lightning command.

    Args:
        argv: the command and its arguments, such as ``["fit", "--config", "fedbis.yaml"]``.

    Returns:
        The ``FedlightCLI``, with its ``trainer``, ``model`` and ``datamodule``.
    """
    from fedlight.lightning_cli import FedlightCLI

    return FedlightCLI(args=argv)
