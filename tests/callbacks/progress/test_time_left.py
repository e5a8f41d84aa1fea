import io
import re
import time
from types import SimpleNamespace

import pytest
import torch
from one_weight import OneWeight
from plain_lightning import trainer as make_trainer
from rich.console import Console
from torch.utils.data import DataLoader

from fedlight.callbacks.progress.round_progress import RoundProgress
from fedlight.callbacks.progress.time_left import TimeLeft
from fedlight.support.words import in_largest_unit


class Run:
    """Rounds that take the seconds they are told to."""

    def __init__(self):
        self.now = 100.0
        self.left = TimeLeft(lambda: self.now)

    def round(self, *batches, validation=0.0, after=0.0):
        self.left.round_begins()
        for seconds in batches:
            self.now += seconds
            self.left.batch_ends()
        if validation:
            self.left.validation_begins()
            self.now += validation
            self.left.validation_ends()
        self.now += after


def test_after_the_first_round_its_first_batch_does_not_count():
    run = Run()
    run.round(25.0, 1.0, 1.0, 1.0)
    assert run.left.seconds(1.0, rounds_after=16, validations_left=0) == 16 * 4.0  # not 16 x 28


@pytest.mark.parametrize(
    ("rounds_done", "expected"), [(2, 18 * 10 + 60), (3, 17 * 10 + 60), (10, 10 * 10 + 60)]
)
def test_validations_every_tenth_round_are_counted_apart(rounds_done, expected):
    """Of 20 rounds of 10 s the tenth and the last are validated, for 60 s."""
    run = Run()
    for number in range(1, rounds_done + 1):
        run.round(*[2.0] * 5, validation=60.0 if number % 10 == 0 else 0.0)
    left = 20 // 10 - rounds_done // 10
    whole = rounds_done >= 10
    assert run.left.is_whole(left) == whole
    seconds = run.left.seconds(1.0, rounds_after=20 - rounds_done, validations_left=left)
    assert seconds == (expected if whole else expected - 60)


def test_what_lies_between_two_rounds_counts():
    run = Run()
    for _ in range(3):
        run.round(1.0, 1.0, after=8.0)
    run.left.round_begins()
    assert run.left.seconds(0.0, rounds_after=1, validations_left=0) == 20.0


def test_inside_a_round_what_is_done_of_it_is_taken_off():
    run = Run()
    for _ in range(2):
        run.round(5.0, 5.0)
    run.round(5.0)
    assert run.left.seconds(0.5, rounds_after=1, validations_left=0) == 15.0
    run.round(100.0)
    assert run.left.seconds(0.5, rounds_after=0, validations_left=0) == 0.0  # not below nothing


def test_in_the_first_round_the_batches_so_far_tell():
    run = Run()
    run.round(10.0)
    assert run.left.seconds(0.25, rounds_after=1, validations_left=0) == 30.0 + 40.0
    run = Run()
    run.round(10.0, 2.0)
    assert (
        run.left.seconds(0.5, rounds_after=1, validations_left=0) == 8.0
    )  # of a round of 8 s, 12 s are gone
    assert Run().left.seconds(0.0, rounds_after=1, validations_left=0) is None


def test_a_round_that_has_ended_takes_nothing_more() -> None:
    """Rounds of 600, 100 and 0 s, the first left out: two more take 100 s, though the last was quicker than usual."""
    run = Run()
    bar = RoundProgress()
    bar.console = Console(file=io.StringIO(), width=200)
    bar.setup(SimpleNamespace(callbacks=[], is_global_zero=True), None, "fit")
    bar._time_left, bar._rounds_after = run.left, 2
    for seconds in (600.0, 100.0):
        run.round(seconds)
    bar._begin("round", 1)
    trainer = SimpleNamespace(
        current_epoch=2,
        max_epochs=5,
        progress_bar_metrics={},
        check_val_every_n_epoch=1,
        enable_validation=False,
    )
    bar.on_train_epoch_end(trainer, None)
    assert f"{in_largest_unit(100)} left" in bar.console.file.getvalue()


class Slow(OneWeight):
    """Ten batches of 0.06 s, and a validation of 2 s."""

    def training_step(self, batch, batch_idx):
        time.sleep(0.06)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        time.sleep(0.2)


@pytest.mark.slow
def test_a_log_says_that_validation_comes_on_top_until_one_was_timed(monkeypatch):
    """Of six rounds the third and the last are validated; who sleeps moves the clock on, and does not wait."""
    slept, clock = [], time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: clock() + sum(slept))
    monkeypatch.setattr(time, "sleep", slept.append)
    bar = RoundProgress()
    bar.console = Console(file=io.StringIO(), force_terminal=False, width=100)
    settings = {"check_val_every_n_epoch": 3, "num_sanity_val_steps": 0, "enable_progress_bar": True}
    trainer = make_trainer(6, [bar], **settings)
    data = DataLoader(torch.arange(10.0))
    trainer.fit(Slow(), data, data)
    lines = [line for line in bar.console.file.getvalue().splitlines() if line.startswith("epoch ")]
    assert ["and validation" in line for line in lines] == [True, True, False, False, False, False]
    seconds = [int(found[1]) if (found := re.search(r"(\d+) seconds? left", line)) else 0 for line in lines]
    assert 2 <= seconds[1] <= 4  # four rounds
    assert 3 <= seconds[2] <= 6  # three rounds and a validation
