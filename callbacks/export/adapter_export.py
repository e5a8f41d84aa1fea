"""Trained adapter as a PEFT folder, written after training; ``PeftModel.from_pretrained`` loads it."""

import os
import shutil
from pathlib import Path
from typing import Protocol, runtime_checkable

import lightning as L

from fedlight.support.files import full_disk_named, sync


@runtime_checkable
class SavesAdapter(Protocol):
    """Module with an adapter that it can save."""

    def save_adapter(self, folder: Path) -> None:
        """Write ``adapter_config.json`` and the adapter's weights into ``folder``."""


class AdapterExport(L.Callback):
    """Lightning callback that writes the adapter at the end of ``fit``; a killed run leaves the whole folder or none.

    Args:
        folder: the adapter's folder; an existing one is replaced.

    Raises:
        ValueError: before training, for a module without ``save_adapter``.
        OSError: the disk is full.
    """

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == "fit" and not isinstance(pl_module, SavesAdapter):
            raise ValueError(
                f"AdapterExport({str(self.folder)!r}): {type(pl_module).__name__} has no method "
                "save_adapter(folder): take the callback out or derive the module from LanguageModule"
            )

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        assert isinstance(pl_module, SavesAdapter)
        new = self.folder.with_name(self.folder.name + ".tmp")
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
        with full_disk_named(new):
            pl_module.save_adapter(new)
            for path in (*new.rglob("*"), new):
                sync(path)
        _replace_folder(new, self.folder)


def _replace_folder(new: Path, folder: Path) -> None:
    """Move ``new`` to ``folder``; ``os.replace`` cannot replace a folder that is not empty."""
    old = folder.with_name(folder.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        os.replace(folder, old)
    os.replace(new, folder)
    sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)
