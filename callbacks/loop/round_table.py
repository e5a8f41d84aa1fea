"""CSV file with rows by round: a killed and resumed run leaves the file of an uninterrupted one.

Rows of rounds that will be trained again, and a half row left by a kill, are dropped when training starts. Of several
processes the first one alone writes. A checkpoint holds a digest of the rows.
"""

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, ClassVar

import lightning as L

from fedlight.processes.work import is_first
from fedlight.support.checks import Checked
from fedlight.support.files import csv_text, full_disk_named, read_csv, refuse_unwritable, write_whole

Record = dict[str, int | float | str]
"""Row of a table of the run: column -> value."""


class RoundTable:
    """Rows of one file with equal columns, among them ``round``, which is empty for a row of no round.

    The folder is made with the first row.

    Attributes:
        last_round: last round with rows in the file, -1 before the first.
        state_before: `state_dict` from before the last `append`.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self._start_anew()

    def _start_anew(self) -> None:
        self.last_round = -1
        self._digest = ""
        self.state_before = self.state_dict()

    def restart(self) -> None:
        """Keep rows up to ``last_round``, which are not trained again; drop later ones and those of no round.

        Raises ValueError if the kept rows are not those of `state_dict`, unless the file is gone.
        """
        if not is_first():
            return
        last_round, digest = self.last_round, self._digest
        kept = [
            row for row in self.rows() if row.get("round", "").isdecimal() and int(row["round"]) <= last_round
        ]
        is_there = self.file.exists()
        self._start_anew()
        if kept:
            self._add(kept)
            self.state_before = self.state_dict()
        if is_there and digest not in ("", self._digest):
            raise ValueError(
                f"{self.file} is damaged or of another run: its rows up to round {last_round + 1} are not those that "
                "were there when the checkpoint was written. Move it away, and the log goes on without them"
            )
        self._rewrite(kept)

    def append(self, rows: Sequence[Record]) -> None:
        """Add the rows of a round, unless there are none or the file has the round already."""
        # Lightning may end the epoch of a round more than once.
        if not rows or int(rows[0]["round"]) <= self.last_round:
            return
        with full_disk_named(self.file):
            text = _text(rows, with_header=not self.file.exists())
            if is_first():
                self.file.parent.mkdir(parents=True, exist_ok=True)
                with self.file.open("a", newline="", encoding="utf-8") as file:
                    file.write(text)
        self.state_before = self.state_dict()
        self._add(rows)

    def replace(self, column: str, value: str, rows: Sequence[Record]) -> None:
        """Replace the rows with ``value`` in ``column`` by ``rows``, which are of no round, at the end."""
        if is_first():
            self._rewrite([*(row for row in self.rows() if row[column] != value), *rows])

    def rows(self) -> list[dict[str, str]]:
        """Return the whole rows of the file, as text."""
        rows = read_csv(self.file) if self.file.exists() else []
        return [row for row in rows if None not in row and None not in row.values()]  # a half row

    def state_dict(self) -> dict[str, Any]:
        """Return the last round and a digest of the rows up to it."""
        return {"last_round": self.last_round, "digest": self._digest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the state of the rows that `restart` will keep."""
        self.last_round, self._digest = state["last_round"], state["digest"]

    def _add(self, rows: Sequence[Mapping[str, object]]) -> None:
        """Note rows that are in the file."""
        for row in rows:
            # Each digest covers the one before, so a copy can go on and no round reads the file.
            text = self._digest + _text([row], with_header=not self._digest)  # the columns count once
            self._digest = blake2b(text.encode(), digest_size=16).hexdigest()
        self.last_round = int(str(rows[-1]["round"]))

    def _rewrite(self, rows: Sequence[Mapping[str, object]]) -> None:
        """Write all rows or none; remove a file without any row."""
        if not rows:
            self.file.unlink(missing_ok=True)
            return
        with full_disk_named(self.file):
            write_whole(self.file, _text(rows))


def _text(rows: Sequence[Mapping[str, object]], with_header: bool = True) -> str:
    return csv_text(rows, [*rows[0]], with_header)


class RoundLog(Checked, L.Callback):
    """Base class of callbacks that write a `RoundTable`, with its state in the checkpoint.

    Args:
        path: the file; None: ``log_name`` in the trainer's ``default_root_dir``.

    Raises:
        OSError: before training, for a ``path`` that cannot be written.
    """

    log_name: ClassVar[str]

    def __init__(self, path: str | None = None) -> None:
        self.path = path
        self._table = RoundTable(Path())

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Name the table's file; a run that begins has none of its rows, and a checkpoint is loaded later."""
        self._table.file = Path(self.path or Path(trainer.default_root_dir) / self.log_name)
        if self.path and stage == "fit" and is_first():
            refuse_unwritable(self._table.file.parent, f"{type(self).__name__}.path")
        if stage == "fit" and trainer.current_epoch == 0:
            self.load_state_dict({"last_round": -1, "digest": ""})

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._table.restart()

    def state_dict(self) -> dict[str, Any]:
        """Return the last round with rows in the file, and a digest of the rows."""
        return self._table.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._table.load_state_dict(state_dict)
