"""`docs/stability.md`, sentence by sentence: each is named by the test that holds it."""

import ast
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.version import Version
from recipe_runs import ran
from tiny_world import fedlight, refused, table, tiny_selector

import fedlight as package
from fedlight.cli import listing
from fedlight.cli.main import COMMANDS
from fedlight.flower.messages import Parcel, Refused
from fedlight.flower.nodes import Nodes
from fedlight.lightning_cli.class_names import class_of
from fedlight.preflight.finding import exit_code, ok, problem, unknown

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/stability.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
HELD: set[str] = set()
IN_OTHER_FILES = {
    "They do so on any number of processes and in any order of clients.": [
        "processes/test_same_bits.py::test_every_process_ends_with_what_one_process_ends_with",
        "federation/test_exact_sum.py::test_no_order_and_no_split_changes_a_bit",
    ],
    "A run that was stopped and goes on ends with the same bits as without the stop.": [
        "lightning_cli/test_second_fit.py::test_fit_twice_stopped_and_begun_anew",
        "whole/test_interruptions.py::test_interrupted_at_every_kind_of_moment",
    ],
}
"""Sentence -> tests in other files that hold it."""


def sentences() -> list[str]:
    """Sentences of the page, and rows of its tables."""
    found = []
    for block in PAGE.split("\n\n"):
        if block.startswith("|"):
            found += block.strip().splitlines()[2:]
        elif not block.startswith("#"):
            found += re.split(r"(?<=[.]) (?=[A-Z`])", " ".join(block.split()))
    return found


def holds(*beginnings: str):
    """Marks a test that holds the sentences that begin so."""

    def marked(test):
        for beginning in beginnings:
            (sentence,) = [one for one in sentences() if one.startswith(beginning)]
            HELD.add(sentence)
        return test

    return marked


def test_every_sentence_is_held_by_a_test():
    assert set(sentences()) == HELD | set(IN_OTHER_FILES)


@pytest.mark.parametrize("test", [one for tests in IN_OTHER_FILES.values() for one in tests])
def test_tests_in_other_files_are_there(test):
    file, name = test.split("::")
    tree = ast.parse((ROOT / "tests" / file).read_text())
    assert name in [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]


