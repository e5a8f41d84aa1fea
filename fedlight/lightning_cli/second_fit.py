"""A second ``fedlight fit`` in the folder of a run: nothing is done, the run goes on, starts over, or is refused.

A finished run with the same settings is left as it is; one that was stopped goes on from its newest checkpoint, and ends
with the same bits as without the stop. Other settings are refused, except a larger number of epochs: the run goes on. The
settings are kept in ``fit.json``, the end of a run in ``run.json``, and metrics in checkpoints.
"""

import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import (
    DeviceStatsMonitor,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelSummary,
    ProgressBar,
)

from fedlight.callbacks.loop.guard import MAY_CHANGE
from fedlight.lightning_cli.class_names import class_of, last_part
from fedlight.lightning_cli.run_record import last_fit
from fedlight.runs.contents import MadeWith, digest_of, in_words, tables_since
from fedlight.support.checkpoint_files import follow_moved_files, newest_checkpoint
from fedlight.support.settings_record import CLASS, Difference, described

NAME = "fit.json"
METRICS = "fedlight_metrics"  # key of a checkpoint
EPOCHS = "trainer.max_epochs"
OF_COMMAND = ("config", "ckpt_path", "resume", "weights_only", "extends", "drop_callbacks")
OF_OUTPUT = ("default_root_dir", "logger", "enable_progress_bar", "enable_model_summary", "log_every_n_steps")
OF_LOADERS = ("num_workers", "pin_memory", "persistent_workers", "prefetch_factor")
OF_PROCESSES = ("strategy", "devices", "num_nodes")
SHOW_ONLY = (ProgressBar, ModelSummary, LearningRateMonitor, DeviceStatsMonitor)
REMEDY = "start over with --resume false, or choose another --trainer.default_root_dir"


class FitFolder:
    """Folder of a run that ``fedlight fit`` has been given, with all settings and the files of `checkpoints_of`."""

    def __init__(self, folder: Path, config: Mapping[str, Any], checkpoints: Iterable[Path]) -> None:
        self.folder = folder
        settings = compared(config, str(folder))
        self.made = MadeWith(folder / NAME, settings, settings, folder, REMEDY)
        self.checkpoint: Path | None = None  # where the run goes on; None where it starts
        self.said = ""  # one line for the user about what happens; empty for a new run
        self._starts_over = False  # with other settings, where there is no checkpoint
        self._federated = config.get("federated") is not None
        self._checkpoints = {os.path.relpath(file, folder): file for file in checkpoints}

    def has_work(self, writes: bool = True) -> bool:
        """Return whether there is something to do, and set ``checkpoint`` and ``said``; of several processes one ``writes``.

        Raises ValueError for other or unknown settings, and for more epochs of a finished run without a checkpoint.
        """
        last = last_fit(self.folder)
        if not self.made.file.is_file():
            # The process that writes them may be between the two files.
            if (last is None or not writes) and not self._checkpoints:
                return True
            name = next(iter(self._checkpoints), "run.json")
            raise ValueError(
                f"{self.folder} has a run ({name}) and no {NAME}, so its settings are not known: put it back, go on with "
                f"--ckpt_path FILE, {REMEDY}"
            )
        done = last is not None and last.get("state") == "done"
        changes = self.made.differences()
        raised = _raised_epochs(changes)
        is_other = bool(changes) and raised is None
        if not done:
            files = self._own_checkpoints()
            self.checkpoint = newest_checkpoint(files, self._federated)
            # Those of a federated run fit none without a federation, and are not to be lost.
            if self.checkpoint is None and not (files and is_other):
                self.said = f"{self.folder}: the run was stopped without a checkpoint, so it starts over"
                self._starts_over = bool(changes)
                return True
        if is_other:
            raise ValueError(
                f"{self.folder} has a {'finished' if done else 'stopped'} run with other settings "
                f"({in_words(changes)}): give the same, {REMEDY}"
            )
        self.made.refuse_changed_files(everything=not done, remedy=REMEDY)
        # A run that early stopping ended below its limit would end there again.
        if done and not (raised and (last or {}).get("epochs", raised[0]) >= raised[0]):
            way = f"A larger {EPOCHS} goes on."
            if raised or (last or {}).get("epochs", math.inf) < (
                self.made.settings["trainer"]["max_epochs"] or 0
            ):
                way = f"It ended by itself after {(last or {})['epochs']} epochs."
            what = f"{self.folder} has the finished run with these settings"
            self.said = f"{what}: nothing is done. {way} --resume false starts over"
            return False
        self.checkpoint = self.checkpoint or newest_checkpoint(self._own_checkpoints(), self._federated)
        if self.checkpoint is None:
            raise ValueError(f"{self.folder} has a finished run without a checkpoint to go on from: {REMEDY}")
        longer = f", to {raised[1]} epochs instead of {raised[0]}; schedules follow" if raised else ""
        self.said = f"{self.folder}: the run goes on from {self.checkpoint.name}{longer}"
        return True

    def begin(self, starts_over: bool, given: str | None) -> None:
        """Write the settings, before the first work, and which checkpoints and tables are of an earlier run.

        Where it starts over, all of them are. Where the user has ``given`` a checkpoint, that one and the tables are not.
        """
        starts_over |= self._starts_over
        if self.made.file.is_file() and not starts_over and not (given and self.made.differences()):
            earlier = self.made.earlier()
        else:
            resumed = os.path.relpath(given, self.folder) if given else None
            earlier = {name: digest_of(file) for name, file in self._checkpoints.items() if name != resumed}
            earlier |= tables_since(self.folder, 0) if starts_over and not given else {}
        self.made.write(earlier)

    def _own_checkpoints(self) -> list[Path]:
        """Return the checkpoints of this run, without those that were there before it."""
        earlier = self.made.earlier()
        files = self._checkpoints.items()
        return [file for name, file in files if name not in earlier or digest_of(file) != earlier[name]]


