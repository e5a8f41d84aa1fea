"""The visit log: one CSV row for every visit of a federated run, in the order in which the visits ended.

A killed run that is resumed ends with the same file as one that was never interrupted
(:mod:`fedlight.callbacks.loop.round_table`). The rows of the last finished round travel in the checkpoint, because a
checkpoint can be taken (after validation) before the log has written that round.
"""

from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import lightning as L
from lightning.pytorch.utilities import rank_zero_info

from fedlight.callbacks.loop.round_table import RoundTable, Row


@runtime_checkable
class RecordsVisits(Protocol):
    """What the log needs of the federated loop.

    Attributes:
        visit_records: finished visits of the current round, cleared when the next one starts; plain values,
            the same keys in each, among them ``round``.
        rounds_done: rounds whose server step is done; after a resume, the first round that is trained again.
    """

    visit_records: list[Row]
    rounds_done: int


class VisitLog(L.Callback):
    """Writes ``visits.csv``; without a federated loop there are no visits: it says so and writes nothing.

    With a fleet, a row says what a visit took on the client's device, and there is one for each client that dropped out
    as well; what they add up to stands in the tables with which `RoundProgress` ends a run. A file that an earlier run
    left there is replaced, unless that run is resumed.

    Args:
        path: the file; ``visits.csv`` in the trainer's ``default_root_dir`` if not given.
    """

    log_name = "visits.csv"

    def __init__(self, path: str | None = None) -> None:
        self.path = path
        self._loop: RecordsVisits | None = None
        self._restored: list[Row] = []
        self._before: str | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        loops = [callback for callback in callbacks if isinstance(callback, RecordsVisits)]
        self._loop = loops[0] if loops and trainer.is_global_zero else None
        self._table = RoundTable(Path(self.path or Path(trainer.default_root_dir) / self.log_name))
        if stage == "fit" and not loops:
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
        """All visits of the run so far, as text; none without a federated loop."""
        return self._table.rows() if self._loop is not None else []

    def state_dict(self) -> dict[str, Any]:
        """The rows of the last finished round, which may not be in the file yet, and a digest of those that are."""
        if self._loop is None:
            return {"records": []}
        records = [dict(record) for record in self._loop.visit_records]
        return {"records": records, "before": self._table.digest(self._first_open(records) - 1)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._restored, self._before = state_dict["records"], state_dict.get("before")

    def _first_open(self, records: list[Row]) -> int:
        """The first round whose rows are not taken for granted: that of the last records."""
        return int(records[0]["round"]) if records or self._loop is None else self._loop.rounds_done
