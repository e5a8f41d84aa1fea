import json
import re
from types import SimpleNamespace

import pytest
from fleets import device_file
from tiny_world import HELDOUT, VOTES, fedlight

from fedlight.plan.plan import make_plan
from fedlight.preflight.disk import check_output
from fedlight.preflight.finding import State
from fedlight.preflight.memory import check_memory
from fedlight.preflight.stages import ParsedStage, check_references, needs
from fedlight.recipes.stages import Stage
from fedlight.support.files import write_json
from fedlight.support.needs import Model, Package, RowSource, Server


def spec(class_path, **init_args):
    return {"class_path": class_path, "init_args": init_args}


ENDPOINT = spec("fedlight.generators.endpoint.ChatEndpoint", base_url="http://h/v1", model="m")
JUDGE = spec("fedlight.judges.chat_judge.ChatJudge", endpoint=ENDPOINT)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """Writes a recipe that trains a selector, tests it and merges; every stage with further settings."""
    folder = tmp_path_factory.mktemp("recipe")

    def write(name="good", test=None, train=None, last=None):
        data = {"data.init_args.source": VOTES, "data.init_args.split.test_source": HELDOUT}
        scored = {**data, "model.init_args.adapter": "${run}/train/adapter", **(test or {})}
        stages = {
            "train": {"fit": "selector.yaml", "with": {**data, "trainer.max_epochs": 2, **(train or {})}},
            "score": {"test": "selector.yaml", "with": scored},
        }
        file = folder / f"{name}.yaml"
        file.write_text(json.dumps({"seeds": [0, 1], "stages": stages | (last or {})}))
        return str(file)

    return write


def test_a_recipe_that_can_start(recipe, tmp_path):
    outcome = fedlight("run", recipe(), "--dry-run", f"--output={tmp_path / 'out'}")
    assert outcome.code == 0, outcome.out
    for said in (
        *("2 parse: 2 commands, 0 functions", "1 files and folders of earlier stages", "model toy"),
        *("memory of SelectorModule on toy", "nothing is wrong: the run can start"),
    ):
        assert said in outcome.out
    assert not (tmp_path / "out").exists()


def test_every_mistake_is_in_the_table(recipe, tmp_path, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    duel = {"methods": {}, "judge": JUDGE, "task": "x", "output": "${run}/duel"}
    last = {
        "duel": {"call": "fedlight.judges.duels.duels", "with": duel},
        "unbound": {"call": "fedlight.recipes.steps.merge_adapter", "with": {"modell": "toy"}},
    }
    train = {"model.init_args.lr": "fast", "federated.clients_per_round": 2}
    test = {"model.init_args.adapter": "${run}/trian/adapter"}
    test["data.init_args.split.test_source"] = "votes.jsonl"
    file = recipe("bad", train=train, test=test, last=last)
    outcome = fedlight("run", file, "--dry-run", f"--output={tmp_path / 'out'}")
    assert outcome.code == 2
    text = " ".join(outcome.out.replace("│", " ").split())
    assert "model.lr: expected a number" in text
    assert "merge_adapter: missing a required argument: 'model'" in text
    assert "no stage before it is called 'trian'; the stages before it are train" in text
    assert "votes.jsonl: no such file" in text
    assert "the environment variable OPENAI_API_KEY is not set: put the key there for duel" in text
    assert "5 problems: mend the problems before the run" in text
    assert not (tmp_path / "out").exists()


def stage(folder, name, config=None, command="fit", **settings):
    made = Stage(name, folder / name, {"call": "fedlight.recipes.steps.merge_adapter", "with": settings})
    made.command = command
    return ParsedStage(made, settings if config is None else config)


def trained(folder, name="train", callbacks=("AdapterExport", "GroupLog"), epochs=2):
    adapter = str(folder / name / "adapter")
    parts = [spec(f"fedlight.{callback}", folder=adapter) for callback in callbacks]
    parts.append(spec("x.ModelCheckpoint", dirpath=str(folder / name / "checkpoints")))
    return stage(folder, name, {"trainer": {"callbacks": parts, "max_epochs": epochs}})


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        *((f"train/{file}", None) for file in ("", "adapter", "groups.csv", "checkpoints/epoch=1.ckpt")),
        ("shared/rows", None),
        ("train/checkpoints/epoch=2.ckpt", "has max_epochs=2, so its last checkpoint is epoch=1"),
        ("train/visits.csv", "give it the callback VisitLog"),
        ("train/answers.jsonl", "stage train does not write it"),
        ("later/adapter", "no stage before it is called 'later'"),
    ],
)
def test_what_a_stage_reads_is_written_before(tmp_path, path, reason):
    writer = stage(tmp_path, "writer", {"augmentation_folder": str(tmp_path / "shared")})
    reader = stage(tmp_path, "reader", {"model": {"init_args": {"adapter": str(tmp_path / path)}}})
    (found,) = check_references([trained(tmp_path), writer, reader], [tmp_path])
    assert (found.state is State.PROBLEM) == (reason is not None)
    assert (reason or "1 files and folders") in found.detail


