"""The visit log: one CSV row for every visit of a federated run, in the order in which the visits ended.

A killed run that is resumed ends with the same file as one that was never interrupted: rows of rounds that
will be trained again are dropped at the start, and the rows of the last finished round travel in the
checkpoint, because a checkpoint can be taken (after validation) before the log has written that round.
"""

import csv
import io
import os
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import lightning as L
from lightning.pytorch.utilities import rank_zero_info

from fedlight.callbacks.full_disk import full_disk_named

Record = dict[str, int | float | str]


@runtime_checkable
class RecordsVisits(Protocol):
    """What the log needs of the federated loop.

    Attributes:
        visit_records: finished visits of the current round, cleared when the next one starts; plain values,
            the same keys in each, among them ``round``.
        rounds_done: rounds whose server step is done; after a resume, the first round that is trained again.
    """

    visit_records: list[Record]
    rounds_done: int


class VisitLog(L.Callback):
    """Writes ``visits.csv``; without a federated loop there are no visits: it says so and writes nothing.

    A file that an earlier run left there is replaced, unless that run is resumed.

    Args:
        path: the file; ``visits.csv`` in the trainer's ``default_root_dir`` if not given.
    """

    def __init__(self, path: str | None = None) -> None:
        self.path = path
        self._loop: RecordsVisits | None = None
        self._restored: list[Record] = []
        self._last_round = -1

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        loops = [callback for callback in callbacks if isinstance(callback, RecordsVisits)]
        self._loop = loops[0] if loops and trainer.is_global_zero else None
        self._file = Path(self.path or Path(trainer.default_root_dir) / "visits.csv")
        if stage == "fit" and not loops:
            rank_zero_info("VisitLog: no FederatedLoop among the callbacks, so there are no visits to log")

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._loop is None:
            return
        first_open = int(self._restored[0]["round"]) if self._restored else self._loop.rounds_done
        self._last_round = first_open - 1
        with full_disk_named(self._file):
            _keep_rounds_before(first_open, self._file)
        self._append(self._restored)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._loop is not None:
            self._append(self._loop.visit_records)

    def state_dict(self) -> dict[str, Any]:
        """The rows of the last finished round, which may not be in the file yet."""
        return {"records": [dict(record) for record in self._loop.visit_records] if self._loop else []}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._restored = state_dict["records"]

    def _append(self, records: list[Record]) -> None:
        """Adds a round's rows once, however often Lightning ends its epoch."""
        if not records or int(records[0]["round"]) <= self._last_round:
            return
        is_new = not self._file.exists()
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with full_disk_named(self._file), self._file.open("a", newline="", encoding="utf-8") as file:
            file.write(_csv_text(records, with_header=is_new))
        self._last_round = int(records[0]["round"])


def _csv_text(records: list[Record], with_header: bool) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(records[0]), lineterminator="\n")
    if with_header:
        writer.writeheader()
    writer.writerows(records)
    return text.getvalue()


def _keep_rounds_before(round_idx: int, path: Path) -> None:
    """Drops later rows, and the half row that a kill leaves; a file without any row left is removed."""
    if not path.exists():
        return
    with path.open(newline="", encoding="utf-8") as file:
        whole = [row for row in csv.DictReader(file) if None not in row.values()]
    rows = [row for row in whole if int(row["round"]) < round_idx]
    if not rows:
        path.unlink()
        return
    shorter = path.with_name(path.name + ".tmp")
    shorter.write_text(_csv_text(rows, with_header=True), encoding="utf-8")
    os.replace(shorter, path)
