import json
import os
import random
import signal
import time
from pathlib import Path

import pytest
from killed import CODES, KILLED, SIGNALS, STOPPED, TERMINATED, Child, at
from lightning.pytorch.callbacks import ModelCheckpoint
from recipe_runs import ran
from tiny_world import fedlight, table, tiny_recipe, tiny_selector

from fedlight import AdapterExport, FederatedLoop, RoundProgress, conf
from fedlight.callbacks.export import PredictionWriter
from fedlight.federation.client_state import ClientMemories
from fedlight.recipes import stages
from fedlight.support.files import result_of

pytestmark = pytest.mark.slow  # whole runs, stopped at many moments


@pytest.fixture(scope="module")
def command(tiny_model, tmp_path_factory):
    """Arguments of a demo without its ceiling, whose predictions take several batches; its folder comes last."""
    recipe = tmp_path_factory.mktemp("recipe") / "demo.yaml"
    several = {"with": {"data.init_args.eval_batch_size": 4}}
    changes = dict.fromkeys(("completions", "votes"), several)
    ceiling = ("label_by_oracle", "dpo_by_oracle", "answers_oracle", "verdict")
    changes |= {name: {"when": False} for name in ceiling}
    recipe.write_text(json.dumps({"extends": str(conf.path("recipes/demo.yaml")), "stages": changes}))
    return ["run", str(recipe), *tiny_recipe(tiny_model, "num_prompts=12"), "--output"]


