"""``fedlight client check --config FILE [--set SETTINGS] [--memory-gib G] [--KEY VALUE ...]``."""

import argparse
import shlex
import sys
from collections.abc import Sequence

from fedlight.support.console import OneLineArguments

ABOUT = """Say whether this machine can take part in a deployment as a node, before it joins:

  fedlight client check --config selector.yaml --data.init_args.source=/data/votes.jsonl

Versions, config, memory, data and model are looked at in this order; nothing is trained and nothing is sent. Keys are those
of `fedlight fit`, as in --node-config. The exit code is 0 where it can take part, and 2 with the remedy where it cannot."""


def main(argv: Sequence[str]) -> None:
    """Run ``fedlight client``."""
    options, settings = make_parser().parse_known_args(argv)
    from fedlight.cli.client_check import check, last_line  # late: --help and wrong options need no torch
    from fedlight.preflight.finding import State, show

    # `set` is split as the server and the nodes of an app do.
    arguments = [f"--config={options.config}", *shlex.split(options.set), *settings]
    findings = check(arguments, options.memory_gib)
    show("This machine as a node", findings, last_line(findings))
    if any(finding.state is State.PROBLEM for finding in findings):
        sys.exit(2)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of ``fedlight client``; keys of the config are left over."""
    parser = OneLineArguments("fedlight client", description="A node of a deployment.", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", metavar="check", required=True)
    trial = commands.add_parser(
        "check",
        help="whether this machine can take part",
        usage="fedlight client check --config FILE [--set SETTINGS] [--memory-gib G] [--KEY VALUE ...]",
        description=ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    trial.add_argument("--config", required=True, metavar="FILE", help="config of the app")
    trial.add_argument("--set", default="", metavar="SETTINGS", help="the app's setting `set`, further keys")
    trial.add_argument(
        "--memory-gib", type=float, metavar="G", help="memory that training may take; what is free without it"
    )
    return parser
