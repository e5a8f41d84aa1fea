import contextlib
import io
import re
import time

import lightning as L
import pytest
import torch
from one_weight import OneWeight
from plain_lightning import trainer as make_trainer
from rich.console import Console
from torch.utils.data import DataLoader

from fedlight import RoundProgress, Visit
from fedlight.callbacks.loop.visits.visit import CLIENT_LOSSES
from fedlight.callbacks.progress import round_progress


class VisitsEach(L.Callback):
    """Stands in for the federated loop: batch i belongs to client ci."""

    visits: tuple[Visit, ...] = ()
    device_name = ""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.visits = (Visit(f"c{batch_idx}", 1),)


class FixedLoss(OneWeight):
    """Losses 1, 2, ..., 10 in a round: mean 5.5."""

    def validation_step(self, batch, batch_idx):
        self.log("val/accuracy", 0.75, prog_bar=True)

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return batch


class NotValidated(FixedLoss):
    """Its last line on the display is that of the last batch."""

    validation_step = None


LOADER = DataLoader(torch.arange(1.0, 11.0))


def trainer_with(terminal, callbacks=(), max_epochs=2):
    bar = RoundProgress(refresh_seconds=0.0)
    bar.console = Console(file=io.StringIO(), force_terminal=terminal, width=100)
    return bar.console.file, make_trainer(max_epochs, [bar, *callbacks], enable_progress_bar=True)


def shown_by(module, *callbacks, terminal=True, max_epochs=2):
    """What a fit has shown; the last batch is shown however seldom the line is renewed."""
    output, trainer = trainer_with(terminal, callbacks, max_epochs)
    trainer.progress_bar_callback.refresh_seconds = 3600.0
    trainer.fit(module, LOADER, LOADER if module.validation_step else None)
    return output.getvalue()


def without_times(text):
    return [line.split("  (")[0] for line in text.splitlines()]


def test_a_log_file_gets_one_line_per_round():
    shown = shown_by(FixedLoss(), VisitsEach(), terminal=False)
    lines = [f"round {number}/2: loss 5.5000  val/accuracy 0.7500" for number in (1, 2)]
    assert without_times(shown)[:2] == lines


@pytest.mark.parametrize(("device", "said"), [("", ""), ("iphone_12", " on iphone_12")])
def test_a_terminal_sees_round_client_device_and_loss(device, said):
    loop = VisitsEach()
    loop.device_name = device
    shown = shown_by(NotValidated(), loop)
    assert "round 2/2" in shown
    assert f"client c9{said}  loss 10.0000" in shown
    assert "10/10" in shown
    assert "\x1b[?25h\r\x1b[1A\x1b[2K" in shown  # cursor back, live line gone


def test_clients_side_by_side_are_named_and_count_each():
    """Three clients share the last of ten batches: the mean is over visits, not over batches."""

    class Groups(VisitsEach):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            self.visits = tuple(Visit(name, 1) for name in (["c1", "c2", "c3"] if batch_idx == 9 else ["c0"]))

    class GroupLoss(NotValidated):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            means = loss.detach() + torch.arange(0.0, 3.0)
            return {"loss": 3 * loss, CLIENT_LOSSES: means} if batch_idx == 9 else loss

    shown = shown_by(GroupLoss(), Groups(), max_epochs=1)
    assert "clients c1, c2 and 1 more  loss 11.0000" in shown  # the mean of 10, 11 and 12
    assert "round 1/1: loss 6.5000" in shown  # (1 + ... + 9 + 10 + 11 + 12) / 12


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_other_stages_print_ten_lines_at_most(stage):
    output, trainer = trainer_with(terminal=False)
    getattr(trainer, stage)(
        FixedLoss(), DataLoader(torch.arange(25.0)), **({} if stage == "predict" else {"verbose": False})
    )
    lines = without_times(output.getvalue())
    assert len(lines) == 10
    assert lines[-1] == f"{stage}: 25/25 batches"


