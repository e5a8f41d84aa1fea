"""Scores of a tuned model in benchmarks: while it is trained, and in ``fedlight test`` and ``fedlight validate``.

What a task asks and what an answer is worth is said in :mod:`fedlight.evaluation.tasks`; here is when it is asked, and
where the numbers and the answers go.
"""

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import lightning as L
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.seed import isolate_rng

from fedlight.callbacks.logs.trainer import log_now
from fedlight.callbacks.scores.own_answers import answers_of_own_models, has_own_models, loop_of
from fedlight.evaluation.by_client import spread
from fedlight.evaluation.tasks.model import AnswersPrompts
from fedlight.evaluation.tasks.result import Result
from fedlight.evaluation.tasks.task import Task
from fedlight.support.files import refuse_unwritable, write_whole

SECONDS_BETWEEN_REPORTS = 60
WORST = 0.1


@runtime_checkable
class HoldsTasks(Protocol):
    """A datamodule whose test set are the tasks' rows; see ``fedlight.datamodules.instructions.task_data``."""

    tasks: Mapping[str, Task]


class TaskScores(L.Callback):
    """Has the model do tasks, logs what it scores and keeps every answer.

    For each task ``score/NAME``, ``stderr/NAME`` (standard error), ``unread/NAME`` (share of answers that could not be
    read) and, where the rows have groups, ``score/NAME/GROUP`` and ``group_mean/NAME`` are logged. In training that is
    done at the end of epochs, which are rounds, on the global model; training goes on as if nothing had been measured.
    The answers stand in ``OUTPUT/MOMENT/NAME.jsonl`` and the numbers in ``OUTPUT/MOMENT/scores.json``, where the moment
    is ``start``, ``epoch_3`` (from 1), ``validate`` or ``test``.

    With ``own_models`` each client's own model, with which it would go on alone (as after local training), does the tasks
    when training is over: ``own/NAME/client_mean``, ``own/NAME/client_worst_tenth`` and ``own/NAME/client_std`` over the
    clients are logged, and what they answer stands under the moment ``own``, a ``client`` in each line.

    Args:
        tasks: by the names under which they are logged; None: those of the datamodule.
        every_n_epochs: in training, after each n-th epoch and after the last one; None: after the last one alone.
        before_training: in training, also before it: zero-shot, as a new adapter changes nothing.
        output: a folder; None: ``tasks`` in ``trainer.default_root_dir``.
        own_models: at the end of training, score each client's own model.

    Attributes:
        results: what was found last, by task.

    Raises:
        ValueError: a setting is out of range; in ``setup``, a task cannot read its rows, the module writes no text, there
            are several processes, or ``own_models`` has no federated loop; after the first round, no client has a model
            of its own.
        OSError: the disk is full; in ``setup``, nothing can be written to the folder.
    """

    def __init__(
        self,
        tasks: dict[str, Task] | None = None,
        every_n_epochs: int | None = 1,
        before_training: bool = False,
        output: str | None = None,
        own_models: bool = False,
    ) -> None:
        if every_n_epochs is not None and every_n_epochs < 1:
            raise ValueError(
                f"TaskScores.every_n_epochs={every_n_epochs} must be at least 1, or null for the last epoch alone"
            )
        if tasks is not None:
            _check_names(tasks)
        self.tasks, self.every_n_epochs, self.before_training = tasks, every_n_epochs, before_training
        self.output, self.own_models = output, own_models
        self.results: dict[str, Result] = {}
        self._asked: Mapping[str, Task] = {}

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Reads the tasks' rows: what is wrong with them comes out before any work."""
        if stage not in ("fit", "validate", "test"):
            return
        if trainer.world_size > 1:
            raise ValueError("TaskScores asks its questions in one process: set devices=1 and num_nodes=1")
        if not isinstance(pl_module, AnswersPrompts):
            raise ValueError(
                f"TaskScores needs a module with generate and log_likelihoods, such as SFTModule, not "
                f"{type(pl_module).__name__}"
            )
        data = trainer.datamodule  # type: ignore[attr-defined]
        if self.tasks is None and not isinstance(data, HoldsTasks):
            raise ValueError(
                f"TaskScores.tasks is not given, and {type(data).__name__} has none: set tasks, or use TaskDataModule"
            )
        self._asked = data.tasks if self.tasks is None else self.tasks
        _check_names(self._asked)
        self._folder = Path(self.output or Path(trainer.default_root_dir) / "tasks")
        refuse_unwritable(self._folder, "TaskScores.output")
        for name, task in self._asked.items():
            rank_zero_info(f"task {name}: {len(task.read()[0]):,} prompts")
        if self.own_models and stage == "fit":
            self._loop, self._has_own = loop_of(trainer), False

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.before_training and trainer.global_step == 0:
            log_now(trainer, self._measure(pl_module, "start"))

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.own_models and not self._has_own:
            self._has_own = has_own_models(self._loop)
        done = trainer.current_epoch + 1
        due = self.every_n_epochs is not None and done % self.every_n_epochs == 0
        if due or done == trainer.max_epochs:
            log_now(trainer, self._measure(pl_module, f"epoch_{done}"))

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn == "validate":
            pl_module.log_dict(self._measure(pl_module, "validate"))

    def on_test_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        pl_module.log_dict(self._measure(pl_module, "test"))

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Scores the clients' own models; only now are those of the last round there."""
        if not self.own_models:
            return
        with isolate_rng():
            records, scores = answers_of_own_models(pl_module, self._loop, self._asked)
        found = {
            f"own/{task}/{name}": value
            for task, by_client in scores.items()
            for name, value in spread([*by_client.values()], WORST).items()
        }
        for task, lines in records.items():
            _write(self._folder / "own" / f"{task}.jsonl", lines)
        _write(self._folder / "own" / "scores.json", [{**found, "clients": scores}])
        log_now(trainer, found)
        shown = "  ".join(f"{name} {value:.4f}" for name, value in found.items())
        rank_zero_info(f"each of {len(self._loop.clients)} clients with its own model: {shown}")

    def _measure(self, module: Any, moment: str) -> dict[str, float]:
        """The numbers of all tasks; writes them and the answers."""
        found: dict[str, float] = {}
        self.results = {}
        for name, task in self._asked.items():
            with isolate_rng():
                result = task.run(module, said_now_and_then(name))
            self.results[name] = result
            found |= result.metrics(name)
            _write(self._folder / moment / f"{name}.jsonl", [outcome.record() for outcome in result.outcomes])
            rank_zero_info(f"{moment}: {name} {result}")
        _write(self._folder / moment / "scores.json", [found])
        return found


def said_now_and_then(name: str) -> Callable[[int, int], None]:
    """Says how many prompts are answered, once a minute: a large model takes hours."""
    last = time.monotonic()

    def say(done: int, number: int) -> None:
        nonlocal last
        if time.monotonic() - last > SECONDS_BETWEEN_REPORTS:
            last = time.monotonic()
            rank_zero_info(f"task {name}: {done:,} of {number:,} prompts answered")

    return say


def _check_names(tasks: Mapping[str, Task]) -> None:
    if not tasks or any("/" in name or not name for name in tasks):
        raise ValueError(f"TaskScores.tasks={list(tasks)}: name one or more tasks, by names without a slash")


def _write(file: Path, records: list[dict[str, Any]]) -> None:
    """One line of JSON for each; the file appears when it is whole."""
    write_whole(file, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
