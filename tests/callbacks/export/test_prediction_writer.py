import lightning as L
import pytest
import torch
from plain_lightning import trainer as make_trainer
from refusals import refusal
from tiny_world import read_lines
from torch.utils.data import DataLoader

from fedlight.callbacks.export.prediction_writer import PredictionWriter, _lines


class Prompts(L.LightningDataModule):
    """Five prompts in batches of two."""

    def __init__(self) -> None:
        super().__init__()
        self.skip_predict_batches = 0

    def predict_dataloader(self):
        rows = [{"index": i, "prompt": f"prompt {i}"} for i in range(5)]
        return DataLoader(rows[2 * self.skip_predict_batches :], batch_size=2)


class Echo(L.LightningModule):
    """Two completions of every prompt; raises at the batch that holds ``dies_at``."""

    def __init__(self, dies_at: int | None = None, weight: float = 1.0, temperature: float = 0.7) -> None:
        super().__init__()
        self.save_hyperparameters("temperature")
        self.weight = torch.nn.Parameter(torch.tensor(weight))
        self.dies_at = dies_at
        self.seen: list[int] = []

    def predict_step(self, batch, batch_idx):
        if self.dies_at in batch["index"].tolist():
            raise KeyError("killed")
        self.seen += batch["index"].tolist()
        return [[f"{prompt} a", f"{prompt} ü"] for prompt in batch["prompt"]]


def predict(module, path, data=None, fields=("completions",), copy=("index", "prompt")):
    trainer = make_trainer(callbacks=[PredictionWriter(str(path), fields, copy)])
    trainer.predict(module, datamodule=data or Prompts(), return_predictions=False)


EXPECTED = [
    {"index": i, "prompt": f"prompt {i}", "completions": [f"prompt {i} a", f"prompt {i} ü"]} for i in range(5)
]


def test_one_line_per_prompt(tmp_path):
    path = tmp_path / "runs" / "completions.jsonl"
    predict(Echo(), path)
    assert read_lines(path) == EXPECTED
    assert [file.name for file in path.parent.iterdir()] == ["completions.jsonl"]


@pytest.mark.parametrize(("dies_at", "seen_again"), [(0, [0, 1, 2, 3, 4]), (3, [2, 3, 4]), (4, [4])])
def test_an_interrupted_run_goes_on_with_the_first_open_batch(tmp_path, dies_at, seen_again):
    path = tmp_path / "completions.jsonl"
    with pytest.raises(KeyError, match="killed"):
        predict(Echo(dies_at), path)
    assert not path.exists()
    with (tmp_path / "completions.jsonl.partial").open("a") as file:
        file.write('{"index": 2, "pro')  # what kill -9 leaves of a line
    module, data = Echo(), Prompts()
    predict(module, path, data)
    assert module.seen == seen_again
    assert read_lines(path) == EXPECTED
    assert data.skip_predict_batches == 0


@pytest.mark.parametrize("other", [Echo(weight=2.0), Echo(temperature=1.0)])
def test_lines_of_another_model_are_refused(tmp_path, other):
    path = tmp_path / "completions.jsonl"
    with pytest.raises(KeyError):
        predict(Echo(dies_at=3), path)
    with refusal("begun with another model, other data or other settings: remove it"):
        predict(other, path)
    assert other.seen == []


@pytest.mark.parametrize("fields", [[], ["index"], ["logp", "logp"]])
def test_fields_without_a_name_of_their_own_are_refused(fields):
    with refusal(r"name one prediction or several, by names that are not those of copy=.'index'., each once"):
        PredictionWriter("x.jsonl", fields)


class LogProbs(Echo):
    """What a selector says of A and of B, ``(batch, 2)``."""

    factors = torch.tensor(0.5)

    def predict_step(self, batch, batch_idx):
        super().predict_step(batch, batch_idx)
        of_a = torch.stack([index * self.factors for index in batch["index"]])
        return torch.stack([of_a, -of_a], dim=1)


class ThreeLogProbs(LogProbs):
    """The same of three selectors, ``(batch, 2, 3)``."""

    factors = torch.tensor([0.5, 1.0, 2.0])


@pytest.mark.parametrize(("kind", "third"), [(LogProbs, 1.5), (ThreeLogProbs, [1.5, 3.0, 6.0])])
def test_numbers_per_field_and_a_resumed_file(tmp_path, kind, third):
    whole, resumed = tmp_path / "whole.jsonl", tmp_path / "resumed.jsonl"
    form = {"fields": ["logp_a", "logp_b"], "copy": ["index"]}
    predict(kind(), whole, **form)
    assert read_lines(whole)[3] == {"index": 3, "logp_a": third, "logp_b": (-torch.tensor(third)).tolist()}
    with pytest.raises(KeyError, match="killed"):
        predict(kind(dies_at=3), resumed, **form)
    module = kind()
    predict(module, resumed, **form)
    assert module.seen == [2, 3, 4]
    assert resumed.read_bytes() == whole.read_bytes()


def test_a_finished_file_is_written_anew(tmp_path):
    path = tmp_path / "completions.jsonl"
    predict(Echo(), path)
    module = Echo(weight=2.0)
    predict(module, path)
    assert module.seen == [0, 1, 2, 3, 4]
    assert read_lines(path) == EXPECTED


def test_a_full_disk_is_named(tmp_path):
    path = tmp_path / "completions.jsonl"
    (tmp_path / "completions.jsonl.partial").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"disk is full while writing .*completions.jsonl.partial: free some"):
        predict(Echo(), path)


def test_a_missing_key_and_a_wrong_shape_name_the_setting(tmp_path):
    with refusal(r"copy=\['post'\]: the batch has no 'post', it has"):
        predict(Echo(), tmp_path / "a.jsonl", copy=["post"])
    with refusal(r"names 2 numbers per example, but predict_step returns list"):
        predict(Echo(), tmp_path / "b.jsonl", fields=["logp_a", "logp_b"])
    with refusal(r"names 3 numbers per example, but predict_step returns \(2, 2, 3\)"):
        predict(ThreeLogProbs(), tmp_path / "c.jsonl", fields=["a", "b", "c"])
    with refusal(r"path=.* is a folder: give the name of a file"):
        predict(Echo(dies_at=0), tmp_path)
    with pytest.raises(ValueError, match=r"fields=\['x'\]: a prediction is NaN or infinite"):
        _lines({}, torch.tensor([float("nan")]), ["x"], [])


@pytest.mark.parametrize("name", ["completions.jsonl.partial", "completions.jsonl.progress"])
def test_damaged_files_are_told_and_predicted_anew(tmp_path, name):
    """Of other ways of a damage see tests/whole/test_damaged_files.py."""
    path = tmp_path / "completions.jsonl"
    with pytest.raises(KeyError):
        predict(Echo(dies_at=3), path)
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:25])
    module = Echo()
    with pytest.warns(UserWarning, match=r"is damaged: all predictions are made again"):
        predict(module, path)
    assert module.seen == [0, 1, 2, 3, 4]
    assert read_lines(path) == EXPECTED
