"""What a fit prints: a plain one says these lines and no others, and what asks for something is heard."""

import ast
import logging
import re
import subprocess
import sys
import warnings
from pathlib import Path

import bitsandbytes
import lightning
import pytest
from tiny_world import HELDOUT, VOTES, fedlight

from fedlight.support.console import NOTICES, one_line_errors, quiet_logs

LIGHTNING = "lightning.pytorch.utilities.rank_zero"
KERNEL = (
    "Failed to load CPU gemm_4bit_forward from kernels-community: %s. Please make sure you already "
    "`pip install kernels` and the kernels >= 0.11.1"
)


@pytest.fixture(scope="module")
def printed(tiny_model, tmp_path_factory):
    """Standard output and standard error of two rounds, neither of them a terminal."""
    folder = tmp_path_factory.mktemp("plain")
    command = [sys.executable, "-m", "fedlight", "fit", "--config=selector.yaml", f"--data.source={VOTES}"]
    command += [f"--data.split.test_source={HELDOUT}", "--trainer.max_epochs=2", "--trainer.accelerator=cpu"]
    command += ["--federated.clients_per_round=2", "--federated.local_steps=1", f"--model.model={tiny_model}"]
    command += ["--trainer.default_root_dir=run"]
    environment = {"PYTHONPATH": str(Path(__file__).parents[2]), "HF_HUB_OFFLINE": "1"}
    environment["OMP_NUM_THREADS"] = "1"
    environment |= {"PATH": "/usr/bin:/bin", "HOME": str(folder), "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)
    return done.stdout, done.stderr


def test_on_standard_output_are_rounds_and_the_table_of_the_end(printed):
    number, time = r"\d+\.\d{4}", r"\(\d+\.\d s(, \d.* left)?\)"
    metrics = rf"loss {number}  val/loss {number}  val/accuracy {number}  {time}"
    expected = [
        *(rf"round {i}/2: {metrics}" for i in (1, 2)),
        r" +2 rounds in [\d.]+ (seconds|minutes) +",
        *(r"┏.*┓", r"┃ metric  .*┃", r"┡.*┩"),
        *(rf"│ {name} +│.*│" for name in ("loss", "val/loss", "val/accuracy")),
        r"└.*┘",
        r"[\d.]+ MB down and [\d.]+ MB up in 4 visits to \d clients",
        r"run: adapter/, checkpoints/, .*visits\.csv",
        r"as a page: fedlight report run --open",
    ]
    lines = printed[0].splitlines()
    unlike = [line for line, pattern in zip(lines, expected, strict=True) if not re.fullmatch(pattern, line)]
    assert unlike == []


def test_on_standard_error_is_what_became_of_the_data(printed):
    source, clients = printed[1].splitlines()
    assert source.startswith(f"{VOTES}: ")
    assert re.match(r"6 clients with \d+ to \d+ pairs", clients)


def test_nothing_but_the_named_notices_is_left_out(caplog):
    said = logging.getLogger(LIGHTNING)
    with quiet_logs(), caplog.at_level(logging.INFO):
        said.info("GPU available: False, used: False")
        said.info("GPU available: True (cuda), used: True")
        said.info("GPU available: True (cuda), used: False")  # something can be done about that
        said.info("`Trainer.fit` stopped: `max_epochs=2` reached.")
        said.info("`Trainer.fit` stopped: No training batches.")
        for sentence in (
            "(limit_train_batches=1)` was configured so 1 batch per epoch will be used.",
            "(limit_val_batches=1)` was configured so 1 batch will be used.",
            "(limit_test_batches=1.0)` was configured so 100% of the batches will be used..",
            "(limit_train_batches=1.0)` was configured so 100% of the batches per epoch will be used..",
            "(val_check_interval=1)` was configured so validation will run after every batch.",
            "(val_check_interval=1.0)` was configured so validation will run at the end of the training epoch..",
        ):
            said.info(f"`Trainer{sentence}")
        said.info("`Trainer(overfit_batches=1)` was configured so 1 batch will be used.")
        logging.getLogger("elsewhere").info("GPU available: False, used: False")
        kernels = logging.getLogger("bitsandbytes.backends.cpu.ops")
        for reason in ("No module named 'kernels'", "no space left on device"):
            kernels.warning(KERNEL, reason)
        warnings.warn("The 'train_dataloader' does not have many workers which may be", stacklevel=1)
        with pytest.raises(UserWarning, match="is not empty"):  # as warnings are errors here
            warnings.warn("Checkpoint directory runs exists and is not empty.", stacklevel=1)
    assert caplog.messages == [
        "GPU available: True (cuda), used: False",
        "`Trainer.fit` stopped: No training batches.",
        "`Trainer(overfit_batches=1)` was configured so 1 batch will be used.",
        "GPU available: False, used: False",
        KERNEL % "no space left on device",
    ]


def test_each_notice_is_still_said_by_lightning():
    """A text that a new release words differently is left out no longer, and has to be looked at again."""
    root = Path(lightning.__file__).parent
    connectors = ("logger_connector/logger_connector.py", "callback_connector.py", "data_connector.py")
    files = [root / "pytorch/trainer/connectors" / file for file in connectors]
    places = ("trainer/setup.py", "loops/fit_loop.py", "accelerators/cuda.py")
    files += [root / "pytorch" / file for file in places]
    files += [root / "fabric" / file for file in ("utilities/seed.py", "accelerators/cuda.py")]
    text = "\n".join(file.read_text() for file in files)
    said = [
        "Tip: For seamless cloud logging",
        "Tip: For seamless cloud uploads",
        "GPU available: {",
        "TPU available: {",
        "`Trainer.fit` stopped: `max_epochs=",
        "that has Tensor Cores",
        "Seed set to",
        "{name}=1)` was configured so {message}",
        "{name}=1.0)` was configured so {message}",
        "1 batch will be used.",
        "100% of the batches per epoch will be used",
        "will run after every",
        "LOCAL_RANK: {local_rank} - CUDA_VISIBLE_DEVICES",
        "does not have many workers",
    ]
    assert [words for words in said if words not in text] == []


def test_bitsandbytes_still_says_that_a_kernel_is_missing():
    """On processors with AVX512-BF16, where the file's kernels are registered."""
    file = Path(bitsandbytes.__file__).parent / "backends/cpu/ops.py"
    calls = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
    said = [call.args for call in calls if ast.unparse(call.func) == "logger.warning"]
    assert KERNEL in [ast.literal_eval(words[0]) for words in said]


def test_loggers_and_warnings_are_as_before_when_a_command_ends():
    loggers = [logging.getLogger(name) for name in NOTICES]
    before = [list(logger.filters) for logger in loggers], list(warnings.filters)
    with pytest.raises(SystemExit), one_line_errors():
        assert [list(logger.filters) for logger in loggers] != before[0]
        raise ValueError("a setting")
    assert ([list(logger.filters) for logger in loggers], list(warnings.filters)) == before


@pytest.mark.parametrize(
    ("arguments", "work"),
    [
        ("fit --config=selector.yaml", "fedlight.lightning_cli.cli.lightning_cli"),
        ("predict --config=completions.yaml", "fedlight.lightning_cli.cli.lightning_cli"),
        ("run demo", "fedlight.recipes.recipe.run"),
        ("run demo --dry-run", "fedlight.preflight.dry_run.dry_run"),
        ("plan --config=selector.yaml", "fedlight.plan.plan.make_plan"),
        ("report runs/demo", "fedlight.report.page.write_report"),
    ],
)
def test_no_command_says_that_a_kernel_is_missing(arguments, work, monkeypatch, caplog):
    def say(*args, **kwargs):
        logging.getLogger("bitsandbytes.backends.cpu.ops").warning(KERNEL, "No module named 'kernels'")
        logging.getLogger("bitsandbytes.backends.cpu.ops").warning("another notice")
        sys.exit(3)

    monkeypatch.setattr(work, say)
    assert fedlight(*arguments.split()).code == 3
    assert caplog.messages == ["another notice"]
