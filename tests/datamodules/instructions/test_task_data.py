from functools import partial

import pytest
from plain_lightning import trainer
from tiny_world import write_rows

from fedlight import InstructionDataModule, SFTModule, TaskScores
from fedlight.datamodules.instructions.task_data import TaskDataModule
from fedlight.datamodules.rows.split import Split
from fedlight.datamodules.rows.task_rows import TaskRows
from fedlight.evaluation.tasks.exact_match import ExactMatch

ROWS = [
    {"instruction": f"{name} paints", "input": "maps" * (n % 2), "output": "walls ."}
    for n, name in enumerate(["anna", "ben", "carl", "dora"])
]


@pytest.fixture
def rows(tmp_path):
    return write_rows(tmp_path / "rows.jsonl", ROWS)


def tasks(rows):
    return {"walls": ExactMatch(TaskRows(rows, columns={"response": "output"}), max_new_tokens=3)}


def numbers_of(model, data, folder):
    """What the test of an untrained model writes down."""
    fit = trainer(1, [TaskScores()], default_root_dir=folder)
    [numbers] = fit.test(SFTModule(model), datamodule=data, verbose=False)
    return numbers


def test_the_loss_and_the_scores(rows, tiny_model, tmp_path):
    module = SFTModule(tiny_model)
    other = InstructionDataModule(rows, split=Split(test_source=rows), tokenizer=tiny_model)
    [plain] = trainer(1).test(module, datamodule=other, verbose=False)
    numbers = numbers_of(tiny_model, TaskDataModule(tasks(rows), tokenizer=tiny_model, loss=True), tmp_path)
    assert numbers["test/loss"] == pytest.approx(plain["test/loss"])
    assert numbers["score/walls"] == tasks(rows)["walls"].run(module).mean
    assert len((tmp_path / "tasks/test/walls.jsonl").read_text().splitlines()) == 4


def test_no_loss_is_computed_unless_it_is_asked_for(rows, tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr(SFTModule, "example_losses", None)
    numbers = numbers_of(tiny_model, TaskDataModule(tasks(rows), tokenizer=tiny_model), tmp_path)
    assert "test/loss" not in numbers
    assert {"score/walls", "low/walls", "high/walls"} <= numbers.keys()


def test_what_is_too_long_is_left_out_of_the_loss_alone(rows, tiny_model, tmp_path):
    build = partial(TaskDataModule, tasks(rows), tokenizer=tiny_model, loss=True)
    with pytest.raises(ValueError, match="walls: no example fits into max_tokens=1"):
        build(max_tokens=1).setup("test")
    whole = build()
    whole.setup("test")
    shorter = build(max_tokens=int(whole.test_set.lengths.min()))
    numbers_of(tiny_model, shorter, tmp_path)
    assert 0 < len(shorter.test_set) < 4
    assert len((tmp_path / "tasks/test/walls.jsonl").read_text().splitlines()) == 4


def test_no_tasks_are_refused():
    with pytest.raises(ValueError, match="name one or more"):
        TaskDataModule({})


@pytest.mark.parametrize("stage", ["fit", "validate", "predict"])
def test_nothing_but_testing_is_refused(rows, stage):
    with pytest.raises(ValueError, match="use `fedlight test`, or give the tasks"):
        TaskDataModule(tasks(rows)).setup(stage)
