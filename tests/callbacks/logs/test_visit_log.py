import lightning as L
import pytest
import torch
from one_weight import OneWeight
from plain_lightning import trainer as make_trainer
from refusals import refusal
from tiny_world import table
from torch.utils.data import DataLoader

from fedlight.callbacks.logs.visit_log import VisitLog


class TwoVisitsPerRound(L.Callback):
    """Stands in for the federated loop: what the log needs of it, and dies at a given moment."""

    def __init__(self, die_after_validation_of: int = -1) -> None:
        self.visit_records: list[dict[str, int | float | str]] = []
        self.rounds_done = 0
        self.die_after_validation_of = die_after_validation_of

    def on_train_epoch_start(self, trainer, pl_module):
        self.visit_records = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.visit_records.append({"round": self.rounds_done, "client": f"c{batch_idx}", "loss": 0.1 + 0.2})
        if batch_idx == 1:
            self.rounds_done += 1

    def on_train_epoch_end(self, trainer, pl_module):
        if self.rounds_done - 1 == self.die_after_validation_of:
            raise KeyError("killed")

    def state_dict(self):
        return {"rounds_done": self.rounds_done}

    def load_state_dict(self, state_dict):
        self.rounds_done = state_dict["rounds_done"]


class SaveAfterValidation(L.Callback):
    """The moment at which ModelCheckpoint saves when it watches a validation metric."""

    def on_validation_end(self, trainer, pl_module):
        if not trainer.sanity_checking:
            trainer.save_checkpoint(f"{trainer.default_root_dir}/after_validation.ckpt")


class SaveAfterEpoch(L.Callback):
    def on_train_epoch_end(self, trainer, pl_module):
        trainer.save_checkpoint(f"{trainer.default_root_dir}/round{trainer.current_epoch}.ckpt")


def fit(folder, callbacks, rounds, ckpt_path=None):
    trainer = make_trainer(rounds, callbacks, default_root_dir=folder)
    loader = DataLoader(torch.ones(2, 1), batch_size=1)
    trainer.fit(OneWeight(), loader, loader, ckpt_path=ckpt_path, weights_only=True)


THREE_ROUNDS = "round,client,loss\n" + "".join(
    f"{r},c{c},0.30000000000000004\n" for r in range(3) for c in range(2)
)


def test_one_row_per_visit_in_order(tmp_path):
    fit(tmp_path, [TwoVisitsPerRound(), VisitLog()], rounds=3)
    assert (tmp_path / "visits.csv").read_text() == THREE_ROUNDS


def test_a_new_run_replaces_the_file_of_an_earlier_one(tmp_path):
    path = tmp_path / "logs" / "mine.csv"
    for rounds in (2, 3):
        fit(tmp_path, [TwoVisitsPerRound(), VisitLog(str(path))], rounds)
    assert path.read_text() == THREE_ROUNDS


@pytest.mark.parametrize("checkpoint", ["round0.ckpt", "round1.ckpt"])
def test_resumed_equals_uninterrupted(tmp_path, checkpoint):
    """Rows of rounds after the checkpoint are dropped, and so is the half row that a kill left."""
    fit(tmp_path, [TwoVisitsPerRound(), VisitLog(), SaveAfterEpoch()], rounds=3)
    with (tmp_path / "visits.csv").open("a") as file:
        file.write("1,c")
    fit(tmp_path, [TwoVisitsPerRound(), VisitLog()], rounds=3, ckpt_path=tmp_path / checkpoint)
    assert (tmp_path / "visits.csv").read_text() == THREE_ROUNDS


@pytest.mark.parametrize("already_written", ["", "1,c0,0.30000000000000004\n"])
def test_a_kill_between_checkpoint_and_log_loses_no_row(tmp_path, already_written):
    """The checkpoint of round 1 exists, its rows are in the file in part or not at all."""
    with pytest.raises(KeyError):
        fit(tmp_path, [TwoVisitsPerRound(1), VisitLog(), SaveAfterValidation()], rounds=3)
    path = tmp_path / "visits.csv"
    path.write_text(path.read_text() + already_written)
    assert path.read_text().count("\n") == 3 + bool(already_written)
    checkpoint = tmp_path / "after_validation.ckpt"
    fit(tmp_path, [TwoVisitsPerRound(), VisitLog()], rounds=3, ckpt_path=checkpoint)
    assert path.read_text() == THREE_ROUNDS


def test_without_a_federated_loop_nothing_is_written(tmp_path):
    fit(tmp_path, [VisitLog()], rounds=1)
    assert not (tmp_path / "visits.csv").exists()


def test_a_log_that_was_changed_is_named_and_not_gone_on_with(tmp_path):
    """Of other ways of a damage see tests/whole/test_damaged_files.py."""
    damaged = THREE_ROUNDS.replace("0.3", "1.3", 1)

    def go_on():
        fit(tmp_path, [TwoVisitsPerRound(), VisitLog()], rounds=3, ckpt_path=tmp_path / "round1.ckpt")

    fit(tmp_path, [TwoVisitsPerRound(), VisitLog(), SaveAfterEpoch()], rounds=3)
    log = tmp_path / "visits.csv"
    log.write_text(damaged)
    with refusal(f"{log} is damaged or of another run: its rows up to round 1 are not those"):
        go_on()
    assert log.read_text() == damaged
    log.unlink()
    go_on()
    assert {row["round"] for row in table(log)} == {"1", "2"}


def test_a_path_that_cannot_be_written_is_refused_before_training(tmp_path):
    (tmp_path / "file").write_text("")
    trainer = make_trainer(1, [log := VisitLog(str(tmp_path / "file/visits.csv"))])
    with pytest.raises(OSError, match=r"VisitLog\.path=.*file cannot be written \("):
        log.setup(trainer, OneWeight(), "fit")
