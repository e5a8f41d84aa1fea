from shutil import disk_usage
from types import SimpleNamespace

import pytest

from fedlight.preflight import machine
from fedlight.preflight.disk import answers_bytes, check_disk
from fedlight.preflight.finding import State
from fedlight.preflight.stages import ParsedStage
from fedlight.recipes.stages import Stage

ROWS = {("o/x", "test"): 100, ("o/x", "train"): 50}


def read(folder, command, config, name="a"):
    stage = Stage(name, folder / name, {"call": "fedlight.recipes.steps.merge_adapter", "with": {}})
    stage.command = command
    return ParsedStage(stage, config)


def task(limit=None, source="o/x"):
    rows = {"class_path": "fedlight.datamodules.rows.task_rows.TaskRows", "init_args": {"source": source}}
    init_args = {"data": rows, "limit": limit, "max_new_tokens": 6, "samples": 2}
    return {"class_path": "fedlight.evaluation.tasks.gsm8k.GSM8K", "init_args": init_args}


def scorer(tasks, **settings):
    init_args = {"tasks": tasks, **settings}
    return {"class_path": "fedlight.callbacks.scores.task_scores.TaskScores", "init_args": init_args}


@pytest.mark.parametrize(
    ("limit", "source", "number"),
    [(None, "o/x", 50), (20, "o/x", 20), (80, "o/x", 50), (80, "o/y", 80), (None, "o/y", None)],
)
def test_completions_are_counted_where_the_rows_are_known(tmp_path, limit, source, number):
    model = {"init_args": {"completions": {"number": 3, "max_new_tokens": 10}}}
    data = {"init_args": {"source": source, "limit": limit, "max_tokens": 70}}
    found = answers_bytes(read(tmp_path, "predict", {"model": model, "data": data}), ROWS)
    assert found == (None if number is None else number * (3 * 10 + 70) * 5)


def test_answers_to_tasks_are_counted(tmp_path):
    data = {"init_args": {"tasks": {"gsm8k": task()}, "max_tokens": 88}}
    config = {"data": data, "trainer": {"callbacks": [scorer(None)]}}
    assert answers_bytes(read(tmp_path, "test", config), ROWS) == 100 * (2 * 6 + 88) * 5
    assert answers_bytes(read(tmp_path, "test", config), {}) is None
    assert answers_bytes(read(tmp_path, "test", {"data": data, "trainer": {"callbacks": None}}), {}) == 0


@pytest.mark.parametrize(
    ("settings", "times"),
    [
        ({"every_n_epochs": 2, "before_training": True}, 4),  # before, after 2, 4 and 5
        ({"every_n_epochs": None}, 1),
        ({"every_n_epochs": 1}, 5),
    ],
)
def test_answers_in_training_are_counted_as_often_as_they_are_asked(tmp_path, settings, times):
    trainer = {"max_epochs": 5, "callbacks": [scorer({"gsm8k": task(limit=10)}, **settings)]}
    config = {"data": {"init_args": {"max_tokens": 88}}, "trainer": trainer}
    assert answers_bytes(read(tmp_path, "fit", config), {}) == times * 10 * (2 * 6 + 88) * 5


def test_no_space_is_a_problem_and_unknown_answers_are_named(tmp_path, monkeypatch):
    kind = type(disk_usage(tmp_path))
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda place: kind(10**9, 10**9 - 10**8, 10**8))
    data = {"init_args": {"source": "o/z", "limit": 10**6, "max_tokens": 10}}
    completions = {"init_args": {"completions": {"max_new_tokens": 10}}}
    known = read(tmp_path, "predict", {"model": completions, "data": data})
    unknown = read(tmp_path, "predict", {"data": {"init_args": {"source": "o/y"}}}, "votes")
    at_rest = SimpleNamespace(adapter_bytes=0, moment_bytes=0)
    training = SimpleNamespace(model="m", base_bytes=0, at_rest=at_rest)
    (found,) = check_disk([known, unknown], [training], tmp_path, 2, {}, {}, ROWS)
    assert found.state is State.PROBLEM
    assert "about 200.0 MB of checkpoints, adapters and answers; 100.0 MB are free" in found.detail
    assert "not counted are answers to rows whose number is not known: votes" in found.detail
    assert "of 200.0 MB needed there in all: free some, or give another --output" in found.detail
    (found,) = check_disk([known], [training], tmp_path, 2, {"o/m": 0}, {}, {})
    assert "not counted" not in found.detail
