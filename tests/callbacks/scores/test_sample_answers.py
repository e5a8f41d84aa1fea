import json

import lightning as L
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from plain_lightning import trainer as make_trainer
from tiny_world import read_lines, write_rows

from fedlight import InstructionDataModule, Lora, PreferenceDataModule, SelectorModule, SFTModule
from fedlight.callbacks.scores import SampleAnswers
from fedlight.datamodules.rows.split import Split
from fedlight.report.sections import answers
from fedlight.runs.run import read_runs

PEOPLE = ("anna", "ben", "carla", "dan", "eva")
GOODS = ("bread", "pies", "coats", "shoes", "doors", "walls", "beans", "bees")
ROWS = [
    {"ask": f"{person} sells {good} .", "reply": f"{person} bakes bread ."}
    for person in PEOPLE
    for good in GOODS
]


def fit(model, folder, *callbacks, val_share=0.2, **options):
    folder.mkdir(exist_ok=True)
    data = InstructionDataModule(
        write_rows(folder / "rows.jsonl", ROWS),
        columns={"instruction": "ask", "response": "reply"},
        template="POST : {instruction}\nCHOICE :",
        tokenizer=model,
        max_tokens=64,
        batch_size=8,
        split=Split(val_share=val_share),
    )
    limits = {"limit_val_batches": 1.0 if val_share else 0}
    trainer = make_trainer(2, callbacks, default_root_dir=folder, **limits)
    L.seed_everything(0)
    module = SFTModule(model, lora=Lora(rank=2, alpha=4), lr=0.05, **options)
    trainer.fit(module, datamodule=data)
    return module, data


def test_each_line_has_the_prompt_the_reference_and_both_answers(tiny_model, tmp_path):
    module, data = fit(tiny_model, tmp_path / "run", SampleAnswers(number=3))
    lines = read_lines(tmp_path / "run/samples.jsonl")
    assert len(lines) == 3
    held_out = {" ".join(row["response"].split()) for row in data._validation}
    for line in lines:
        assert line["prompt"].startswith("POST :")
        assert line["reference"] in held_out
        for key, raw in (("raw", True), ("tuned", False)):
            (own,) = module.generate([line["prompt"]], temperature=0.0, max_new_tokens=8, raw=raw)
            assert line[key].startswith(own[0][:5]) or own[0].startswith(line[key])
    assert any(line["raw"] != line["tuned"] for line in lines)


def test_training_does_not_notice(tiny_model, tmp_path):
    with_answers, _ = fit(tiny_model, tmp_path / "a", SampleAnswers())
    without, _ = fit(tiny_model, tmp_path / "b")
    torch.testing.assert_close(with_answers.state_dict(), without.state_dict(), rtol=0, atol=0)


def test_without_validation_rows_nothing_is_written(tiny_model, tmp_path):
    fit(tiny_model, tmp_path / "run", SampleAnswers(), val_share=0.0)
    assert not (tmp_path / "run/samples.jsonl").exists()


def test_other_modules_are_refused_before_training(tmp_path):
    trainer = L.Trainer(max_epochs=1, callbacks=[SampleAnswers()], logger=False, enable_checkpointing=False)
    with pytest.raises(ValueError, match="SampleAnswers needs a module that writes text"):
        trainer.fit(BoringModel())
    data = PreferenceDataModule("toy:votes?num_clients=2&votes_per_client=5", tokenizer="toy")
    with pytest.raises(ValueError, match="reads the responses of sft batches"):
        make_trainer(1, [SampleAnswers()], default_root_dir=tmp_path).fit(SelectorModule("toy"), data)
    with pytest.raises(ValueError, match="number=0"):
        SampleAnswers(number=0)


def test_the_report_shows_them_side_by_side(tmp_path):
    line = {"prompt": "Who? ", "reference": "anna", "raw": "", "tuned": "ben"}
    (tmp_path / "samples.jsonl").write_text(json.dumps(line) + "\n" + json.dumps({"prompt": "cut"}) + "\n")
    (tmp_path / "run.json").write_text("{}")
    (texts,) = answers.section(read_runs([tmp_path])).parts
    ((prompt, found),) = texts.examples
    assert (texts.title, prompt) == ("Before and after training", "Who?")
    told = [(one.method, one.text) for one in found]
    assert told == [("reference", "anna"), ("raw model", "(empty)"), (tmp_path.name, "ben")]


def test_clients_rows_are_shown_on_demand(tmp_path):
    (tmp_path / "samples.jsonl").write_text(
        json.dumps({"prompt": "p", "reference": "r", "raw": "a", "tuned": "b"})
    )
    (tmp_path / "config.yaml").write_text("data: {init_args: {columns: {client: worker}}}")
    assert answers.section(read_runs([tmp_path])).parts == []
    assert len(answers.section(read_runs([tmp_path], private=True)).parts) == 1
