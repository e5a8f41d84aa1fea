"""The time that a run will still take, at the end of a round."""

import io
from types import SimpleNamespace

from rich.console import Console

from fedlight.callbacks.progress.round_progress import RoundProgress
from fedlight.support.words import in_largest_unit


def test_a_round_that_has_ended_takes_nothing_more() -> None:
    """Rounds of 100 and 0 s, the first left out: two more take 100 s, though the last was quicker than usual."""
    bar = RoundProgress()
    bar.console = Console(file=io.StringIO(), width=200)
    bar.setup(SimpleNamespace(callbacks=[], is_global_zero=True), None, "fit")
    bar._rounds, bar._rounds_after = [600.0, 100.0], 2
    bar._begin("round", 1)
    trainer = SimpleNamespace(current_epoch=2, max_epochs=5, progress_bar_metrics={})
    bar.on_train_epoch_end(trainer, None)
    assert f"{in_largest_unit(100)} left" in bar.console.file.getvalue()
