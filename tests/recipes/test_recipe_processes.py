import json
import os
import signal
import sys
import time

import pytest
import torch
from killed import Child
from recipe_runs import ran
from tiny_world import HELDOUT, PROMPTS, VOTES, fedlight, refused, table

from fedlight.recipes import followers
from fedlight.recipes.followers import Followers, for_processes, why_one_process
from fedlight.recipes.stages import Stage
from fedlight.support.files import result_of

pytestmark = pytest.mark.slow  # recipes in several processes


@pytest.fixture(scope="module")
def recipe(tiny_model, tmp_path_factory):
    """A selector trained in two rounds, held-out votes, completions in three batches, and a function."""
    common = {"seed_everything": "${seed}", "trainer.accelerator": "cpu", "model.model": tiny_model}
    selector = {
        "trainer.max_epochs": 2, "data.source": VOTES, "data.split.test_source": HELDOUT, "data.batch_size": 4,
        "federated.clients_per_round": 3, "federated.local_steps": 2,
    }  # fmt: skip
    completions = {"data.source": PROMPTS, "data.limit": 6, "data.eval_batch_size": 2}
    completions["model.completions.max_new_tokens"] = 6
    label = {"completions": "${run}/completions/completions.jsonl", "seed": 0}
    label["output"] = "${run}/label/preferences.jsonl"
    stages = {
        "selector": {"fit": "selector.yaml", "with": {**common, **selector}},
        "test": {"test": "selector.yaml", "with": {**common, **selector, "trainer.logger": False}},
        "completions": {"predict": "completions.yaml", "with": {**common, **completions}},
        "label": {"call": "fedlight.recipes.steps.label_with_oracle", "with": label},
    }
    file = tmp_path_factory.mktemp("recipe") / "small.yaml"
    file.write_text(json.dumps({"seeds": [0], "stages": stages}))
    return str(file)


@pytest.fixture(scope="module")
def one(recipe, tmp_path_factory):
    """Files of the run in one process."""
    folder = tmp_path_factory.mktemp("one")
    ran("run", recipe, f"--output={folder}", "--processes", "1")
    return files_of(folder)


def files_of(folder):
    """What a run has written, without wall times and the folder's own name."""
    found = {}
    for file in sorted((folder / "seed0").rglob("*")):
        name = str(file.relative_to(folder))
        if file.name == "visits.csv":
            found[name] = [{**row, "seconds": None} for row in table(file)]
        elif file.name == "done.json":
            found[name] = result_of(file.parent)
        elif file.suffix in (".csv", ".jsonl", ".safetensors"):
            found[name] = file.read_bytes()
        elif file.is_file() and "checkpoints" not in name and file.suffix not in (".yaml", ".json"):
            found[name] = file.name
    return found


def test_two_processes_write_the_files_of_one(recipe, one, tmp_path):
    child = Child(["run", recipe, f"--output={tmp_path / 'two'}", "--processes", "2"], tmp_path / "log")
    assert child.wait() == 0, child.log.read_text()
    assert files_of(tmp_path / "two") == one
    assert len(one["seed0/completions/completions.jsonl"].splitlines()) == 6
    assert len(one["seed0/selector/visits.csv"]) == 6
    for name in ("selector", "test", "completions"):
        assert "client_parallel" in (tmp_path / "two/seed0" / name / "stage.yaml").read_text(), name


def test_a_follower_that_dies_ends_the_recipe_and_one_process_goes_on(recipe, one, tmp_path):
    """It dies after the first round; the second is trained by one process."""
    from fedlight.callbacks.loop.federated_loop import FederatedLoop

    def prepare():
        started, finish = [], FederatedLoop._finish_round
        start = followers._Follower.__init__

        def remembered(self, *arguments):
            start(self, *arguments)
            started.append(self._process.pid)

        def sabotaged(self, *arguments):
            if self.rounds_done == 1:
                os.kill(started[0], signal.SIGKILL)
            finish(self, *arguments)

        followers._Follower.__init__, FederatedLoop._finish_round = remembered, sabotaged

    arguments = ["run", recipe, f"--output={tmp_path / 'run'}"]
    child = Child([*arguments, "--processes", "2"], tmp_path / "log", prepare)
    assert child.wait() == 2  # an error that can be mended: start again
    folder = tmp_path / "run/seed0/selector"
    assert [file.name for file in folder.glob("checkpoints/*.ckpt")] == ["epoch=0.ckpt"]
    assert not (folder / "done.json").exists()
    outcome = ran(*arguments, "--processes", "1")
    assert ("round 1/2" in outcome.out, "round 2/2" in outcome.out) == (False, True)
    # Lightning's logger begins a new version for the second round.
    resumed, whole = (
        {name: own for name, own in files.items() if "metrics" not in name}
        for files in (files_of(tmp_path / "run"), one)
    )
    assert resumed == whole


