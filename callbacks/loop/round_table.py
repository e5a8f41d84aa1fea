"""CSV file with rows by round: a killed and resumed run leaves the file of an uninterrupted one.

Rows of rounds that will be trained again, and a half row left by a kill, are dropped when training starts. The rows of a
round are added once, however often Lightning ends its epoch. Of several processes the first one alone writes.
"""

import csv
import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path

from fedlight.processes.work import is_first
from fedlight.support.files import check_regular, csv_text, full_disk_named, write_whole

Record = dict[str, int | float | str]
"""Row of a table of the run: column -> value."""


class RoundTable:
    """Rows of one file with equal columns, among them ``round``, which is empty for a row of no round.

    The folder is made with the first row.

    Attributes:
        last_round: last round with rows in the file, -1 before the first; a checkpoint has to hold it.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.last_round = -1

    def restart(self, last_round: int, before: str | None = None) -> None:
        """Keep rows up to ``last_round``, which are not trained again; drop later ones and those of no round; -1 drops all.

        Raises ValueError if ``before``, the kept rows' `digest` in the checkpoint (None: not compared), has changed.
        """
        if is_first():
            self.refuse_changed_rows(last_round, before)
            self._rewrite([row for row in self.rows() if _is_of(row, last_round)])
        self.last_round = last_round

    def refuse_changed_rows(self, last_round: int, before: str | None) -> None:
        """Raise ValueError for rows up to ``last_round`` with another digest than ``before``; see `restart`."""
        if None not in (before, found := self.digest(last_round)) and found != before:
            raise ValueError(
                f"{self.file} is damaged or of another run: its rows up to round {last_round + 1} are not those that "
                "were there when the checkpoint was written. Move it away, and the log goes on without them"
            )

    def append(self, rows: Sequence[Record]) -> None:
        """Add the rows of a round, unless there are none or the file has the round already."""
        if not rows or int(rows[0]["round"]) <= self.last_round:
            return
        if is_first():
            is_new = not self.file.exists()
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with full_disk_named(self.file), self.file.open("a", newline="", encoding="utf-8") as file:
                file.write(csv_text(rows, [*rows[0]], with_header=is_new))
        self.last_round = int(rows[0]["round"])

    def replace(self, column: str, value: str, rows: Sequence[Record]) -> None:
        """Replace the rows with ``value`` in ``column`` by ``rows``, at the end."""
        if is_first():
            self._rewrite([*(row for row in self.rows() if row[column] != value), *rows])

    def rows(self) -> list[dict[str, str]]:
        """Return the whole rows of the file, as text."""
        if not self.file.exists():
            return []
        with check_regular(self.file).open(newline="", encoding="utf-8", errors="replace") as file:
            return [row for row in csv.DictReader(file) if None not in row and None not in row.values()]

    def digest(self, last_round: int) -> str | None:
        """Return a digest of the rows up to ``last_round``, by which changes are found; None without a file."""
        if not self.file.exists():
            return None
        known = [row for row in self.rows() if _is_of(row, last_round)]
        return blake2b(json.dumps(known).encode(), digest_size=16).hexdigest()

    def _rewrite(self, rows: Sequence[Mapping[str, object]]) -> None:
        """Write all rows or none; remove a file without any row."""
        if not rows:
            self.file.unlink(missing_ok=True)
            return
        with full_disk_named(self.file):
            write_whole(self.file, csv_text(rows, [*rows[0]]))


def _is_of(row: Mapping[str, str], last_round: int) -> bool:
    number = row.get("round", "")
    return number.isdecimal() and int(number) <= last_round
