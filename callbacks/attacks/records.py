"""Files of the attacks: one table of all metrics, and a file of each attack's records in a round.

A killed and resumed run leaves the files of an uninterrupted one: rows are ordered by round and target, and rounds that are
trained again are removed first. Of several processes the first one alone writes. The files hold clients' own rows, word for
word: protect them like the rows.
"""

import csv
import json
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path

from fedlight.processes.work import is_first
from fedlight.support.files import check_regular, csv_text, write_whole

GLOBAL = "global"
"""Name of the target that is the server's model; any other target is the client whose upload was attacked."""

Metrics = Mapping[str, float]
Key = tuple[int, str]


class AttackTable:
    """CSV file with a row for each round and target and a column ``ATTACK/METRIC`` for each metric of each attack.

    Rounds count from 1; round 0 is the model before training. A cell is empty where an attack did not measure. Several
    attacks may write to one file in turn; ``attack`` names the one whose columns are written here.
    """

    def __init__(self, file: Path, attack: str) -> None:
        self.file, self.prefix = file, f"{attack}/"

    def restart(self, last_round: int, before: str | None = None) -> None:
        """Keep this attack's cells up to ``last_round`` (from 1); later rounds are trained again, 0 keeps nothing.

        Raises ValueError if ``before``, the `digest` in the checkpoint (None: not compared), differs, or for another
        file.
        """
        if not is_first():
            return
        if None not in (before, found := self.digest(last_round)) and found != before:
            raise ValueError(
                f"{self.file} is damaged or of another run: what {self.prefix[:-1]} found up to round {last_round} is not "
                "what was there when the checkpoint was written. Move it away, and the table goes on without it"
            )
        rows = self.rows()
        for (round_idx, _), row in rows.items():
            if last_round == 0 or round_idx > last_round:
                for column in [name for name in row if name.startswith(self.prefix)]:
                    del row[column]
        self._write(rows)

    def digest(self, last_round: int) -> str | None:
        """Return a digest of this attack's cells up to ``last_round``, None without a file."""
        if not self.file.exists():
            return None
        found = {
            f"{round_idx} {target}": {
                name: text for name, text in row.items() if name.startswith(self.prefix)
            }
            for (round_idx, target), row in self.rows().items()
            if round_idx <= last_round
        }
        return blake2b(json.dumps(found, sort_keys=True).encode(), digest_size=16).hexdigest()

    def put(self, round_idx: int, found: Mapping[str, Metrics]) -> None:
        """Add this attack's metrics of a round, by target."""
        if not is_first():
            return
        rows = self.rows()
        for target, metrics in found.items():
            row = rows.setdefault((round_idx, target), {})
            row.update({self.prefix + name: str(value) for name, value in metrics.items()})
        self._write(rows)

    def rows(self) -> dict[Key, dict[str, str]]:
        """Return the filled cells of each round and target, as text; raise ValueError for another kind of file."""
        if not self.file.exists():
            return {}
        with check_regular(self.file).open(newline="", encoding="utf-8", errors="replace") as file:
            try:
                read = list(csv.DictReader(file))
                if any(None in row for row in read):
                    raise ValueError("a row with more cells than columns")
                return {
                    (int(row.pop("round")), row.pop("target")): {
                        name: text for name, text in row.items() if text
                    }
                    for row in read
                }
            except (KeyError, ValueError, TypeError, csv.Error) as error:
                raise ValueError(
                    f"{self.file} is no table of attacks: move it away, or choose another output"
                ) from error

    def _write(self, rows: Mapping[Key, Mapping[str, str]]) -> None:
        """Write all rows or nothing; without any row the file is removed."""
        rows = {key: row for key, row in rows.items() if row}
        if not rows:
            self.file.unlink(missing_ok=True)
            return
        columns = sorted({column for row in rows.values() for column in row})
        # Clients before the server, as in the course of a round.
        keys = sorted(rows, key=lambda key: (key[0], key[1] == GLOBAL, key[1]))
        lines = [{"round": key[0], "target": key[1], **rows[key]} for key in keys]
        write_whole(self.file, csv_text(lines, ["round", "target", *columns]))


def remove_later(folder: Path, name: str, last_round: int) -> None:
    """Remove the files of this name of rounds after ``last_round``; 0 keeps none, not even that of round 0."""
    for file in folder.glob(f"round_*/{name}") if is_first() else ():
        number = file.parent.name.removeprefix("round_")
        if number.isdigit() and (last_round == 0 or int(number) > last_round):
            file.unlink()
