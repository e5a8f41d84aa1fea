"""Predictions as JSON lines, written batch by batch: an interrupted predict run resumes where it stopped.

During a run the lines are in ``<path>.partial``, and ``<path>.progress`` holds the number of complete batches and bytes with
a digest of them; ``<path>`` appears at the end, complete. A run that finds a partial file cuts it back to the last complete
batch and has the datamodule skip that many batches. It ends with the same file as an uninterrupted run, provided that
``predict_step`` draws its randomness from the batch (its ``index``), not from ``batch_idx``, which restarts at 0. Where one
of the two files is damaged, all predictions are made again.

Several processes predict in turn, one batch each, and the first of them writes the lines in order. So the file is the same
on any number of processes, also that of a run that goes on with another number.
"""

import hashlib
import json
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from fedlight.processes.team import current_team
from fedlight.processes.work import is_first, is_own_turn, once
from fedlight.support.checks import Checked
from fedlight.support.files import full_disk_named, sealed, sync, unsealed, write_whole

LINES = "digest of lines"


class PredictionWriter(Checked, L.Callback):
    """Lightning callback that writes one JSON line for each example of ``trainer.predict``.

    Args:
        path: the file of JSON lines.
        fields: names of the predictions: one name for a list with one entry per example (such as its completions),
            k names for a tensor ``(batch, k)``, or ``(batch, k, U)`` for U numbers under each name.
        copy: keys of the batch whose entries precede the prediction, such as ``prompt``.

    Raises:
        ValueError: without ``fields``, or for a name given twice; before any work, for several processes, a ``path`` that is
            a folder, or a partial file of another model or of other data; for a prediction that is no finite number.
        OSError: the disk is full.

    Examples:
        >>> _lines({}, torch.tensor([[[-0.5, -1.5], [-1.0, -0.25]]]), ["logp_a", "logp_b"], [])
        ['{"logp_a": [-0.5, -1.5], "logp_b": [-1.0, -0.25]}']
        >>> _lines({"prompt": ["Hi"]}, [["a", "b"]], ["completions"], ["prompt"])
        ['{"prompt": "Hi", "completions": ["a", "b"]}']
    """

    def __init__(self, path: str, fields: Sequence[str], copy: Sequence[str] = ("index",)) -> None:
        if not fields or len({*copy, *fields}) < len(copy) + len(fields):
            raise ValueError(
                f"PredictionWriter.fields={list(fields)}: name one prediction or several, by names that are not those of "
                f"copy={list(copy)}, each once"
            )
        self.path, self.fields, self.copy = Path(path), list(fields), list(copy)
        self._partial, self._progress = Path(f"{path}.partial"), Path(f"{path}.progress")

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Cut a partial file back to its complete batches and have the datamodule skip them."""
        if stage != "predict":
            return
        if trainer.world_size > 1:
            raise ValueError(f"PredictionWriter writes {self.path} in one process: set devices=1 num_nodes=1")
        if self.path.is_dir():
            raise ValueError(f"PredictionWriter.path={self.path} is a folder: give the name of a file")
        data = trainer.datamodule  # type: ignore[attr-defined]
        can_skip = hasattr(data, "skip_predict_batches")
        self._digest = hashlib.blake2b(digest_size=16)
        self._own, self._num_open = "", 0
        self._state: dict[str, Any] = once(lambda: self._open(can_skip))
        if can_skip:
            data.skip_predict_batches = self._state["batches"]

    def on_predict_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Check that a partial file is of this model; weights from a checkpoint are loaded by now."""
        num_batches = self._state["batches"] + sum(trainer.num_predict_batches)
        who = _fingerprint(pl_module, trainer.datamodule, num_batches)  # type: ignore[attr-defined]
        if self._state.setdefault("fingerprint", who) != who:
            raise ValueError(
                f"{self._partial} was begun with another model, other data or other settings: "
                "remove it to begin anew, or give another path"
            )
        step = pl_module.predict_step
        if current_team().size > 1 and not isinstance(step, _InTurn):
            pl_module.predict_step = _InTurn(step)  # type: ignore[method-assign]
            warnings.filterwarnings("ignore", "predict returned None")  # for batches of other processes

    def on_predict_batch_start(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Note that all batches before this one are complete."""
        if dataloader_idx > 0:
            raise ValueError(f"PredictionWriter writes {self.path} of one predict loader, here are several")
        if self._num_open == 0 and is_first():
            self._write_progress()

    def on_predict_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Append the lines of this batch, or of one batch of each process once all of them are predicted."""
        if is_own_turn(batch_idx) and current_team().leads:
            self._own = "".join(f"{line}\n" for line in _lines(batch, outputs, self.fields, self.copy))
        self._num_open += 1
        if self._num_open == current_team().seats:
            self._append()

    def on_predict_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Move the complete file to its place."""
        if self._num_open:
            self._append()
        if not is_first():
            return
        # Before the file has its name: a crash leaves the partial file or the whole one.
        sync(self._partial)
        os.replace(self._partial, self.path)
        sync(self.path.parent)
        self._progress.unlink(missing_ok=True)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Make the next predict run of the datamodule skip nothing."""
        if isinstance(vars(pl_module).get("predict_step"), _InTurn):
            del pl_module.predict_step
        data = trainer.datamodule  # type: ignore[attr-defined]
        if stage == "predict" and hasattr(data, "skip_predict_batches"):
            data.skip_predict_batches = 0

    def _open(self, can_skip: bool) -> dict[str, Any]:
        """Cut a partial file back to its complete batches, if they can be skipped, and return the progress."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        state = self._read_progress() if can_skip else {"batches": 0, "bytes": 0}
        with full_disk_named(self._partial), self._partial.open("ab") as file:
            if file.tell() > state["bytes"]:
                file.truncate(state["bytes"])  # drops the lines of a batch that was cut off
        return state

    def _append(self) -> None:
        """Append the lines of all processes to the file; batches of the same turn lie with the processes in order."""
        text = "".join(current_team().gather(self._own, "predictions")).encode()
        if is_first():
            with full_disk_named(self._partial), self._partial.open("ab") as file:
                file.write(text)
        self._state["batches"] += self._num_open
        self._state["bytes"] += len(text)
        self._digest.update(text)
        self._own, self._num_open = "", 0

    def _read_progress(self) -> dict[str, Any]:
        """Return the progress of the partial file; none where a file is damaged or the two do not belong together."""
        nothing = {"batches": 0, "bytes": 0}
        if not self._partial.exists() or not self._progress.exists():
            return nothing
        try:
            state: dict[str, Any] = unsealed(json.loads(self._progress.read_text(encoding="utf-8")))
            digest = state.pop(LINES)
            with self._partial.open("rb") as file:
                self._digest.update(file.read(state["bytes"]))
            if self._digest.hexdigest() == digest and isinstance(state["batches"], int):
                return state
        except (ValueError, KeyError, TypeError, AttributeError):
            pass
        rank_zero_warn(f"{self._partial} or {self._progress.name} is damaged: all predictions are made again")
        self._digest = hashlib.blake2b(digest_size=16)
        return nothing

    def _write_progress(self) -> None:
        write_whole(self._progress, json.dumps(sealed({**self._state, LINES: self._digest.hexdigest()})))


class _InTurn:
    """``predict_step`` that predicts the batches of this process alone, and returns None for the others."""

    def __init__(self, step: Callable[..., Any]) -> None:
        self._step = step

    def __call__(self, batch: Any, batch_idx: int, *args: Any) -> Any:
        return self._step(batch, batch_idx, *args) if is_own_turn(batch_idx) else None


def _lines(batch: Any, predictions: Any, fields: Sequence[str], copy: Sequence[str]) -> list[str]:
    """Return one JSON object per example: the copied entries of the batch, then the prediction."""
    missing = [key for key in copy if not isinstance(batch, Mapping) or key not in batch]
    if missing:
        has = sorted(batch) if isinstance(batch, Mapping) else type(batch).__name__
        raise ValueError(f"PredictionWriter.copy={list(copy)}: the batch has no {missing[0]!r}, it has {has}")
    columns = [*(batch[key] for key in copy), predictions]
    if len(fields) > 1:
        shape = tuple(predictions.shape) if isinstance(predictions, Tensor) else ()
        if len(shape) not in (2, 3) or shape[1] != len(fields):
            raise ValueError(
                f"PredictionWriter.fields={list(fields)} names {len(fields)} numbers per example, but predict_step returns "
                f"{shape or type(predictions).__name__}: it must be a tensor (batch, {len(fields)}), or "
                f"(batch, {len(fields)}, U) for U numbers under each name"
            )
        columns[-1:] = predictions.unbind(dim=1)
    lists = (list(each.tolist() if isinstance(each, Tensor) else each) for each in columns)
    named = (dict(zip([*copy, *fields], row, strict=True)) for row in zip(*lists, strict=True))
    try:
        return [json.dumps(row, ensure_ascii=False, allow_nan=False) for row in named]
    except ValueError:  # JSON has no NaN
        raise ValueError(
            f"PredictionWriter.fields={list(fields)}: a prediction is NaN or infinite, as of a model that has diverged: "
            "train it again with a lower learning rate"
        ) from None


def _fingerprint(module: L.LightningModule, data: Any, num_batches: float) -> str:
    """Return a digest of the settings and the trained weights."""
    data_settings = dict(data.hparams) if isinstance(data, L.LightningDataModule) else {}
    settings = [dict(module.hparams), data_settings, num_batches]
    text = json.dumps(settings, sort_keys=True, default=lambda o: type(o).__qualname__)
    digest = hashlib.sha256(text.encode())
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:  # the settings name the frozen base
            digest.update(name.encode())
            # As bytes, because numpy has no bf16.
            digest.update(parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
