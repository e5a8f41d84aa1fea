"""Files of the attacks: one table of all metrics, and a file of each attack's records in a round.

A killed and resumed run leaves the files of an uninterrupted one: rows are ordered by round and target, and rounds that are
trained again are removed first. Of several processes the first one alone writes. The files hold clients' own rows, word for
word: protect them like the rows.
"""

import csv
import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path

from fedlight.processes.work import is_first
from fedlight.support.files import csv_rows, csv_text, full_disk_named, read_csv, write_whole

GLOBAL = "global"
"""Name of the target that is the server's model; any other target is the client whose upload was attacked."""

Metrics = Mapping[str, float]
Key = tuple[int, str]
Cells = Mapping[Key, Mapping[str, str]]
"""Text of the filled cells by column, for each round and target."""


class AttackTable:
    """CSV file with a row for each round and target and a column ``ATTACK/METRIC`` for each metric of each attack.

    Rounds count from 1; round 0 is the model before training. A cell is empty where an attack did not measure. Several
    attacks may write to one file in turn; ``attack`` names the one whose columns are written here.
    """

    def __init__(self, file: Path, attack: str) -> None:
        self.file, self.prefix = file, f"{attack}/"
        self._start_anew()

    def _start_anew(self) -> None:
        self.digest: str | None = None
        self._last: tuple[int, list[str], int] | None = None  # round, columns, bytes before the round's rows

    def restart(self, last_round: int, before: str | None = None) -> None:
        """Keep this attack's cells up to ``last_round`` (from 1); later rounds are trained again, 0 keeps nothing.

        Raises ValueError if ``before``, the `digest` in the checkpoint (None: not compared), differs, or for another
        file.
        """
        if not is_first():
            return
        rows, kept = self.rows(), {}
        for (round_idx, target), row in rows.items():
            cells = {name: cell for name, cell in row.items() if name.startswith(self.prefix)}
            if round_idx <= last_round:
                kept[round_idx, target] = cells
            # Round 0 is measured again by a run that begins.
            if last_round == 0 or round_idx > last_round:
                rows[round_idx, target] = {name: cell for name, cell in row.items() if name not in cells}
        self._start_anew()
        self._note(kept)
        if self.file.exists() and before not in (None, self.digest):
            raise ValueError(
                f"{self.file} is damaged or of another run: what {self.prefix[:-1]} found up to round {last_round} is not "
                "what was there when the checkpoint was written. Move it away, and the table goes on without it"
            )
        if last_round == 0:
            self._start_anew()
        self._write(rows)

    def put(self, round_idx: int, by_target: Mapping[str, Metrics]) -> None:
        """Add this attack's metrics of a round, by target."""
        if not is_first():
            return
        added = {
            (round_idx, target): {self.prefix + name: str(value) for name, value in metrics.items()}
            for target, metrics in by_target.items()
        }
        self._note(added)
        if not self._put_at_end(round_idx, added):
            rows = _joined(self.rows(), added)
            columns = self._write(rows)
            before = {key: row for key, row in rows.items() if key[0] < round_idx}
            self._last = round_idx, columns, len(_text(before, columns))

    def _put_at_end(self, round_idx: int, added: Cells) -> bool:
        """Write cells into the last rows of the file, reading only those; return False where that is not enough.

        It is not enough for the first round, and where the columns have changed, by another attack or by these cells.
        """
        if self._last is None or not self.file.exists():
            return False
        last_round, columns, start = self._last
        if round_idx < last_round or not _columns(added) <= {*columns}:
            return False
        header = _text({}, columns)
        with self.file.open("rb", buffering=0) as file:
            if file.read(len(header)) != header:  # another attack has added columns
                return False
            file.seek(start)
            end = _rows(csv_rows((header + file.read()).decode()))
        before = {key: end.pop(key) for key in [*end] if key[0] < round_idx}
        start += len(_text(before, columns)) - len(header)
        with full_disk_named(self.file), self.file.open("r+b") as file:
            file.seek(start)
            file.truncate()
            file.write(_text(_joined(end, added), columns)[len(header) :])
        self._last = round_idx, columns, start
        return True

    def rows(self) -> dict[Key, dict[str, str]]:
        """Return the filled cells of each round and target, as text; raise ValueError for another kind of file."""
        if not self.file.exists():
            return {}
        try:
            return _rows(read_csv(self.file))
        except (KeyError, ValueError, TypeError, csv.Error) as error:
            raise ValueError(
                f"{self.file} is no table of attacks: move it away, or choose another output"
            ) from error

    def _note(self, added: Cells) -> None:
        """Add cells of this attack to the digest."""
        for key in sorted(filter(added.get, added), key=_place):
            # Each digest covers the one before, so that no round reads the file.
            cells = json.dumps([self.digest, key, added[key]], sort_keys=True)
            self.digest = blake2b(cells.encode(), digest_size=16).hexdigest()

    def _write(self, rows: Cells) -> list[str]:
        """Write all rows or nothing, and return the columns; without any row the file is removed."""
        columns = sorted(_columns(rows))
        if columns:
            write_whole(self.file, _text(rows, columns))
        else:
            self.file.unlink(missing_ok=True)
        return columns


def _rows(read: Sequence[Mapping[str, str]]) -> dict[Key, dict[str, str]]:
    """Return the filled cells of each round and target; raise KeyError, ValueError or TypeError for other rows."""
    if any(None in row for row in read):  # key of surplus cells
        raise ValueError("a row with more cells than columns")
    return {
        (int(row["round"]), row["target"]): {
            name: cell for name, cell in row.items() if cell and name not in ("round", "target")
        }
        for row in read
    }


def _joined(rows: Cells, others: Cells) -> Cells:
    return {**rows, **{key: {**rows.get(key, {}), **cells} for key, cells in others.items()}}


def _columns(rows: Cells) -> set[str]:
    return {column for row in rows.values() for column in row}


def _place(key: Key) -> tuple[int, bool, str]:
    """Return the order of rows: by round, clients before the server, as in the course of a round."""
    return key[0], key[1] == GLOBAL, key[1]


def _text(rows: Cells, columns: Sequence[str]) -> bytes:
    """Return the file with the rows that have any cell."""
    keys = sorted(filter(rows.get, rows), key=_place)
    lines = [{"round": key[0], "target": key[1], **rows[key]} for key in keys]
    return csv_text(lines, ["round", "target", *columns]).encode()


def remove_later(folder: Path, name: str, last_round: int) -> None:
    """Remove the files of this name of rounds after ``last_round``; 0 keeps none, not even that of round 0."""
    for file in folder.glob(f"round_*/{name}") if is_first() else ():
        number = file.parent.name.removeprefix("round_")
        if number.isdigit() and (last_round == 0 or int(number) > last_round):
            file.unlink()
