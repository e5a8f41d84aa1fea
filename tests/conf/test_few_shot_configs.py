"""The configs of FewFedPIT run: on the embedded world as they are, those of the paper on a few rows of the same columns."""

import json

import pytest
from omegaconf import OmegaConf
from real_rows import ALPACA
from tiny_world import fedlight, read_lines, table, write_rows

from fedlight import conf

ANY_TEXT = "--data.synthesis.prompts.instruction.pattern=(?P<instruction>.*)"
ANY_ANSWER = "--data.synthesis.prompts.response.pattern=(?P<response>.*)"
RAW = ("--model.adapter=null", "--model.merge_adapter=false")


def ran(*arguments):
    outcome = fedlight("fit", *arguments, "--trainer.accelerator=cpu")
    assert outcome.code == 0, outcome.err
    return outcome


def toy(folder, model, *more):
    return [
        *("--config=fewfedpit.yaml", f"--trainer.default_root_dir={folder}", f"--model.model={model}", *RAW),
        "--data.source=toy:instructions?split=private&client_rows=6&num_clients=3&joined=1",
        "--data.split.test_source=toy:instructions?split=test&topic_rows=1&joined=1",
        *("--trainer.max_epochs=2", *more),
    ]


@pytest.mark.slow  # whole runs
def test_a_model_that_cannot_write_questions_trains_on_its_own_rows(tmp_path, tiny_model, caplog):
    ran(*toy(tmp_path, tiny_model, "--data.synthesis.number=3"))
    visits = table(tmp_path / "visits.csv")
    assert [row["round"] for row in visits] == ["0", "0", "1", "1"]  # one of each client, on its own rows
    assert "2 clients have none" in caplog.text
    attacked = table(tmp_path / "attacks/attacks.csv")
    assert {(row["round"], row["target"]) for row in attacked} >= {("0", "global"), ("2", "global")}
    (scores,) = (tmp_path / "tasks").glob("*/scores.json")
    assert "score/kitchen" in json.loads(scores.read_text())


def test_rows_of_its_own_making(tmp_path, tiny_model):
    own = ("--data.synthesis.keep_cut=true", "--data.synthesis.number=3", "--data.keep=2")
    log = "--trainer.callbacks=[{class_path: VisitLog}]"
    ran(*toy(tmp_path, tiny_model, ANY_TEXT, ANY_ANSWER, *own, log))
    assert read_lines(tmp_path / "synthetic/round_0001.jsonl")
    assert len(table(tmp_path / "visits.csv")) == 8  # two of each client


def test_a_baseline_by_name(tmp_path, tiny_model):
    """The others are run by the recipe fewfedpit."""
    changes = ["--federated.algorithm=FewFedWeight", "--trainer.callbacks=[]", "--trainer.max_epochs=1"]
    changes += ["--data.synthesis=PseudoResponses", "--data.synthesis.max_response_tokens=4"]
    ran(*toy(tmp_path, tiny_model, *changes))
    assert (tmp_path / "synthetic").is_dir()


@pytest.mark.usefixtures("any_text")
@pytest.mark.parametrize(("name", "clients"), [("fewfedpit_llama2", 50), ("fewfedpit_medinstruct", 10)])
def test_the_setting_of_the_paper(name, clients, tmp_path, tiny_model):
    """A file of the same columns stands in for the set of the hub; without a model of the hub, words are hashed."""
    rows = [{**ALPACA[i % 40], "instruction": f"do {i} and {i % 7}"} for i in range(150)]
    config = OmegaConf.load(conf.path(f"{name}.yaml"))
    attacks = config.trainer["callbacks+"]
    for attack in attacks:
        attack.init_args.max_new_tokens = 4
    attacks[-1].init_args.samples = 2
    OmegaConf.save(config, tmp_path / "config.yaml")
    ran(
        *(f"--config={tmp_path / 'config.yaml'}", f"--trainer.default_root_dir={tmp_path / 'run'}"),
        *(f"--model.model={tiny_model}", "--model.base=plain", "--model.dtype=fp32"),
        *("--trainer.max_epochs=1", f"--data.source={write_rows(tmp_path / 'rows.jsonl', rows)}"),
        *("--data.rows.few_shot.encoder=HashedEncoder", "--data.rows.few_shot.clusters=40"),
        *("--data.max_tokens=220", "--data.synthesis.number=2"),
        "--data.synthesis.instructions.max_new_tokens=4",
        "--data.synthesis.responses.max_new_tokens=4",
    )
    assert len(table(tmp_path / "run/visits.csv")) == 2
    attacked = table(tmp_path / "run/attacks/attacks.csv")
    assert {row["target"] for row in attacked} > {"global"}
    said, *_ = read_lines(tmp_path / "run/attacks/round_1/discoverable_memorization.jsonl")
    assert said["client"] in {f"c{index:0{len(str(clients - 1))}d}" for index in range(clients)}
