"""Table of visits: one CSV row for each visit of a federated run, in the order in which the visits ended.

A killed and resumed run leaves the same file as an uninterrupted one (`fedlight.callbacks.loop.round_table`). The
checkpoint holds the rows of the last finished round, since one taken after validation comes before the log has written them.
"""

from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import lightning as L
from lightning.pytorch.utilities import rank_zero_info

from fedlight.callbacks.logs.trainer import find_callback
from fedlight.callbacks.loop.round_table import Record, RoundTable
from fedlight.support.checks import Checked


@runtime_checkable
class RecordsVisits(Protocol):
    """Federated loop with records of its visits.

    Attributes:
        visit_records: finished visits of the current round, cleared when the next one starts; plain values, the same keys
            in each, among them ``round``.
        rounds_done: number of rounds with a finished server step; after a resume, the first round to be trained again.
    """

    visit_records: list[Record]
    rounds_done: int


class VisitLog(Checked, L.Callback):
    """Lightning callback that writes ``visits.csv``; without a federated loop it says so and writes nothing.

    With a fleet, a row holds the costs of the visit on the client's device, and each client that dropped out has a row;
    `RoundProgress` prints the sums at the end of a run. A file of an earlier run is replaced, unless that run is resumed.

    Args:
        path: the file; None: ``visits.csv`` in the trainer's ``default_root_dir``.
    """

    log_name = "visits.csv"

    def __init__(self, path: str | None = None) -> None:
        self.path = path
        self._loop: RecordsVisits | None = None
        self._restored: list[Record] = []
        self._before: str | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        loop: RecordsVisits | None = find_callback(trainer, RecordsVisits)
        self._loop = loop if trainer.is_global_zero else None
        self._table = RoundTable(Path(self.path or Path(trainer.default_root_dir) / self.log_name))
        if stage == "fit" and loop is None:
            rank_zero_info("VisitLog: no FederatedLoop among the callbacks, so there are no visits to log")

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._loop is None:
            return
        first_open = self._first_open(self._restored)
        self._table.restart(first_open - 1, self._before)
        self._table.append(self._restored)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._loop is not None:
            self._table.append(self._loop.visit_records)

    def visit_rows(self) -> list[dict[str, str]]:
        """Return all visits of the run so far as text; empty without a federated loop."""
        return self._table.rows() if self._loop is not None else []

    def state_dict(self) -> dict[str, Any]:
        """Return the rows of the last finished round, which may not be in the file yet, and a digest of the file's rows."""
        if self._loop is None:
            return {"records": []}
        records = [dict(record) for record in self._loop.visit_records]
        return {"records": records, "before": self._table.digest(self._first_open(records) - 1)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._restored, self._before = state_dict["records"], state_dict.get("before")

    def _first_open(self, records: list[Record]) -> int:
        """Return the first round whose rows are not in the file for certain: the round of the last records."""
        return int(records[0]["round"]) if records or self._loop is None else self._loop.rounds_done