@holds("fedlight's versions are", "Before 1.0, a minor release", "The [changelog]")
def test_versions_and_changelog():
    assert re.fullmatch(r"\d+\.\d+\.\d+", package.__version__)
    alpha = "Development Status :: 3 - Alpha" in PROJECT["classifiers"]
    assert alpha == (int(package.__version__.partition(".")[0]) < 1)
    headings = re.findall(r"^### (.*)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert set(headings) <= {"Added", "Changed", "Fixed", "Removed"}


@holds("| Python |")
def test_public_names_are_found_with_their_arguments():
    for name in package.__all__:
        assert not name.startswith("_") or name == "__version__"
        found = getattr(package, name)
        if inspect.isclass(found) or inspect.isfunction(found):
            assert inspect.signature(found) is not None


@holds("| base classes")
@pytest.mark.parametrize("name", ["Algorithm", "Codec", "Task", "Attack"])
def test_methods_of_base_classes_are_documented(name):
    base = class_of(name)
    own = {key: value for key, value in vars(base).items() if callable(value) and not key.startswith("_")}
    assert own
    assert [key for key, value in own.items() if not inspect.getdoc(getattr(base, key))] == []


@holds("| command line |")
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_options(command):
    shown = ran(command, "--help")
    assert "usage: fedlight" in shown.out


@holds("| configs |", "Nothing is deprecated", "The command line suggests", "A name that is")
def test_keys_and_class_names_are_found_or_refused():
    given = ["fit", "--config=selector.yaml"]
    prox = ("--federated.algorithm=FedProx", "--federated.algorithm.mu=1")
    assert "FedProx\n" in ran(*given, *prox, "--print_config").out
    misspelt = {"--federated.local_step=3": "local_steps", "--trainer.max_epohcs=3": "trainer.max_epochs"}
    misspelt |= {"--federated.algorithm=FedAvgg": "FedAvg", "--data.sorce=x": "source"}
    for wrong, nearest in misspelt.items():
        outcome = fedlight(*given, wrong)
        assert (outcome.code, f"did you mean {nearest!r}" in refused(outcome)) == (2, True), outcome.err
    with pytest.raises(ImportError):
        exec("from fedlight import FedAvgg")
    with pytest.raises(ImportError, match=r"write `from fedlight\.judges import ChatJudge`"):
        exec("from fedlight import ChatJudge")
    with pytest.raises(TypeError, match="local_step"):
        package.FederatedLoop(local_step=3)


@pytest.fixture(scope="module")
def run(tiny_model, tmp_path_factory):
    """A run with all tables of a federation."""
    folder = tmp_path_factory.mktemp("run")
    ran("fit", *several_selectors(tiny_model, folder))
    return folder


ROUNDS = ("--trainer.max_epochs=4", "--federated.algorithm.warmup_rounds=1")


def several_selectors(model, folder, *more):
    given = tiny_selector(model, folder, "--data.split.val_share=0.3", "--model.num_adapters=3", *more)
    return ["--config=fedbiscuit.yaml", *given[1:], *ROUNDS]


COLUMNS = {
    "visits.csv": "round,client,split,steps,examples,loss,bytes_down,bytes_up,seconds,reason",
    "clients.csv": "stage,round,client,examples,group,selector,accuracy,own_accuracy,own_both_orders",
    "groups.csv": "round,client,selector,loss_0,loss_1,loss_2,known_group",
    "data.csv": "client,label,split,rows",
}
COMMAND = {
    *("command", "configs", "other_arguments", "seed", "versions", "machine", "threads"),
    *("start", "state", "end", "seconds", "files", "epochs"),
}


@holds("| a run's folder |")
def test_columns_and_keys_of_a_run(run, tmp_path, monkeypatch):
    for name, columns in COLUMNS.items():
        assert (run / name).read_text().splitlines()[0].startswith(columns), name
    (entry,) = json.loads((run / "run.json").read_text())["commands"]
    assert set(entry) >= COMMAND

    def note(value):
        return {"rows": [{"method": "one", "value": value}]}

    monkeypatch.setattr("fedlight.recipes.steps.note", note, raising=False)
    stage = {"call": "fedlight.recipes.steps.note", "with": {"value": 3}}
    (tmp_path / "small.yaml").write_text(json.dumps({"seeds": [0], "stages": {"one": stage}}))
    ran("run", str(tmp_path / "small.yaml"), f"--output={tmp_path / 'out'}")
    results = json.loads((tmp_path / "out/results.json").read_text())
    assert set(results) >= {"recipe", "rows", "seconds", "versions", "digest"}
    assert results["rows"] == [{"method": "one", "value": 3, "seed": 0}]


@holds("| checkpoints |", "| adapters |")
def test_checkpoints_and_adapters_are_read(run, tiny_model):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    content = torch.load(run / "checkpoints/epoch=3.ckpt", weights_only=True)
    assert content["callbacks"]["FederatedLoop"]["rounds_done"] == 4
    adapters = sorted(file.parent for file in (run / "adapter").rglob("adapter_config.json"))
    assert len(adapters) == 3
    for adapter in adapters:
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model), adapter)
        assert any(weight.abs().sum() > 0 for name, weight in model.named_parameters() if "lora_B" in name)


@holds("| messages between server and nodes |")
def test_a_node_of_another_version_is_refused():
    own = {"fedlight": "1.0.0", "torch": "2.13.0"}
    with pytest.raises(Refused, match=r"its torch is '2.14.0', the server's '2.13.0': give both the same"):
        Nodes(None, "run", versions=own)._take(1, Parcel({**own, "torch": "2.14.0"}).header)


INPUT_ERRORS = [
    "fit --config missing.yaml",
    "fit --config broken.yaml",
    "fit --config empty.yaml",
    "fit --config folder",
    "fit",
    "fit --config selector.yaml --model.nope 3",
    "fit --config selector.yaml --trainer.max_epochs many",
    "fit --config selector.yaml --trainer.max_epochs=0 --trainer.default_root_dir=r",
    "fit --config selector.yaml --data.source missing.csv --trainer.default_root_dir=r",
    "fit --config selector.yaml --ckpt_path missing.ckpt --trainer.default_root_dir=r",
    "validate --config missing.yaml",
    "test --config broken.yaml",
    "predict --config missing.yaml",
    *("init", "init missing.csv", "init folder", "init broken.yaml", "init x.csv --method nope"),
    *("run", "run nope", "run broken.yaml", "run demo nope=3", "run demo --processes 0", "run demo --nope"),
    "run demo --only nope",
    "run demo nope=3 --dry-run",
    *("plan", "plan --config missing.yaml", "plan --config selector.yaml --fleet nope"),
    *("device", "device nope", "device measure"),
    *("flower", "flower nope", "flower init", "flower init --config missing.yaml app"),
    *("flower up", "flower up folder", "flower up missing --nodes many"),
    *("client", "client nope", "client check", "client check --config missing.yaml"),
    *("export", "export missing", "export folder", "export folder --format nope"),
    *("report", "report missing", "report folder", "report x.csv"),
    *("chat", "chat missing", "chat folder"),
    *("methods x", "devices x"),
    *("nope", "--nope", "--threads", "--threads x fit", "--threads 0 fit"),
]


