"""Record of added rows on disk, for inspection and for the next run with equal settings and texts.

====================  ==============================================================================================
``added.jsonl``        one line for each row of each client: client, rank, row, score, source, fields
``private.jsonl``      the clients' own training rows: client, fields (with ``category`` if they have one)
``settings.json``      settings that the result depends on, digests of all files, notes of the augmentation
====================  ==============================================================================================
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

from fedlight.datamodules.instructions.augmentation import Added
from fedlight.support.files import read_text, refuse_unwritable, sealed, unsealed, write_whole
from fedlight.support.types import Fields

DIGESTS = "digests"

Settings = Mapping[str, object]


class AugmentationRecord:
    """Record of added rows in a folder, ``~`` allowed."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser()
        self.added, self.private = self.folder / "added.jsonl", self.folder / "private.jsonl"
        self.settings = self.folder / "settings.json"

    def why_not(self, settings: Settings) -> str | None:
        """Return why the record cannot be used (differing settings, a damaged or missing file); None if it can."""
        try:
            saved = self._read_settings()
            differing = compare_settings(saved["settings"], settings)
        except (FileNotFoundError, NotADirectoryError):
            return "there is none"
        except (ValueError, KeyError, TypeError, AttributeError):
            return "settings.json is damaged"
        if differing:
            return f"made with other {', '.join(differing)}"
        damaged = self._find_damaged(saved)
        return damaged and f"{damaged} is damaged"

    def refuse_damaged(self) -> None:
        """Raise ValueError for a damaged file; a record without ``settings.json`` is not checked."""
        try:
            damaged = self._find_damaged(self._read_settings())
        except (FileNotFoundError, NotADirectoryError):
            return
        except (ValueError, KeyError, TypeError, AttributeError):
            damaged = self.settings.name
        if damaged is not None:
            raise ValueError(
                f"{self.folder / damaged} is damaged: delete the folder and repeat the run that wrote it"
            )

    def _read_settings(self) -> dict[str, Any]:
        return unsealed(json.loads(read_text(self.settings)))

    def _find_damaged(self, saved: Mapping[str, Any]) -> str | None:
        """Return the name of a missing or changed file, if any."""
        for name, digest in saved[DIGESTS].items():
            file = self.folder / name
            if not file.is_file() or digest_bytes(file.read_bytes()) != digest:
                return str(name)
        return None

    def make_folder(self) -> None:
        """Create the folder or raise OSError, before the augmentation spends hours or money."""
        refuse_unwritable(self.folder, "augmentation_folder")

    def read(self) -> dict[str, list[Added]]:
        """Return the rows of each client, best first, without clients that got none; raise ValueError without a record."""
        added: dict[str, list[Added]] = {}
        for entry in _read_lines(self.added):
            added.setdefault(entry["client"], []).append(Added(entry["fields"], entry["row"], entry["score"]))
        return added

    def read_own(self) -> list[tuple[str, Fields]]:
        """Return the clients' own training rows, each with its client; raise ValueError without a record."""
        return [(entry["client"], entry["fields"]) for entry in _read_lines(self.private)]

    def write(
        self,
        settings: Settings,
        private: Mapping[str, Sequence[Fields]],
        added: Mapping[str, Sequence[Added]],
        sources: Sequence[str],
        notes: Settings,
    ) -> None:
        """Write all three files; call `make_folder` before. ``sources`` names the source of each public row."""
        own_lines = to_lines(
            {"client": client, "fields": dict(row)} for client, rows in private.items() for row in rows
        )
        write_whole(self.private, own_lines)
        added_lines = to_lines(
            {
                "client": client,
                "rank": rank,
                "row": row.row,
                "score": row.score,
                "source": None if row.row is None else sources[row.row],
                "fields": dict(row.fields),
            }
            for client, rows in added.items()
            for rank, row in enumerate(rows)
        )
        write_whole(self.added, added_lines)
        digests = {self.added.name: digest_bytes(added_lines), self.private.name: digest_bytes(own_lines)}
        whole = sealed({"settings": settings, DIGESTS: digests, "notes": notes})
        # Last, so that a run killed while writing leaves no complete record.
        write_whole(self.settings, (json.dumps(whole, indent=1) + "\n").encode())


def _read_lines(file: Path) -> list[dict[str, Any]]:
    if not file.is_file():
        raise ValueError(f"{file}: there is no such file: give the augmentation_folder of a run")
    return [json.loads(line) for line in StringIO(read_text(file))]


def digest_rows(rows: Iterable[Fields]) -> str:
    """Return 32 hex digits of texts with the names of their slots, in order.

    Examples:
        >>> digest_rows([{"prompt": "x"}]) == digest_rows([{"prompt": "x"}]) != digest_rows([{"prompt": "y"}])
        True
    """
    digest = hashlib.blake2b(digest_size=16)
    for row in rows:
        digest.update(json.dumps(dict(row), sort_keys=True).encode() + b"\n")
    return digest.hexdigest()


def compare_settings(saved: Settings, now: Settings) -> list[str]:
    """Return the dotted names of nested settings that differ between a JSON file and this run.

    Examples:
        >>> compare_settings({"seed": 0, "augmentation": {"number": 3}}, {"seed": 0, "augmentation": {"number": 4}})
        ['augmentation.number']
    """
    # JSON makes lists of tuples, as in the file.
    old, new = _flatten(saved), _flatten(json.loads(json.dumps(now)))
    return sorted(name for name in {*old, *new} if old.get(name, "absent") != new.get(name, "absent"))


def digest_bytes(content: bytes) -> str:
    """Return 32 hex digits of a file's content."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _flatten(settings: Settings, prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for name, value in settings.items():
        key = f"{prefix}{name}"
        flat |= _flatten(value, f"{key}.") if isinstance(value, Mapping) else {key: value}
    return flat


def to_lines(entries: Iterable[Mapping[str, object]]) -> bytes:
    """Return JSON lines."""
    return "".join(json.dumps(entry) + "\n" for entry in entries).encode()
