"""Times and outputs of benchmark scores, in training and in ``fedlight test`` and ``fedlight validate``.

The tasks are in `fedlight.evaluation.tasks`.
"""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.seed import isolate_rng

from fedlight.callbacks.logs.trainer import (
    KeepsOwnModels,
    find_callback,
    find_own_models,
    is_out_of_time,
    log_now,
)
from fedlight.callbacks.logs.visit_log import RecordsVisits
from fedlight.callbacks.loop.run import parameters_of
from fedlight.evaluation.by_client import spread
from fedlight.evaluation.tasks.model import AnswersPrompts
from fedlight.evaluation.tasks.result import Result
from fedlight.evaluation.tasks.task import Task
from fedlight.processes.work import for_each, is_first, once
from fedlight.stacking.client_models import CLIENTS_TOGETHER, work_with_models
from fedlight.support.checks import Checked, refuse_below
from fedlight.support.files import refuse_unwritable, write_json_lines

SECONDS_BETWEEN_REPORTS = 60
WORST = 0.1
MOMENT = re.compile(r"start|epoch_\d+|validate|test|own")


class TaskScores(Checked, L.Callback):
    """Lightning callback that runs tasks, logs the model's scores and keeps every answer.

    For each task it logs ``score/NAME``, its interval ``low/NAME`` and ``high/NAME``, ``unread/NAME`` (share of answers that
    could not be read) and, where the rows have groups, ``score/NAME/GROUP`` and ``group_mean/NAME``. With choices,
    ``generated/NAME`` and ``likelihood/NAME`` are the accuracies of the written and the likeliest choice, and
    ``share/NAME/generated/A`` the share of a letter. In training it scores the global model at the end of epochs, which are
    rounds; training continues as if nothing had been measured. The answers go to ``OUTPUT/MOMENT/NAME.jsonl`` and the scores
    to ``OUTPUT/MOMENT/scores.json``. The moment is ``start``, ``epoch_3`` (from 1), ``validate`` or ``test``. Training
    removes those of an earlier run, and of a model that it trains further.

    With ``own_models``, each client's own model (the one that it would continue alone, as after local training) runs the
    tasks after training. It logs ``own/NAME/client_mean``, ``own/NAME/client_worst_tenth`` and ``own/NAME/client_std``
    over the clients, and writes the answers under the moment ``own``, with a ``client`` in each line.

    Args:
        tasks: name under which it is logged -> task; None: those of the datamodule.
        every_n_epochs: in training, run after each n-th epoch and after the last one; None: after the last one only.
        before_training: in training, also run before it: zero-shot, because a new adapter changes nothing.
        output: a folder; None: ``tasks`` in ``trainer.default_root_dir``.
        own_models: at the end of training, score each client's own model.

    Attributes:
        results: name of a task -> its last result.

    Raises:
        ValueError: a setting is out of range; in ``setup``, a task cannot read its rows, the module writes no text, several
            processes run, or ``own_models`` has no federated loop; after the first round, no client has its own model.
        OSError: the disk is full; in ``setup``, the folder cannot be written.
    """

    def __init__(
        self,
        tasks: dict[str, Task] | None = None,
        every_n_epochs: int | None = 1,
        before_training: bool = False,
        output: str | None = None,
        own_models: bool = False,
    ) -> None:
        refuse_below(1, "TaskScores.", every_n_epochs=every_n_epochs)
        if tasks is not None:
            _check_names(tasks)
        self.tasks, self.every_n_epochs, self.before_training = tasks, every_n_epochs, before_training
        self.output, self.own_models = output, own_models
        self.results: dict[str, Result] = {}
        self._tasks: Mapping[str, Task] = {}

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Read the rows of the tasks, so that faults in them are found before any work."""
        if stage not in ("fit", "validate", "test"):
            return
        if trainer.world_size > 1:
            raise ValueError("TaskScores runs its tasks in one process: set devices=1 and num_nodes=1")
        if not isinstance(pl_module, AnswersPrompts):
            raise ValueError(
                f"TaskScores needs a module with generate and log_likelihoods, such as SFTModule, not "
                f"{type(pl_module).__name__}"
            )
        data = trainer.datamodule  # type: ignore[attr-defined]
        if self.tasks is None and not hasattr(data, "tasks"):
            raise ValueError(
                f"TaskScores.tasks is not given, and {type(data).__name__} has none: set tasks, or use TaskDataModule"
            )
        self._tasks = data.tasks if self.tasks is None else self.tasks
        _check_names(self._tasks)
        self._folder = Path(self.output or Path(trainer.default_root_dir) / "tasks")
        if is_first():
            refuse_unwritable(self._folder, "TaskScores.output")
        for name, task in self._tasks.items():
            rank_zero_info(f"task {name}: {len(task.read(data)[0]):,} prompts")
        self._federation: RecordsVisits | None = find_callback(trainer, RecordsVisits)
        self._scored = 0
        if self.own_models and stage == "fit":
            self._loop, self._has_own = find_own_models(trainer, "TaskScores"), False

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.ckpt_path is None:  # before any callback measures
            self._remove_later(trainer)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.ckpt_path is not None:  # the epochs of the checkpoint are known by now
            self._remove_later(trainer)
        self._scored = trainer.current_epoch
        if self.before_training and trainer.global_step == 0:
            log_now(trainer, self._measure(pl_module, "start"))

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.own_models and not self._has_own:
            self._has_own = _has_own_models(self._loop)
        done = self._done(trainer.current_epoch + 1)
        due = self.every_n_epochs is not None and done % self.every_n_epochs == 0
        if done > self._scored and (due or done == trainer.max_epochs):
            self._scored = done
            log_now(trainer, self._measure(pl_module, f"epoch_{done}"))

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Score a run that was stopped before its last epoch, which is known only now; not by the clock: it may go on."""
        done = self._done(trainer.current_epoch)
        if done > self._scored and not is_out_of_time(trainer):
            log_now(trainer, self._measure(pl_module, f"epoch_{done}"))

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn == "validate":
            pl_module.log_dict(self._measure(pl_module, "validate"))

    def on_test_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        pl_module.log_dict(self._measure(pl_module, "test"))

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Score the clients' own models; only now are the models of the last round complete."""
        if not self.own_models:
            return
        with isolate_rng():  # training continues as if nothing had been measured
            records, scores = answers_of_own_models(pl_module, self._loop, self._tasks)
        metrics = {
            f"own/{task}/{name}": value
            for task, of_clients in scores.items()
            for name, value in spread([*of_clients.values()], WORST).items()
        }
        if trainer.is_global_zero:  # the strategy has ended its team by now
            for task, lines in records.items():
                write_json_lines(self._folder / "own" / f"{task}.jsonl", lines)
            write_json_lines(self._folder / "own" / "scores.json", [{**metrics, "clients": scores}])
        log_now(trainer, metrics)
        shown = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        rank_zero_info(f"each of {len(self._loop.clients)} clients with its own model: {shown}")

    def _done(self, epochs: int) -> int:
        """Return the number of finished epochs; Lightning also counts a round that a stop has cut short."""
        return epochs if self._federation is None else self._federation.rounds_done

    def _remove_later(self, trainer: L.Trainer) -> None:
        """Remove answers of an earlier run, and of epochs that will be trained again: others read the last ones."""
        kept = {f"epoch_{done + 1}" for done in range(trainer.current_epoch)}
        kept |= {"start"} if trainer.global_step else set()
        for name in [f"{task}.jsonl" for task in self._tasks] + ["scores.json"] if is_first() else ():
            for file in self._folder.glob(f"*/{name}"):
                if file.parent.name not in kept and MOMENT.fullmatch(file.parent.name):
                    file.unlink()

    def _measure(self, module: Any, moment: str) -> dict[str, float]:
        """Run all tasks, write their answers and return their metrics."""
        metrics: dict[str, float] = {}
        self.results = {}
        for name, task in self._tasks.items():
            with isolate_rng():
                result = task.run(module, _progress_report(name), for_each)
            self.results[name] = result
            metrics |= result.metrics(name)
            if is_first():
                write_json_lines(
                    self._folder / moment / f"{name}.jsonl", [outcome.record() for outcome in result.outcomes]
                )
            rank_zero_info(f"{moment}: {name} {result}")
        if is_first():
            write_json_lines(self._folder / moment / "scores.json", [metrics])
        # Answers that are programs are run in each process, where one may end at its limit of time.
        return once(lambda: {name: float(value) for name, value in metrics.items()})