@pytest.mark.parametrize("stage", ["validate", "test"])
def test_the_live_line_is_gone_before_lightning_prints_its_table(stage):
    """On one screen: the line of the bar is erased, at 10/10, before the first character of the table."""
    output, trainer = trainer_with(terminal=True)
    trainer.callbacks[0].refresh_seconds = 3600.0
    with contextlib.redirect_stdout(output):
        getattr(trainer, stage)(FixedLoss(), LOADER)
    bar, _, table = output.getvalue().partition(
        "\x1b[?25h\r\x1b[1A\x1b[2K"
    )  # the cursor is back, the line gone
    assert "10/10" in bar.rpartition("\r")[2]
    assert "val/accuracy" not in bar
    assert "val/accuracy" in table
    assert "\x1b[2K" not in table


def test_an_error_gives_the_terminal_back():
    class Breaks(FixedLoss):
        def training_step(self, batch, batch_idx):
            raise KeyError("broken")

    output, trainer = trainer_with(terminal=True)
    with pytest.raises(KeyError, match="broken"):
        trainer.fit(Breaks(), LOADER, LOADER)
    assert output.getvalue().count("\x1b[?25l") == output.getvalue().count("\x1b[?25h") == 1


class Stale(VisitsEach):
    """Stands in for a loop of buffered rounds: batch i is of a client that was asked in the first round."""

    rounds_done = 0

    def __init__(self):
        self.visit_records = [{"staleness": 2, "reason": "left"}]
        self.visit_records += [{"staleness": age, "reason": ""} for age in (0, 1)]

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.visits = (Visit(f"c{batch_idx}", 1, asked=0),)


@pytest.mark.parametrize("terminal", [True, False])
def test_the_age_of_the_model_is_named(terminal):
    output, trainer = trainer_with(terminal, callbacks=[Stale()])
    trainer.progress_bar_callback.console = Console(file=output, force_terminal=terminal, width=160)
    trainer.fit(NotValidated(), LOADER)
    lines = [line for line in without_times(output.getvalue()) if "round 2/2: loss" in line]
    assert "staleness 0 to 1" in lines[-1]
    if terminal:
        assert "client c9, model of 1 round ago" in output.getvalue()


@pytest.mark.parametrize(("least", "said"), [(0.0, True), (60.0, False)])
def test_a_long_fit_is_foretold_once(monkeypatch, least, said):
    """Ten batches in each of two rounds; the loss is that of a batch of one number."""
    monkeypatch.setattr(round_progress, "FORETOLD_AFTER", 0.0)
    monkeypatch.setattr(round_progress, "MINUTE", least)
    monkeypatch.setattr(round_progress.hardware, "peak_memory", lambda device: 3_140_000_000)
    shown = shown_by(TokensLoss(), terminal=False)
    lines = [line for line in shown.splitlines() if "so far" in line]
    assert len(lines) == said
    if said:
        assert re.fullmatch(
            r"18 batches, about 54 tokens, .* left( and validation)?; 3\.1 GB of memory at the peak so far",
            lines[0],
        )


def test_scores_and_attacks_between_rounds_are_named_as_not_counted(monkeypatch):
    monkeypatch.setattr(round_progress, "FORETOLD_AFTER", 0.0)
    monkeypatch.setattr(round_progress, "MINUTE", 0.0)
    monkeypatch.setattr(Asked, "__module__", "fedlight.callbacks.scores.asked")
    said = " ".join(shown_by(TokensLoss(), Asked(), Stale(), terminal=False).split())
    assert re.search(
        r"18 batches, about 54 tokens, [^,]* left( and validation)?, not counted: Asked\b(?!,)", said
    )


class Asked(L.Callback):
    """Stands for a callback that asks the model after each round."""


class TokensLoss(NotValidated):
    """Each number of the loader is a batch of three tokens; rounding to whole seconds needs steps that last."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return {"input_ids": batch.expand(1, 3)}

    def training_step(self, batch, *args):
        time.sleep(0.06)
        return super().training_step(batch["input_ids"][:, 0], *args)


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_the_time_between_updates_is_a_number_of_at_least_0(seconds):
    with pytest.raises(ValueError, match=r"RoundProgress\.refresh_seconds"):
        RoundProgress(seconds)
