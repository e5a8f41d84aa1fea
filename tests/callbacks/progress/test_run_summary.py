import io
import itertools
import math
import re
import time

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from one_weight import OneWeight
from plain_lightning import trainer as make_trainer
from rich.console import Console
from torch.utils.data import DataLoader

from fedlight.callbacks.logs.visit_log import VisitLog
from fedlight.callbacks.progress.round_progress import RoundProgress
from fedlight.callbacks.progress.run_summary import MetricEnds, output_paths, report_command, traffic

LOADER = DataLoader(torch.tensor([1.0, 3.0]))


class Falling(OneWeight):
    """The loss of epoch n, from 0, is 2 / (n + 1) on average; the accuracy rises and falls again."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch / (self.current_epoch + 1), batch_idx)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val/accuracy", (0.5, 0.75, 0.25)[self.current_epoch], prog_bar=True)


class Visited(VisitLog):
    """Visit log of these rows."""

    def __init__(self, rows):
        super().__init__()
        self.rows = rows

    def visit_rows(self):
        return self.rows


def fitted(folder, *callbacks, terminal=False, epochs=3, **settings):
    bar = RoundProgress(refresh_seconds=0.0)
    bar.console = Console(file=io.StringIO(), force_terminal=terminal, width=120)
    trainer = make_trainer(
        epochs,
        [bar, *callbacks],
        default_root_dir=folder,
        enable_progress_bar=True,
        log_every_n_steps=1,
        num_sanity_val_steps=0,
        **settings,
    )
    trainer.fit(Falling(), LOADER, LOADER)
    return bar.console.file.getvalue(), trainer


def cells(table):
    return [list(line) for line in zip(*(column.cells for column in table.columns), strict=True)]


def test_the_time_left_is_that_of_the_whole_run(tmp_path, monkeypatch):
    """A clock on which every look takes a minute: no line speaks of the round alone, and the last one of nothing."""
    clock = itertools.count(0, 60)
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
    said, _ = fitted(tmp_path)
    lines = [line for line in said.splitlines() if line.startswith("epoch ")]
    left = [re.search(r"([\d.]+) minutes? left", line) for line in lines]
    assert float(left[0][1]) > float(left[1][1]) > 0
    assert left[2] is None


def ends_of(history):
    ends = MetricEnds()
    for number, metrics in history.items():
        ends.add(number, metrics)
    return ends


def test_a_metric_has_its_ends_and_where_they_were():
    history = {6: {"loss": 2.0, "score": math.nan}, 7: {"loss": 0.5}, 8: {"loss": 1.0, "score": 3.0}}
    table = ends_of(history).table("round", 9000.0)
    assert table.title == "rounds 6 to 8 in 2.5 hours"
    assert cells(table) == [
        ["loss", "2.0000", "1.0000", "0.5000 (7)", "2.0000 (6)"],
        ["score", "3.0000", "3.0000", "3.0000 (8)", "3.0000 (8)"],
    ]
    assert ends_of({1: {}}).table("epoch", 1.0).title == "1 epoch in 1 second"
    assert ends_of({6: {}}).table("round", 1.0).title == "round 6 in 1 second"


def test_a_run_ends_with_one_table_and_with_where_it_lies(tmp_path):
    row = {"client": "c0", "bytes_down": "2000000", "bytes_up": "1000000"}
    (tmp_path / "run").mkdir()
    (tmp_path / "run/run.lock").touch()  # is gone when the command has ended
    said, _ = fitted(
        tmp_path / "run", Visited([row, row]), logger=CSVLogger(tmp_path / "run", name="metrics")
    )
    lines = said.splitlines()
    assert (
        [line.split("  (")[0] for line in lines[:3]]
        == [
            "epoch 1/3: loss 2.0000  val/accuracy 0.5000",  # the mean of the round; not the last batch's train/loss
            "epoch 2/3: loss 1.0000  val/accuracy 0.7500",
            "epoch 3/3: loss 0.6667  val/accuracy 0.2500",
        ]
    )
    assert lines[3].strip().startswith("3 epochs in ")
    words = [line.replace("│", " ").split() for line in lines if line.startswith("│")]
    assert words == [
        *(["loss", "2.0000", "0.6667", "0.6667", "(3)", "2.0000", "(1)"],),
        *(["val/accuracy", "0.5000", "0.2500", "0.2500", "(3)", "0.7500", "(2)"],),
    ]
    assert lines[-3:] == [
        "4 MB down and 2 MB up in 2 visits to 1 client",
        f"{tmp_path / 'run'}: metrics/",
        f"as a page: fedlight report {tmp_path / 'run'} --open",
    ]


def test_with_devices_there_is_their_table(tmp_path):
    phases = {f"{phase}_seconds": "1800" for phase in ("download", "compute", "upload")}
    row = {"round": "0", "client": "c0", "device": "board", "reason": "", "joules": "5000"}
    row |= {"bytes_down": "2000000", "bytes_up": "1000000", "round_end_seconds": "5400", **phases}
    said, _ = fitted(tmp_path, Visited([row]), epochs=1)
    assert "1 round in 1.5 hours of simulated time" in said
    assert "visits to" not in said  # the table has the bytes


def test_a_folder_that_is_shared_is_not_listed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "thesis.txt").touch()
    said, trainer = fitted(
        tmp_path, ModelCheckpoint("kept"), logger=CSVLogger("logs"), enable_checkpointing=True
    )
    assert said.splitlines()[-1] == "logs/lightning_logs/version_0, kept/epoch=2-step=6.ckpt"
    assert output_paths(trainer) == said.splitlines()[-1]


def test_only_a_run_of_its_own_is_offered_as_a_page(tmp_path, monkeypatch):
    def offered(folder):
        return report_command(L.Trainer(default_root_dir=folder, logger=False, accelerator="cpu"))

    monkeypatch.chdir(tmp_path)
    run = tmp_path / "my run"
    run.mkdir()
    assert offered(run) == ""  # nothing that a report could show
    (run / "visits.csv").touch()
    assert offered(run) == "as a page: fedlight report 'my run' --open"
    (run / "settings.json").touch()  # a recipe's stage
    assert offered(run) == ""
    (tmp_path / "visits.csv").touch()
    assert offered(tmp_path) == ""


def test_a_terminal_sees_that_it_validates(tmp_path):
    said, _ = fitted(tmp_path, terminal=True)
    assert "2/2" in said
    assert "validation" in said


def test_one_visit_is_one_visit():
    row = {"client": "c0", "bytes_down": "0", "bytes_up": "1234567890"}
    assert traffic([row]) == "0 MB down and 1,235 MB up in 1 visit to 1 client"