@holds("| 2 |")
@pytest.mark.parametrize("command", INPUT_ERRORS)
def test_an_error_of_the_input_is_2_and_one_line(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDLIGHT_TRACEBACK", raising=False)
    Path("broken.yaml").write_text("a: [1\n")
    Path("empty.yaml").touch()
    Path("x.csv").write_text("a,b\n1,2\n")
    Path("folder").mkdir()
    outcome = fedlight(*command.split())
    assert outcome.code == 2
    assert "Traceback" not in outcome.err
    if command != "client check --config missing.yaml":  # a table of what was checked
        assert outcome.err.strip().splitlines()[0].startswith("fedlight: ")


def test_with_a_stack_trace_the_code_is_the_same(monkeypatch):
    monkeypatch.setenv("FEDLIGHT_TRACEBACK", "1")
    outcome = fedlight("nope")
    assert (outcome.code, "Traceback" in outcome.err) == (2, True)


@holds("| 0 |", "| 3 |")
def test_done_and_unknown():
    ran("methods")
    assert [exit_code([made("a", "")]) for made in (ok, unknown, problem)] == [0, 3, 2]


@pytest.mark.slow
@holds("| 1 |")
def test_an_error_of_the_program_is_1_with_its_stack():
    code = "from fedlight.cli import listing, main\ndef fails(): return {}['x']\n"
    code += "listing.methods = fails\nmain.main(['methods'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, "KeyError: 'x'" in done.stderr) == (1, True)


@holds("| 141 |")
def test_an_output_that_has_no_reader():
    unread, pipe = os.pipe()
    os.close(unread)
    done = subprocess.run([sys.executable, "-m", "fedlight", "methods"], stdout=pipe, stderr=subprocess.PIPE)
    os.close(pipe)
    assert (done.returncode, done.stderr) == (141, b"")


@holds("| 130 |", "| 143 |")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_have_their_codes(monkeypatch, number, code):
    def stopped():
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.kill(os.getpid(), number)

    monkeypatch.setattr(listing, "methods", stopped)
    outcome = fedlight("methods")
    assert (outcome.code, outcome.err) == (code, "fedlight: stopped\n")


@holds("The same version, dependencies, seed and number of threads")
def test_the_same_run_gives_the_same_bits(run, tiny_model, tmp_path):
    ran("fit", *several_selectors(tiny_model, tmp_path))
    for file in (run / "adapter").rglob("*.safetensors"):
        assert (tmp_path / file.relative_to(run)).read_bytes() == file.read_bytes()
    assert table(tmp_path / "groups.csv") == table(run / "groups.csv")


@pytest.mark.slow
@holds("Four things change the last bits", "The last are chosen")
def test_what_changes_the_last_bits(tiny_model, tmp_path):
    losses = []
    for at_once in (1, 2):
        folder = tmp_path / str(at_once)
        dropout = ("--model.lora.dropout=0", f"--federated.clients_at_once={at_once}")
        ran("fit", *tiny_selector(tiny_model, folder, *dropout))
        losses.append([float(row["loss"]) for row in table(folder / "visits.csv")])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    code = "import torch; print(torch.backends.cpu.get_cpu_capability())"
    least = os.environ | {"ATEN_CPU_CAPABILITY": "default"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=least)
    assert done.stdout.strip() in ("DEFAULT", "NO AVX")


@holds("Between versions, a change that moves a number", "`make figures` reruns")
def test_published_numbers_are_rerun():
    targets = re.findall(r"^(\w+):.*reproduce|^(\w+):.*##", (ROOT / "Makefile").read_text(), re.M)
    assert {"figures", "reproduce"} <= {name for pair in targets for name in pair}
    assert "number" in (ROOT / "CHANGELOG.md").read_text()


@holds("`pyproject.toml` lists", "Every change is tested with")
def test_dependencies_have_bounds_and_pins():
    lowest = PROJECT["requires-python"].removeprefix(">=")
    assert f"Programming Language :: Python :: {lowest}" in PROJECT["classifiers"]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    pins = {name.lower().replace("_", "-"): version.split()[0] for name, version in pins.items()}
    for requirement in map(Requirement, PROJECT["dependencies"]):
        (bound,) = [one for one in requirement.specifier if one.operator == ">="]
        assert Version(pins[requirement.name.lower()]) >= Version(bound.version), requirement
