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
    "client",
    "client check",
    "report",
    "export",
    "fit",
    "validate",
    "test",
    "predict",
)


@pytest.mark.parametrize("arguments", ["--help", "--version", *(f"{command} --help" for command in COMMANDS)])
def test_help_imports_nothing_heavy(arguments):
    code = f"from fedlight.cli.main import main; main({arguments.split()})"
    assert imported(code) & HEAVY == set()


def test_a_report_reads_files_without_torch():
    assert imported("import fedlight.report.page") & HEAVY == {"matplotlib"}


def test_a_recipe_is_read_without_torch():
    assert imported("from fedlight.recipes.recipe import load; load('demo')") & HEAVY == {"omegaconf"}


@pytest.mark.slow
def test_settings_of_a_fit_are_parsed_without_what_its_classes_need_later():
    code = "from fedlight.cli.main import main; main('fit --config selector.yaml --print_config'.split())"
    later = {"peft", "datasets", "bitsandbytes", "accelerate", "sentence_transformers", "sklearn", "pandas"}
    assert imported(code) & later == set()
