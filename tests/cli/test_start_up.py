"""What a command imports before it works: torch and Lightning take five seconds, so only those that train pay for them."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = {
    *("torch", "lightning", "torchmetrics", "transformers", "peft", "datasets", "bitsandbytes", "accelerate"),
    *("sentence_transformers", "scipy", "sklearn", "pandas", "omegaconf", "jsonargparse", "matplotlib"),
}


def imported(code: str) -> set[str]:
    """Packages that a new interpreter has imported after ``code``."""
    packages = "{name.partition('.')[0] for name in sys.modules}"
    code = f"import atexit, sys\natexit.register(lambda: print(*{packages}, file=sys.stderr))\n{code}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    return set(done.stderr.split())


COMMANDS = (
    "run",
    "plan",
    "device",
    "device measure",
    "flower",
    "flower init",
    "flower up",
    "client",
    "client check",
    "report",
    "export",
    "fit",
    "validate",
    "test",
    "predict",
)


HELP = """
import sys
from fedlight.cli.main import main
for command in {commands}:
    try:
        main(command.split())
    except SystemExit as stop:
        assert not stop.code, command
    print("imported", command, *set(sys.modules) & {heavy}, sep="|")
"""


def test_help_imports_nothing_heavy():
    """Of all commands one after the other: the first line with a package is of the command that imports it."""
    commands = ["--help", "--version", *(f"{command} --help" for command in COMMANDS)]
    done = subprocess.run(
        [sys.executable, "-c", HELP.format(commands=commands, heavy=HEAVY)],
        **{"capture_output": True, "text": True, "cwd": ROOT, "check": True},
    )
    said = [line for line in done.stdout.splitlines() if line.startswith("imported|")]
    assert said == [f"imported|{command}" for command in commands]


def test_reports_and_recipes_are_read_without_torch():
    assert imported("import fedlight.report.page") & HEAVY == {"matplotlib"}
    assert imported("from fedlight.recipes.recipe import load; load('demo')") & HEAVY == {"omegaconf"}


@pytest.mark.slow
def test_settings_of_a_fit_are_parsed_without_what_its_classes_need_later():
    code = "from fedlight.cli.main import main; main('fit --config selector.yaml --print_config'.split())"
    later = {"peft", "datasets", "bitsandbytes", "accelerate", "sentence_transformers", "sklearn", "pandas"}
    assert imported(code) & later == set()
