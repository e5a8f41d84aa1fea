"""Trained adapter as a PEFT folder with a model card, written after training; ``PeftModel.from_pretrained`` loads it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_info

from fedlight.callbacks.export.card_facts import card_facts, public_name
from fedlight.callbacks.export.model_card import adapter_notes, adapter_use, write_card
from fedlight.callbacks.logs.trainer import find_callback, log_now
from fedlight.callbacks.logs.visit_log import VisitLog
from fedlight.support.checkpoint_files import follow_moved_files
from fedlight.support.checks import Checked
from fedlight.support.files import read_json, refuse_unwritable, whole_folder


@runtime_checkable
class TrainsClients(Protocol):
    """Federated loop: its algorithm, clients and settings, and the rounds with a finished server step."""

    algorithm: Any
    clients: Mapping[str, Any]
    clients_per_round: int
    local_steps: int | None
    rounds_done: int


class AdapterExport(Checked, L.Callback):
    """Lightning callback that writes the adapter at the end of ``fit``; a killed run leaves the whole folder or none.

    The folder's ``README.md`` is a model card: method, counts of the data, rounds, cost, privacy and the last scores,
    without a row, a client's id or a path. ``fedlight export`` makes other formats of it.

    Args:
        folder: the adapter's folder; an existing one is replaced. It may hold neither the run's nor the current one.
        monitor: metric of a ``ModelCheckpoint`` of the run: its best epoch is exported and left in the module, and the
            number of that epoch, from 1, becomes the metric ``exported/epoch``. None: the last epoch, which is also
            exported where no checkpoint has been saved.

    Raises:
        ValueError: before training, for a module without ``save_adapter``, a ``monitor`` without its ``ModelCheckpoint``, or
            such a folder.
        OSError: the disk is full; before training, the folder cannot be written.
    """

    def __init__(self, folder: str, monitor: str | None = None) -> None:
        self.folder, self.monitor = Path(folder), monitor

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == "fit" and not hasattr(pl_module, "save_adapter"):
            raise ValueError(
                f"AdapterExport({str(self.folder)!r}): {type(pl_module).__name__} has no method "
                "save_adapter(folder): take the callback out or derive the module from LanguageModule"
            )
        if stage == "fit" and self.monitor is not None and self._keeper(trainer) is None:
            raise ValueError(
                f"AdapterExport.monitor={self.monitor!r}: no ModelCheckpoint has this monitor, so no best epoch is known: "
                "add one to trainer.callbacks, or set AdapterExport.monitor to null"
            )

        kept = Path(trainer.default_root_dir).resolve(), Path.cwd()
        if stage == "fit" and any(folder.is_relative_to(self.folder.resolve()) for folder in kept):
            raise ValueError(
                f"AdapterExport.folder={self.folder} would take the place of all that is in it: give a new folder, such as "
                f"{self.folder / 'adapter'}"
            )
        if stage == "fit" and trainer.is_global_zero:
            refuse_unwritable(self.folder.parent, "AdapterExport.folder")

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keep the best epoch so far of a run whose folder is another one now."""
        follow_moved_files(trainer, checkpoint)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        metrics, rounds = dict(trainer.callback_metrics), None
        keeper = self._keeper(trainer)
        if keeper is not None and not keeper.best_model_path:  # as with every_n_epochs above max_epochs
            rank_zero_info(
                f"AdapterExport: no checkpoint was saved by {self.monitor}, so the last epoch is exported"
            )
        elif keeper is not None:
            score, rounds = self._load_best(keeper, trainer, pl_module)
            # Other scores are of the last epoch; the privacy of the whole run holds for each of its models.
            metrics = {name: x for name, x in metrics.items() if name.startswith("fed/")} | score
        if not trainer.is_global_zero:  # all processes load the best epoch, one writes it
            return
        with whole_folder(self.folder) as new:  # a kill leaves the whole folder or none
            pl_module.save_adapter(new)  # type: ignore[operator]
            _write_card(trainer, pl_module, new, metrics, rounds)

    def _keeper(self, trainer: L.Trainer) -> ModelCheckpoint | None:
        """Return the callback that knows the best epoch; None for the last epoch."""
        savers = [each for each in trainer.checkpoint_callbacks if isinstance(each, ModelCheckpoint)]
        # Without a saved file there is no best epoch to load.
        watched = (each for each in savers if each.save_top_k and each.monitor == self.monitor)
        return next(watched, None) if self.monitor is not None else None

    def _load_best(
        self, keeper: ModelCheckpoint, trainer: L.Trainer, module: L.LightningModule
    ) -> tuple[dict[str, Any], int]:
        """Load the best checkpoint into the module; return its score by the metric's name, and the number of its epoch."""
        best = torch.load(keeper.best_model_path, map_location="cpu", weights_only=True)
        module.load_state_dict(best["state_dict"])
        epoch, score = best["epoch"] + 1, keeper.best_model_score
        log_now(trainer, {"exported/epoch": float(epoch)})  # an export looks there for the epoch
        rank_zero_info(
            f"AdapterExport: epoch {epoch}/{trainer.current_epoch}, best by {self.monitor}: {score:.4f}"
        )
        return {str(self.monitor): score}, epoch


def _write_card(
    trainer: L.Trainer,
    module: L.LightningModule,
    folder: Path,
    metrics: Mapping[str, Any],
    rounds: int | None,
) -> None:
    """Write the card of a run that has just ended, with these metrics; ``rounds``: of an earlier epoch."""
    loop: TrainsClients | None = find_callback(trainer, TrainsClients)
    visits: VisitLog | None = find_callback(trainer, VisitLog)
    data = trainer.datamodule  # type: ignore[attr-defined]
    reads = hasattr(data, "train_rows")  # a source and its split
    of_loop, clients, rounds_done = {}, [], trainer.current_epoch
    rows = [] if visits is None else visits.visit_rows()
    if loop is not None:
        of_loop = {"clients_per_round": loop.clients_per_round, "local_steps": loop.local_steps}
        clients, rounds_done = [*loop.clients.values()], loop.rounds_done
    facts = card_facts(
        type(module),
        None if loop is None else type(loop.algorithm),
        [dict(module.hparams), of_loop, {"batch_size": data.batch_size} if reads else {}],
        {name: float(value) for name, value in metrics.items()},
        [row for row in rows if rounds is None or int(row["round"]) < rounds],
        _record(Path(trainer.default_root_dir)),
        source=public_name(data.train_rows[0]) if reads else "",
        clients=len(clients),
        examples=sum(client.num_examples for client in clients),
        added=sum(map(len, getattr(data, "added", {}).values())),
        rounds=rounds or rounds_done,
    )
    # Each of several adapters has a folder.
    names = sorted(file.parent.name for file in folder.glob("*/adapter_config.json")) or ["default"]
    task = getattr(module, "task", "CAUSAL_LM")
    what = "LoRA adapter" if len(names) == 1 else f"{len(names)} LoRA adapters"
    use = adapter_use(facts.base, task, names, getattr(module, "num_labels", None) or 1)
    is_on_merged_base = bool(getattr(module, "hparams", {}).get("merge_adapter"))
    write_card(facts, folder, what=what, use=use, task=task, notes=adapter_notes(facts, is_on_merged_base))


def _record(folder: Path) -> dict[str, Any]:
    """Return the entry of the command under way in ``run.json``; empty in a script."""
    try:
        last = read_json(folder / "run.json", "")["commands"][-1]
        return dict(last) if last["state"] == "running" else {}  # an ended one is of another run
    except (FileNotFoundError, ValueError, LookupError, TypeError):
        return {}
