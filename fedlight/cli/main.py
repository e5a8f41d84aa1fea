"""Entry point of the command line; each command is imported when it is called, so that ``fedlight --help`` stays fast."""

import sys

from fedlight.cli.threads import take_threads
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
  flower init --config FILE DIR  the same experiment on real devices: the folder of a Flower app
  client check --config FILE     on a device, before it joins: whether versions, data, model and memory fit
  methods, devices               what a config can name, and which devices and fleets there are, with one line each
  export RUN                     the trained model for other programs: PEFT, transformers, GGUF; onto the hub
  chat RUN                       the tuned model beside the raw one, in the terminal; --selector RUN compares them
  report RUN ...                 a page about runs, for a browser: fedlight report runs/demo --open

  help COMMAND                   what a command does, as COMMAND --help
  completion bash                a script for the shell, or zsh: eval "$(fedlight completion bash)"

  --threads N                    of torch, for any command: 1 where other processes keep the cores busy

A second call of the same run skips what is done and resumes what was stopped."""


COMMANDS = (
    "fit",
    "validate",
    "test",
    "predict",
    "init",
    "run",
    "plan",
    "device",
    "flower",
    "client",
    "report",
    "methods",
    "devices",
    "completion",
    "export",
    "chat",
)


def main(argv: list[str] | None = None) -> None:
    """Run ``fedlight`` with the arguments of the process, or those given."""
    with quiet_when_unread():
        with one_line_errors():
            arguments = take_threads(sys.argv[1:] if argv is None else argv)
        _main(arguments)


def _main(argv: list[str]) -> None:
    if argv[:1] == ["help"]:
        argv = [*argv[1:], "--help"]
    command = argv[0] if argv else "--help"
    if command in ("-h", "--help"):
        print(USAGE)
    elif command == "--version":
        from fedlight import __version__

        print(f"fedlight {__version__}")
    elif command == "run":
        with one_line_errors():
            from fedlight.cli.run import main as run_recipe

            run_recipe(argv[1:])
    elif command == "init":
        with one_line_errors():
            from fedlight.cli.init import main as init_config

            init_config(argv[1:])
    elif command == "plan":
        with one_line_errors():
            from fedlight.plan.command import main as plan_run

            plan_run(argv[1:])
    elif command == "device":
        with one_line_errors():
            from fedlight.devices.measure.command import main as device_command

            device_command(argv[1:])
    elif command == "flower":
        with one_line_errors():
            from fedlight.cli.flower import main as flower_command

            flower_command(argv[1:])
    elif command == "client":
        with one_line_errors():
            from fedlight.cli.client import main as client_command

            client_command(argv[1:])
    elif command == "report":
        with one_line_errors():
            from fedlight.report.command import main as report_runs

            report_runs(argv[1:])
    elif command in ("methods", "devices"):
        with one_line_errors():
            from fedlight.cli import listing

            if argv[1:] in (["-h"], ["--help"]):
                print(f"usage: fedlight {argv[0]}\n")
            else:
                _refuse_more(argv)
            getattr(listing, command)()
    elif command == "completion":
        with one_line_errors():
            from fedlight.cli.completion import main as print_script

            print_script(argv[1:], COMMANDS)
    elif command == "export":
        with one_line_errors():
            from fedlight.export.command import main as export_run

            export_run(argv[1:])
    elif command == "chat":
        with one_line_errors():
            from fedlight.export.chat import main as chat

            chat(argv[1:])
    elif command in COMMANDS:
        with one_line_errors():
            run_lightning_command(argv)
    else:
        sys.exit(f"fedlight: {_no_command(command)}\n(fedlight --help says what they do)")


def _refuse_more(argv: list[str]) -> None:
    if len(argv) > 1:
        raise ValueError(f"fedlight {argv[0]} takes no arguments: leave out {' '.join(argv[1:])}")


def run_lightning_command(argv: list[str]) -> None:
    """Run ``fit``, ``validate``, ``test`` or ``predict``, or print its help."""
    from fedlight.lightning_cli.help_page import help_page, wants_help

    wanted = wants_help(argv[1:])
    if wanted == "page":
        print(help_page(argv[0]))
        sys.exit()
    from fedlight.lightning_cli.cli import lightning_cli

    lightning_cli([argv[0], "--help"] if wanted else argv)


def _no_command(given: str) -> str:
    if given.startswith("-"):
        return f"{given} comes after a command, as in fedlight fit {given}; the commands are {', '.join(COMMANDS)}"
    from fedlight.support.words import near

    return (
        f"there is no command {given!r}{near(given, COMMANDS) or '; the commands are ' + ', '.join(COMMANDS)}"
    )
