"""``fedlight flower init --config FILE FOLDER [--KEY VALUE ...]`` and ``fedlight flower up FOLDER [--nodes N]``."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from fedlight.support.console import OneLineArguments

UP = """Rehearse a deployment on this machine: start a SuperLink with TLS and SuperNodes with registered keys, run the app,
and stop them all:

  fedlight flower up my_app --nodes 3

Certificates, keys and logs are in FOLDER/rehearsal. The same again goes on from the newest checkpoint."""
ABOUT = """Write the folder of a Flower app that runs a config of fedlight on real devices:

  fedlight flower init --config selector.yaml my_app
  cd my_app && flwr run . --stream

Further keys of the config, as for `fedlight fit`, go into the app's setting `set`. The folder's README.md has the commands
of a simulation, of a SuperLink and its SuperNodes, of TLS and of node authentication. What a deployment does not have is
refused."""


def main(argv: Sequence[str]) -> None:
    """Run ``fedlight flower``."""
    given, settings = (argv, []) if argv[:1] == ["up"] else _apart(argv)
    args = make_parser().parse_args(given)
    if args.command == "up":
        from fedlight.flower.rehearsal import Rehearsal

        with Rehearsal(args.folder, args.nodes) as rehearsal:
            rehearsal.run(args.run_config)
        return
    from fedlight.cli.app_folder import write_app

    for line in write_app(args.config, args.folder, settings):
        print(line)
    print(f"{args.folder} is written: README.md has the commands; cd {args.folder} && flwr run . --stream")


def _apart(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the command's own arguments, and the keys of the config with their values, wherever they stand.

    Examples:
        >>> _apart(["init", "--config", "a.yaml", "--federated.local_steps", "3", "app", "--trainer.max_epochs=2"])
        (['init', '--config', 'a.yaml', 'app'], ['--federated.local_steps', '3', '--trainer.max_epochs=2'])
    """
    arguments: list[str] = []
    settings: list[str] = []
    to, has_value = arguments, False
    for argument in argv:
        key, equals, _ = argument.partition("=")
        if key.startswith("--"):
            to, has_value = settings if key not in ("--config", "--help") else arguments, not equals
        elif not has_value:  # argparse would take the value of an unknown key for the folder
            to = arguments
        else:
            has_value = False
        to.append(argument)
    return arguments, settings


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of ``fedlight flower``, without keys of the config."""
    parser = OneLineArguments("fedlight flower", description="Real devices, with Flower.", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", metavar="{init,up}", required=True)
    init = commands.add_parser(
        "init",
        help="write the folder of a Flower app",
        usage="fedlight flower init --config FILE FOLDER [--KEY VALUE ...]",
        description=ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    init.add_argument("--config", required=True, metavar="FILE", help="your config, or the name of one")
    init.add_argument("folder", type=Path, metavar="FOLDER", help="folder of the app: a new or an empty one")
    up = commands.add_parser(
        "up",
        help="rehearse its deployment on this machine",
        usage="fedlight flower up FOLDER [--nodes N] [--run-config TEXT]",
        description=UP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    up.add_argument("folder", type=Path, metavar="FOLDER", help="folder of the app")
    up.add_argument("--nodes", type=int, default=2, metavar="N", help="SuperNodes that share the clients (2)")
    up.add_argument("--run-config", default="", metavar="TEXT", help="settings of the app, as for flwr run")
    return parser