def test_what_a_function_takes_only_if_it_was_run_may_be_left_out(tmp_path):
    methods = {"small": str(tmp_path / "train"), "large": str(tmp_path / "left_out")}
    reader = stage(tmp_path, "reader", {"methods": methods, "if_run": ["large"]})
    (found,) = check_references([trained(tmp_path), reader], [tmp_path])
    assert found.detail.startswith("1 files and folders")
    reader = stage(tmp_path, "reader", {"methods": methods})
    (found,) = check_references([trained(tmp_path), reader], [tmp_path])
    assert "no stage before it is called 'left_out'" in found.detail


def test_an_adapter_that_nobody_exports(tmp_path):
    reader = stage(tmp_path, "reader", {"adapter": str(tmp_path / "train/adapter")})
    (found,) = check_references([trained(tmp_path, callbacks=()), reader], [tmp_path])
    assert "name this place in one of its settings, such as the folder of AdapterExport" in found.detail


def test_needs_of_settings(tmp_path):
    encoder = spec("fedlight.datamodules.vectors.encoders.SentenceEncoder", model="o/small")
    settings = {"source": "o/private", "split": "train", "columns": {"instruction": "q", "input": ""}}
    settings |= {"public_source": ["o/one", "o/two"], "encoder": encoder}
    settings["public_columns"] = [{"instruction": "a"}, {"instruction": "b"}]
    data = spec("x.AugmentedInstructionDataModule", **settings)
    model = spec("fedlight.modules.sft.SFTModule", model="o/large")
    found = needs([stage(tmp_path, "a", {"model": model, "data": data, "judge": JUDGE})])
    assert found == {
        Model("o/large", False): ["a"],
        RowSource("o/private", "train", (("instruction", "q"),)): ["a"],
        RowSource("o/one", "train", (("instruction", "a"),)): ["a"],
        RowSource("o/two", "train", (("instruction", "b"),)): ["a"],
        Model("o/small", True): ["a"],
        Server("http://h/v1", "OPENAI_API_KEY"): ["a"],
        Package("openai", "'fedlight[chat]'"): ["a"],
    }


def test_a_benchmark_needs_what_its_class_reads(tmp_path):
    columns = {"question": "asked", "post": "never asked for"}
    rows = spec("x.TaskRows", source="o/x", split="test", columns=columns, where=None, share=None)
    task = spec("fedlight.evaluation.tasks.gsm8k.GSM8K", data=rows)
    (found,) = needs([stage(tmp_path, "a", {"tasks": {"gsm8k": task}}, command="test")])
    assert found == RowSource("o/x", "test", (("answer", "answer"), ("question", "asked")))


def test_a_stage_that_is_done_needs_nothing(tmp_path):
    done = stage(tmp_path, "a", {"source": "o/x"}, command="call")
    assert len(needs([done])) == 1
    write_json(tmp_path / "a/done.json", {})
    assert needs([done]) == {}