def test_a_dry_run_says_who_shares_what_and_less_than_one_process_is_refused(recipe, tmp_path):
    outcome = fedlight("run", recipe, f"--output={tmp_path}", "--dry-run", "--processes", "2")
    text = " ".join(outcome.out.split())
    assert "2 processes │ ok │ for selector, test, completions" in text
    assert "one process │ ok │ for label: it is a function" in text
    for more in ([], ["--dry-run"]):
        outcome = fedlight("run", recipe, f"--output={tmp_path}", "--processes", "0", *more)
        assert refused(outcome) == "fedlight: --processes 0 must be at least 1"


@pytest.mark.parametrize(
    ("command", "config", "why"),
    [
        ("call", {}, "it is a function"),
        ("fit", {"federated": None}, "it trains without `federated`, so there are no clients to share out"),
        ("fit", {"federated": {"class_path": "fedlight.FederatedLoop"}}, None),
        (
            "predict",
            {"trainer": {"callbacks": []}},
            "it has no PredictionWriter, which puts predictions into order",
        ),
        ("predict", {"trainer": {"callbacks": [{"class_path": "PredictionWriter"}]}}, None),
        ("test", {"trainer": {"callbacks": [{"class_path": "fedlight.TaskScores"}]}}, None),
        ("test", {"model": {"class_path": "fedlight.SFTModule"}}, None),
        (
            "validate",
            {"trainer": {"callbacks": None}, "model": {"class_path": "my.Module"}},
            "evaluation is shared by SFTModule, SelectorModule, RewardModule, DPOModule and by TaskScores",
        ),
    ],
)
def test_stages_that_are_shared(command, config, why):
    assert why_one_process(command, config) == why


@pytest.mark.parametrize(("name", "value"), [("strategy", "ddp"), ("devices", 2), ("num_nodes", 3)])
def test_a_strategy_of_its_own_is_refused(name, value):
    message = f"stage train has trainer.{name}={value}, and --processes 2 shares it by"
    with pytest.raises(ValueError, match=message):
        for_processes({"trainer": {name: value}}, 2, "train")
    fine = {"trainer": {"strategy": "auto", "devices": 1, "accelerator": "cpu"}, "model": {"a": 1}}
    assert for_processes(fine, 2, "train") == {
        "trainer": {"strategy": "client_parallel", "devices": 2, "accelerator": "cpu"}, "model": {"a": 1},
    }  # fmt: skip


@pytest.mark.parametrize(("wanted", "threads"), [(None, 1), ("3", 3), ("4,2", 1)])
def test_one_thread_for_any_number_of_processes(monkeypatch, wanted, threads):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if wanted:
        monkeypatch.setenv("OMP_NUM_THREADS", wanted)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    with Followers(1):
        assert torch.get_num_threads() == threads
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)


def stage_file(folder, **values):
    """A recipe of one stage that processes would share."""
    stage = {"fit": "selector.yaml", "with": {"trainer.accelerator": "cpu", "data.source": VOTES, **values}}
    file = folder / "small.yaml"
    file.write_text(json.dumps({"stages": {"selector": stage}}))
    return str(file)


def test_a_follower_that_never_joins_ends_the_recipe(tiny_model, tmp_path):
    recipe, log = stage_file(tmp_path, **{"model.model": tiny_model}), tmp_path / "log"

    def prepare():
        followers.STARTED, followers.GRACE_SECONDS = "import sys; sys.exit(3)", 0.1
        leave = os._exit

        def exits(code):
            log.write_text(sys.stderr.getvalue())
            leave(code)

        followers.os._exit = exits

    child = Child(["run", recipe, f"--output={tmp_path / 'run'}", "--processes", "2"], log, prepare)
    assert child.wait() == 1
    assert "process 1 has ended (it was killed), so the recipe ends; the same command" in log.read_text()


def test_what_the_first_process_refuses_is_said_once_and_ends_the_others(tmp_path):
    recipe, log = stage_file(tmp_path, **{"trainer.max_epochs": 0}), tmp_path / "log"
    started = tmp_path / "pid"

    def prepare():
        code = f"import os, time; open({str(started)!r}, 'w').write(str(os.getpid())); time.sleep(300)"
        followers.STARTED = code
        Stage.check = lambda stage: None  # it would refuse this before the other process is started
        ends = followers._Follower.end

        def end(self):
            while not started.exists():  # it has begun
                time.sleep(0.01)
            ends(self)

        followers._Follower.end = end

    child = Child(["run", recipe, f"--output={tmp_path / 'run'}", "--processes", "2"], log, prepare)
    assert child.wait() == 2
    (line,) = [line for line in log.read_text().splitlines() if line.startswith("fedlight: ")]
    assert line.startswith("fedlight: trainer.max_epochs=0: give the number of rounds")
    with pytest.raises(ProcessLookupError):
        os.kill(int(started.read_text()), 0)
