import pytest
import yaml

from fedlight.lightning_cli.cli import ReadSettings, find_config


def callbacks(*arguments):
    config = ReadSettings(["fit", *map(find_config, arguments)]).config["fit"]
    assert config.drop_callbacks == []
    return [one.class_path.rpartition(".")[2] for one in config.trainer.callbacks]


BEFORE = ["RoundProgress", "VisitLog", "ClientData", "AdapterExport", "ModelCheckpoint", "TaskScores"]


def test_a_file_on_top_drops_a_class_and_adds_another(tmp_path):
    file = tmp_path / "more.yaml"
    more = {"callbacks+": [{"class_path": "ClientAccuracy"}]}
    file.write_text(yaml.safe_dump({"drop_callbacks": ["TaskScores"], "trainer": more}))
    assert callbacks("--config=feddca.yaml") == BEFORE
    assert callbacks("--config=feddca.yaml", f"--config={file}") == [*BEFORE[:-1], "ClientAccuracy"]


@pytest.mark.parametrize(
    "name", ["TaskScores", "fedlight.TaskScores", "fedlight.callbacks.scores.task_scores.TaskScores"]
)
def test_a_class_is_dropped_on_the_command_line_by_any_spelling(name):
    found = callbacks("--config=feddca.yaml", f"--drop_callbacks=[{name}, VisitLog]")
    assert found == [name for name in BEFORE if name not in ("TaskScores", "VisitLog")]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "TaskScore",
            "'TaskScore' is none of trainer.callbacks; did you mean 'TaskScores'.; there are RoundP",
        ),
        ("GroupLog", "'GroupLog' is none of trainer.callbacks.*ModelCheckpoint, TaskScores$"),
    ],
)
def test_a_name_that_no_callback_has_is_refused_with_those_there_are(name, message):
    with pytest.raises(ValueError, match=message):
        callbacks("--config=feddca.yaml", f"--drop_callbacks=[{name}]")