def test_an_output_made_with_other_settings_is_a_problem(tmp_path):
    made = stage(tmp_path, "a", command="call", model="toy").stage
    assert check_output(tmp_path, [made]).state is State.OK
    write_json(tmp_path / "a/settings.json", {"stage": "other"})
    assert check_output(tmp_path, [made]).state is State.OK  # nothing was done with them
    (tmp_path / "a/rows.jsonl.partial").touch()
    found = check_output(tmp_path, [made])
    assert found.state is State.PROBLEM
    assert "give another --output" in found.detail
    assert check_output(tmp_path / "a/settings.json", []).state is State.PROBLEM


def memory_findings(recipe, tmp_path, **settings):
    """Findings about memory, one line each, of a dry run with these settings of the training."""
    outcome = fedlight("run", recipe("one", train=settings), "--dry-run", f"--output={tmp_path / 'out'}")
    return " ".join(outcome.out.replace("│", " ").split())


@pytest.mark.slow
def test_a_fleet_is_looked_at_with_the_ranks_of_its_devices(recipe, tmp_path):
    """A device with room for rank 2 alone takes part where 2 is among the ranks, as in ``fedlight plan``."""
    ranked = ["--model.lora.rank=8", "--federated.algorithm=HetLoRA"]
    few = ["--config=selector.yaml", "--data.source=nowhere.jsonl", *ranked]

    def fleet(budget):
        files = {device_file(tmp_path, "phone", memory_gib=f"{budget / 2**30:.12f}"): 1.0}
        return spec("fedlight.devices.fleet.Fleet", devices=files)

    def needs(rank):
        more = f"--federated.fleet={json.dumps(fleet(1))}", f"--federated.algorithm.ranks=[{rank}]"
        return make_plan([*few, *more]).forecasts[0].fit.footprint.peak_bytes

    assert needs(2) < needs(8)
    settings = {"model.init_args.lora.rank": 8, "federated.algorithm": "HetLoRA"}
    settings |= {"federated.fleet": fleet(needs(2) + 0.5)}
    takes_part, none = "1 of 1 devices can take part", "no device can take part: phone (out of memory)"
    for ranks, said in (([2, 8], takes_part), ([8], none)):
        assert said in memory_findings(recipe, tmp_path, **settings, **{"federated.algorithm.ranks": ranks})


def test_forward_passes_alone_take_less_of_this_machine(recipe, tmp_path):
    found = memory_findings(recipe, tmp_path)
    forward = memory_findings(recipe, tmp_path, **{"federated.forward": "ZerothOrder"})
    assert "adapter with gradients and moments" in found
    assert "adapter with a copy" in forward

    def activations(text):
        size, unit = re.search(r"activations ([0-9.]+) ([kMG]?B)", text).groups()
        return float(size) * {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}[unit]

    assert activations(forward) < activations(found) / 4


@pytest.mark.parametrize(
    ("activations", "base", "state", "words"),
    [
        (50, 10, State.OK, "base 10.0 GB"),
        (120, 10, State.UNKNOWN, "fits for texts of 72 tokens, or a batch_size of 6"),
        (400, 10, State.PROBLEM, "fits for texts of 21 tokens, or a batch_size of 1"),
        (50, 200, State.PROBLEM, "does not even hold the weights; take base=nf4"),
    ],
)
def test_what_does_not_fit_says_what_would(monkeypatch, activations, base, state, words):
    from fedlight.preflight import memory
    from fedlight.preflight.machine import MachineMemory

    settings = {"module": "SFTModule", "batch_size": 8, "max_tokens": 97}
    names = {"name": "train", "model": "o/m", "base": "plain", "cuda": False, "texts": 8}
    counts = {"peak_bytes": (base + activations) * 10**9, "activation_bytes": activations * 10**9}
    counts |= {"at_rest": SimpleNamespace(base_bytes=base * 10**9), "process_bytes": 0, "trained_bytes": 0}
    training = SimpleNamespace(**names, **counts, settings=settings, loop=SimpleNamespace(fleet=None))
    here = MachineMemory(100 * 10**9, "this machine has 100.0 GB")
    monkeypatch.setattr(memory, "memory_of", lambda cuda: here)
    (found,) = check_memory([training])
    assert (found.state, words in found.detail) == (state, True)