def _progress_report(name: str) -> Callable[[int, int], None]:
    """Return a function that reports the number of answered prompts once a minute: a large model takes hours."""
    last = time.monotonic()

    def report(done: int, number: int) -> None:
        nonlocal last
        if time.monotonic() - last > SECONDS_BETWEEN_REPORTS:
            last = time.monotonic()
            rank_zero_info(f"task {name}: {done:,} of {number:,} prompts answered")

    return report


def _check_names(tasks: Mapping[str, Task]) -> None:
    if not tasks or any("/" in name or not name for name in tasks):
        raise ValueError(f"TaskScores.tasks={list(tasks)}: name one or more tasks, by names without a slash")


def _has_own_models(loop: KeepsOwnModels) -> bool:
    """Return whether a client has its own model by now; called early, before a run has taken hours.

    Raises ValueError if clients were trained, but none of them keeps a model.
    """
    if any(loop.own_state(client) is not None for client in loop.clients):
        return True
    if any(row["steps"] for row in loop.visit_records):
        raise ValueError(
            "TaskScores.own_models=true, but no client keeps a model of its own: set algorithm to one whose "
            "clients do, such as LocalOnly, or leave it at false"
        )
    return False


def answers_of_own_models(
    module: L.LightningModule, loop: KeepsOwnModels, tasks: Mapping[str, Task]
) -> tuple[dict[str, list[dict[str, Any]]], dict[str, dict[str, float]]]:
    """Run all tasks with each client's own model; a client without one answers with the global model.

    Several models answer side by side, each with its own weights; several processes share the clients. The module's
    parameters are restored bit for bit. Raises ValueError if no client has its own model.

    Returns:
        Task -> one record for each client and row, with ``client``; and task -> client -> its score, in [0, 1].
    """
    records: dict[str, list[dict[str, Any]]] = {name: [] for name in tasks}
    scores: dict[str, dict[str, float]] = {name: {} for name in tasks}
    without = [client for client in loop.clients if loop.own_state(client) is None]
    if len(without) == len(loop.clients):
        raise ValueError("TaskScores.own_models=true, but no client has a model of its own")
    if without:
        rank_zero_info(
            f"{len(without)} of {len(loop.clients)} clients were never trained and answer with the global model"
        )

    def work(model: Any) -> dict[str, tuple[list[dict[str, Any]], float]]:
        results = {name: task.run(model) for name, task in tasks.items()}
        return {
            name: ([outcome.record() for outcome in result.outcomes], result.mean)
            for name, result in results.items()
        }

    def measure(clients: Sequence[str]) -> list[dict[str, tuple[list[dict[str, Any]], float]]]:
        states = [loop.own_state(client) or {} for client in clients]  # {}: the global model
        return work_with_models(module, states, [work] * len(states), partial(parameters_of, module))

    clients = list(loop.clients)
    starts = range(0, len(clients), CLIENTS_TOGETHER)
    groups = for_each(measure, [clients[start : start + CLIENTS_TOGETHER] for start in starts])
    for client, by_task in zip(clients, chain.from_iterable(groups), strict=True):
        for name, (lines, mean) in by_task.items():
            records[name] += [{"client": client, **line} for line in lines]
            scores[name][client] = mean
    return records, scores