@pytest.fixture(scope="module")
def uninterrupted(command, tmp_path_factory):
    """What an uninterrupted run leaves, and the seconds that it takes the processor."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    start = time.process_time()
    ran(*command, str(folder))
    return what_counts(folder), time.process_time() - start


def what_counts(folder):
    """Everything that a run leaves but times."""
    results = json.loads((folder / "results.json").read_text())
    visits = table(folder / "seed0/selector/visits.csv")
    files = {
        str(file.relative_to(folder)): file.read_bytes()
        for pattern in ("*.jsonl", "adapter/*.safetensors")
        for file in folder.rglob(pattern)
    }
    timeless = [{key: value for key, value in row.items() if key != "seconds"} for row in visits]
    stages_done = [file.parent for file in folder.glob("seed0/*/done.json")]
    metrics = {stage.name: result_of(stage).get("metrics") for stage in stages_done}
    results = {**results, "seconds": None, "digest": None}
    return {"results": results, "metrics": metrics, "visits": timeless, **files}


def second_epoch(callback, trainer, *args):
    return trainer.current_epoch == 1


def second_epoch_second_batch(callback, trainer, module, batch, batch_idx):
    return trainer.current_epoch == 1 and batch_idx == 1


def second_batch(callback, trainer, module, *args, **kwargs):
    return args[-1] == 1


def always(*args, **kwargs):
    return True


def marker_of(stage):
    return lambda file, content: (file.parent.name, file.name) == (stage, "done.json")


POINTS = [
    (FederatedLoop, "on_train_batch_start", second_epoch_second_batch, KILLED, "selector"),
    (FederatedLoop, "on_train_batch_start", second_epoch_second_batch, STOPPED, "selector"),
    (AdapterExport, "on_fit_end", always, KILLED, "selector"),  # trained to the end, but not exported
    (stages, "write_json", marker_of("selector"), KILLED, "selector"),  # and then not marked
    (PredictionWriter, "on_predict_batch_end", second_batch, KILLED, "completions"),
    (PredictionWriter, "on_predict_batch_end", second_batch, STOPPED, "completions"),
    (PredictionWriter, "on_predict_batch_end", always, TERMINATED, "completions"),
    (PredictionWriter, "on_predict_end", always, KILLED, "completions"),
    (ModelCheckpoint, "on_train_epoch_end", second_epoch, KILLED, "dpo"),
    (RoundProgress, "on_train_epoch_start", second_epoch, STOPPED, "dpo"),
    (stages, "write_json", marker_of("duel"), KILLED, "duel"),
]


def test_interrupted_at_every_kind_of_moment(command, uninterrupted, tmp_path):
    folder, log = tmp_path / "run", tmp_path / "log"
    for owner, name, when, end, stage in POINTS:
        child = Child([*command, str(folder)], log, at(owner, name, when, SIGNALS[end]))
        assert child.wait() == CODES[end], log.read_text()
        assert (folder / "seed0" / stage / "settings.json").exists()
        assert not (folder / "seed0" / stage / "done.json").exists()
        if end != KILLED:
            last = log.read_text().splitlines()[-1]
            assert last == f"fedlight: stopped in stage {stage}; the same command goes on from here"
    assert Child([*command, str(folder)], log).wait() == 0, log.read_text()
    assert what_counts(folder) == uninterrupted[0]


def after(seconds, signum):
    """Has the process send itself a signal when it has used the processor for so long, however fast that is."""

    def prepare():
        signal.signal(signal.SIGPROF, lambda *_: os.kill(os.getpid(), signum))
        signal.setitimer(signal.ITIMER_PROF, seconds)

    return prepare if signum else lambda: None


def test_killed_at_random_moments(command, uninterrupted, tmp_path):
    expected, seconds = uninterrupted
    moments = random.Random(0)
    folder, log = tmp_path / "run", tmp_path / "log"
    ends = []
    for signum in (signal.SIGKILL, signal.SIGINT, signal.SIGKILL, None):
        stop = after(moments.uniform(0.1, 0.4) * seconds, signum)
        ends.append(Child([*command, str(folder)], log, stop).wait())
    assert ends[0] == CODES[KILLED]  # the others may come when all is done
    assert ends[-1] == 0, log.read_text()
    assert what_counts(folder) == expected


@pytest.mark.parametrize(
    ("signum", "code"), [(signal.SIGINT, CODES[STOPPED]), (signal.SIGHUP, CODES[TERMINATED])]
)
def test_a_stopped_fit_says_that_the_same_command_goes_on(tiny_model, tmp_path, signum, code):
    log = tmp_path / "log"
    prepare = at(FederatedLoop, "on_train_batch_start", second_epoch_second_batch, signum)
    arguments = ["fit", *tiny_selector(tiny_model, tmp_path / "run")]
    assert Child(arguments, log, prepare).wait() == code
    assert log.read_text().endswith("stopped after a checkpoint: the same command goes on from it\n")
    outcome = fedlight(*arguments)
    assert (outcome.code, f"{tmp_path}/run: the run goes on from epoch=0.ckpt" in outcome.err) == (0, True)
    assert len(table(Path(tmp_path / "run/visits.csv"))) == 4


def second_memory_of_a_round(memories, client, memory, round_idx):
    written = [name.split("-")[1] for name in memories._versions.values()]
    return round_idx == 2 and "2" in written


MEMORIES = [
    "--federated.algorithm=Scaffold",
    *("--federated.channel=Wire", "--federated.channel.up=TopK", "--federated.channel.up.share=0.2"),
    *("--model.optimizer.name=SGD", "--model.optimizer.args={}", "--model.lr=0.05", "--trainer.max_epochs=4"),
]
MOMENTS_OF_A_FIT = [
    (FederatedLoop, "on_train_batch_start", second_epoch_second_batch),
    (ClientMemories, "_write", second_memory_of_a_round),  # the first one is there, and in no checkpoint
    (ModelCheckpoint, "on_train_epoch_end", lambda callback, trainer, *args: trainer.current_epoch == 3),
]


def test_a_killed_fit_with_memories_on_disk_leaves_what_an_undisturbed_one_leaves(
    tiny_model, tmp_path, on_disk
):
    """SCAFFOLD's variates and what top-k did not send lie with the clients, in files of their own."""

    def arguments(folder):
        return ["fit", *tiny_selector(tiny_model, folder, *MEMORIES)]

    def left_in(folder):
        visits = [{**row, "seconds": None} for row in table(folder / "visits.csv")]
        names = [file.stem.split("-") for file in folder.glob("clients/*")]
        memories = sorted((*name[:2], name[3]) for name in names)
        return visits, memories, (folder / "adapter/adapter_model.safetensors").read_bytes()

    whole, run, log = tmp_path / "whole", tmp_path / "run", tmp_path / "log"
    ran(*arguments(whole))
    for owner, name, when in MOMENTS_OF_A_FIT:
        assert Child(arguments(run), log, at(owner, name, when, signal.SIGKILL)).wait() == CODES[KILLED]
    assert Child(arguments(run), log).wait() == 0, log.read_text()
    assert left_in(run) == left_in(whole)
    assert not list(run.rglob("*.tmp")) + list(run.rglob("*.lock")) + list(run.rglob("*.unsaved"))


def test_ctrl_c_twice_ends_the_run_which_then_goes_on(tiny_model, tmp_path):
    """The second comes while the first is dealt with."""
    run, log = tmp_path / "run", tmp_path / "log"

    def prepare():
        at(FederatedLoop, "on_train_batch_start", second_epoch_second_batch, signal.SIGINT)()
        at(FederatedLoop, "on_exception", always, signal.SIGINT)()

    arguments = ["fit", *tiny_selector(tiny_model, run)]
    assert Child(arguments, log, prepare).wait() == CODES[STOPPED]
    assert log.read_text().splitlines()[-1].startswith("fedlight: stopped")
    assert not (run / "run.lock").exists()
    ran(*arguments)
    assert len(table(run / "visits.csv")) == 4