class KeptMetrics(L.Callback):
    """Lightning callback that keeps ``callback_metrics`` in checkpoints.

    Lightning forgets them when a run is resumed, and tables of recipes and model cards would lack each metric that is not
    logged again: the last rounds may group no clients, and after the last checkpoint there is no round left.
    """

    def __init__(self) -> None:
        self._before: dict[str, Any] = {}

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Write the metrics into the checkpoint."""
        checkpoint[METRICS] = {name: value.cpu() for name, value in trainer.callback_metrics.items()}

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Read the metrics of the stopped run, and which files are its best."""
        self._before = checkpoint.get(METRICS, {})
        follow_moved_files(trainer, checkpoint)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Give the trainer its metrics back: only now, as Lightning has emptied them meanwhile."""
        trainer.callback_metrics.update(self._before)


def checkpoints_of(trainer: L.Trainer) -> list[Path]:
    """Return the files in the folders of a trainer's ``ModelCheckpoint``, including earlier versions of the logger.

    Without a ``dirpath`` they are below the first logger's folder, if that is in the trainer's ``default_root_dir``.
    """
    root = Path(trainer.default_root_dir)
    files: set[Path] = set()
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if not isinstance(callback, ModelCheckpoint):
            continue
        if callback.dirpath is not None:
            files |= set(Path(callback.dirpath).glob("*.ckpt"))
        elif trainer.loggers:
            logs = Path(trainer.loggers[0].save_dir or root, str(trainer.loggers[0].name))
            # One folder for each version; a logger's folder elsewhere may have checkpoints of other runs.
            files |= set(logs.glob("*/checkpoints/*.ckpt")) if logs.is_relative_to(root) else set()
        else:
            files |= set(root.glob("checkpoints/*.ckpt"))
    return sorted(files)


def compared(config: Mapping[str, Any], root: str) -> dict[str, Any]:
    """Return the settings that change a run's result, as plain values.

    Left out are loggers, progress bars, processes of loaders, and the processes that share a federation.

    Examples:
        >>> config = {"trainer": {"max_epochs": 3, "logger": True}, "resume": True}
        >>> compared(config, "runs/a")
        {'trainer': {'max_epochs': 3}}
    """
    settings = described({key: value for key, value in config.items() if key not in OF_COMMAND})
    whole: dict[str, Any] = _plain(settings, os.path.normpath(root))
    of_trainer = {*OF_OUTPUT}
    if whole.get("federated") and whole["trainer"].get("strategy") in ("auto", "client_parallel", None):
        # Under client_parallel any number of processes gives the same result.
        of_trainer |= {*OF_PROCESSES}
    if whole.get("trainer", {}).get("max_time"):
        whole["trainer"]["max_time"] = None  # a limit of the command, not of the run
    for part, names in (("trainer", of_trainer), ("data", OF_LOADERS), ("federated", MAY_CHANGE)):
        if isinstance(whole.get(part), dict):
            whole[part] = {key: value for key, value in whole[part].items() if key not in names}
    return whole


def _plain(value: Any, root: str) -> Any:
    """Return settings with one map for a class and its arguments, and with callbacks by the names of their classes."""
    if isinstance(value, str):
        path = os.path.normpath(value)  # of runs/a/ and ./runs/a
        # Relative to the run's folder, so the folder may be moved.
        inside = path == root or path.startswith(f"{root}/")
        return f".{path.removeprefix(root)}" if inside else value
    if isinstance(value, list):
        return [_plain(item, root) for item in value]
    if not isinstance(value, dict):
        return value
    if isinstance(value.get("class_path"), str):
        arguments = {**(value.get("init_args") or {}), **(value.get("dict_kwargs") or {})}
        return {CLASS: value["class_path"], **{key: _plain(item, root) for key, item in arguments.items()}}
    return {
        key: _by_class(_plain(item, root)) if key == "callbacks" else _plain(item, root)
        for key, item in value.items()
    }


def _by_class(callbacks: Any) -> Any:
    """Return callbacks by the names of their classes, without those that only show something."""
    if not isinstance(callbacks, list):
        return callbacks
    named: dict[str, Any] = {}
    for callback in callbacks:
        path = callback.get(CLASS) if isinstance(callback, dict) else callback
        if (kind := class_of(str(path))) is not None and issubclass(kind, SHOW_ONLY):
            continue
        name = last_part(str(path))
        number = sum(key.partition(" ")[0] == name for key in named)
        # Several callbacks of one class are numbered in their order: ModelCheckpoint, ModelCheckpoint 2.
        named[f"{name} {number + 1}" if number else name] = callback
    return named


def _raised_epochs(changes: list[Difference]) -> tuple[int, int] | None:
    """Return the old and new number of epochs where a run of more epochs is the only difference."""
    if [name for name, _, _ in changes] != [EPOCHS]:
        return None
    was, now = changes[0][1:]
    # -1 is Lightning's word for no limit.
    ends = [math.inf if epochs == -1 else epochs for epochs in (was, now)]
    return (was, now) if all(isinstance(end, (int, float)) for end in ends) and ends[0] < ends[1] else None
