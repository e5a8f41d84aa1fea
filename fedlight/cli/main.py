"""Entry point of the command line; each command is imported when it is called, so that ``fedlight --help`` stays fast."""

import os
import sys
from importlib import import_module

from fedlight.support.console import one_line_errors, quiet_when_unread

USAGE = """usage: fedlight COMMAND ...

Federated fine-tuning of language models inside PyTorch Lightning.

  fit, validate, test, predict   train or use one module: fedlight fit --config FILE [--KEY VALUE ...]
                                 keys: fedlight fit --help; a complete file: add --print_config
  init DATA                      a config for your own data, with what was guessed and why: fedlight init --help
  run NAME                       a recipe from first stage to results: fedlight run demo
                                 all recipes: fedlight run --help; only check everything: --dry-run; small: --twin
  plan                           which devices could take part, from a config alone: fedlight plan --help
  device measure --name NAME     a profile of this machine, in two minutes, for fleets and plans
  flower init --config FILE DIR  the same experiment on real devices: the folder of a Flower app; flower up DIR rehearses it
  client check --config FILE     on a device, before it joins: whether versions, data, model and memory fit
  methods, devices               what a config can name, and which devices and fleets there are, with one line each
  models                         pretrained models by name; models get NAME fetches one, once
  export RUN                     the trained model for other programs: PEFT, transformers, GGUF; onto the hub
  chat RUN                       the tuned model beside the raw one, in the terminal; --selector RUN compares them
  report RUN ...                 a page about runs, for a browser: fedlight report runs/demo --open

  help COMMAND                   what a command does, as COMMAND --help

  --threads N                    of torch, for any command: 1 where other processes keep the cores busy

A second call of the same run skips what is done and resumes what was stopped."""


OF_LIGHTNING = ("fit", "validate", "test", "predict")
LISTED = ("methods", "devices")
MODULES = {
    "init": "fedlight.cli.init",
    "run": "fedlight.cli.run",
    "plan": "fedlight.plan.command",
    "device": "fedlight.devices.measure.command",
    "flower": "fedlight.cli.flower",
    "client": "fedlight.cli.client",
    "models": "fedlight.cli.models",
    "report": "fedlight.report.command",
    "export": "fedlight.export.command",
    "chat": "fedlight.export.chat",
}
"""Command -> module with its ``main``, which is given the other arguments."""
COMMANDS = (*OF_LIGHTNING, *LISTED, *MODULES)
THREADS = "--threads"
VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
"""Variables of the environment that torch's and numpy's libraries read."""


def main(argv: list[str] | None = None) -> None:
    """Run ``fedlight`` with the arguments of the process, or those given; see `one_line_errors` for its exit codes."""
    # The outer one gets the error of a closed pipe, which the inner one lets pass.
    with quiet_when_unread(), one_line_errors():
        _main(take_threads(sys.argv[1:] if argv is None else argv))


def _main(argv: list[str]) -> None:
    if argv[:1] == ["help"]:
        argv = [*argv[1:], "--help"]
    command = argv[0] if argv else "--help"
    if command in ("-h", "--help"):
        print(USAGE)
    elif command == "--version":
        from fedlight import __version__

        print(f"fedlight {__version__}")
    elif command in MODULES:
        import_module(MODULES[command]).main(argv[1:])
    elif command in LISTED:
        from fedlight.cli import listing

        if argv[1:] in (["-h"], ["--help"]):  # the list itself is the help
            print(f"usage: fedlight {command}\n")
        elif argv[1:]:
            raise ValueError(f"fedlight {command} takes no arguments: leave out {' '.join(argv[1:])}")
        getattr(listing, command)()
    elif command in OF_LIGHTNING:
        run_lightning_command(argv)
    else:
        from fedlight.support.words import near

        known = f"; the commands are {', '.join(COMMANDS)}"
        reason = f"there is no command {command!r}{near(command, COMMANDS) or known}"
        if command.startswith("-"):
            reason = f"{command} comes after a command, as in fedlight fit {command}{known}"
        raise ValueError(f"{reason} (fedlight --help says what they do)")


def run_lightning_command(argv: list[str]) -> None:
    """Run ``fit``, ``validate``, ``test`` or ``predict``, or print its help."""
    from fedlight.lightning_cli.help_page import help_page, wants_help

    wanted = wants_help(argv[1:])
    if wanted == "page":
        print(help_page(argv[0]))
        sys.exit()
    from fedlight.lightning_cli.cli import lightning_cli

    lightning_cli([argv[0], "--help"] if wanted else argv, resumes=True)  # of `--help all` the parser's page


def take_threads(arguments: list[str]) -> list[str]:
    """Set the number of threads of torch if the arguments give one, anywhere; return the other arguments.

    It is no key of a config: it belongs to the machine and not to the experiment.

    Raises:
        ValueError: the number is missing, no whole number, or below 1.
    """
    others, words = [], iter(arguments)
    for word in words:
        name, equals, value = word.partition("=")
        if name == THREADS:
            number = value if equals else next(words, "")
            # Other scripts have digits too.
            if not number.isascii() or not number.isdecimal() or int(number) < 1:
                given = f"{THREADS} {number}".rstrip()
                raise ValueError(f"{given} needs a number of at least 1, as in {THREADS} 1")
            # Before a command imports the libraries, which read these when they are loaded; processes inherit them.
            os.environ.update(dict.fromkeys(VARIABLES, number))
            if "torch" in sys.modules:  # in a process that has run another command
                sys.modules["torch"].set_num_threads(int(number))
        else:
            others.append(word)
    return others
