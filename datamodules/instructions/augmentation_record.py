"""What was added for whom, on disk: it can be inspected, and the next run with equal settings and texts takes it from there.

====================  ==============================================================================================
``added.jsonl``        one line for each row of each client: client, rank, row, score, source, fields
``private.jsonl``      the clients' own training rows: client, fields (with ``category`` where they have one)
``settings.json``      what the result depends on, digests of itself and of the others, and what the augmentation noted
====================  ==============================================================================================

``settings.json`` is written last, so a run that was killed while writing leaves nothing that looks whole.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedlight.datamodules.instructions.augmentation import Added
from fedlight.support.files import refuse_unwritable, sealed, unsealed, write_whole
from fedlight.support.types import Fields

OF_FILES = "digests"

Settings = Mapping[str, object]


class AugmentationRecord:
    """The three files of a folder.

    Args:
        folder: where they lie.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser()
        self.added, self.private = self.folder / "added.jsonl", self.folder / "private.jsonl"
        self.settings = self.folder / "settings.json"

    def why_not(self, settings: Settings) -> str | None:
        """Why the record cannot be used: which settings differ, or which file is damaged or missing; None where it can."""
        try:
            saved = self._saved()
            before = flat(saved["settings"])
        except (FileNotFoundError, NotADirectoryError):
            return "there is none"
        except (ValueError, KeyError, TypeError, AttributeError):
            return "settings.json is damaged"
        now = flat(json.loads(json.dumps(settings)))
        differing = sorted(
            name for name in {*before, *now} if before.get(name, "absent") != now.get(name, "absent")
        )
        if differing:
            return f"made with other {', '.join(differing)}"
        damaged = self._damaged(saved)
        return damaged and f"{damaged} is damaged"

    def refuse_damaged(self) -> None:
        """Looks at the files before they are read for something else than training.

        Raises:
            ValueError: one is not what was written. A record without ``settings.json`` has nothing to compare with.
        """
        try:
            damaged = self._damaged(self._saved())
        except (FileNotFoundError, NotADirectoryError):
            return
        except (ValueError, KeyError, TypeError, AttributeError):
            damaged = self.settings.name
        if damaged is not None:
            raise ValueError(
                f"{self.folder / damaged} is damaged: delete the folder, and the run that made it makes it again"
            )

    def _saved(self) -> dict[str, Any]:
        """What stands in ``settings.json``."""
        saved: dict[str, Any] = json.loads(self.settings.read_text(encoding="utf-8"))
        if OF_FILES in saved:
            return unsealed(saved)
        return {**saved, OF_FILES: {self.added.name: saved["digest"]}}  # of an earlier version

    def _damaged(self, saved: Mapping[str, Any]) -> str | None:
        """The name of a file that is missing or not what was written."""
        for name, digest in saved[OF_FILES].items():
            file = self.folder / name
            if not file.is_file() or digest_of_bytes(file.read_bytes()) != digest:
                return str(name)
        return None

    def make_folder(self) -> None:
        """Makes the folder and tries it: choosing rows can take hours, or money.

        Raises:
            OSError: nothing can be written there.
        """
        refuse_unwritable(self.folder, "augmentation_folder")

    def read(self) -> dict[str, list[Added]]:
        """The rows of each client, best first. Clients that got none are left out."""
        added: dict[str, list[Added]] = {}
        with self.added.open(encoding="utf-8") as lines:
            for line in lines:
                entry = json.loads(line)
                added.setdefault(entry["client"], []).append(
                    Added(entry["fields"], entry["row"], entry["score"])
                )
        return added

    def write(
        self,
        settings: Settings,
        private: Mapping[str, Sequence[Fields]],
        added: Mapping[str, Sequence[Added]],
        sources: Sequence[str],
        notes: Settings,
    ) -> None:
        """Writes all three; after `make_folder`.

        Args:
            settings: what the result depends on.
            private: each client's own training rows.
            added: what each client gets besides.
            sources: of each public row.
            notes: what else is worth keeping.
        """
        own = ({"client": client, "fields": dict(row)} for client, rows in private.items() for row in rows)
        of_own = lines_of(own)
        write_whole(self.private, of_own)
        more = (
            {
                **{"client": client, "rank": rank, "row": row.row, "score": row.score},
                "source": None if row.row is None else sources[row.row],
                "fields": dict(row.fields),
            }
            for client, rows in added.items()
            for rank, row in enumerate(rows)
        )
        text = lines_of(more)
        write_whole(self.added, text)
        digests = {self.added.name: digest_of_bytes(text), self.private.name: digest_of_bytes(of_own)}
        whole = sealed({"settings": settings, OF_FILES: digests, "notes": notes})
        write_whole(self.settings, (json.dumps(whole, indent=1) + "\n").encode())


def digest_of(rows: Iterable[Fields]) -> str:
    """A short digest of texts with the names of their slots, in order.

    Example:
        >>> digest_of([{"prompt": "x"}]) == digest_of([{"prompt": "x"}]) != digest_of([{"prompt": "y"}])
        True
    """
    digest = hashlib.blake2b(digest_size=16)
    for row in rows:
        digest.update(json.dumps(dict(row), sort_keys=True).encode() + b"\n")
    return digest.hexdigest()


def flat(settings: Mapping[str, object], before: str = "") -> dict[str, object]:
    """Nested settings by dotted names, so that a message names the one that differs.

    Example:
        >>> flat({"seed": 0, "augmentation": {"number": 3}})
        {'seed': 0, 'augmentation.number': 3}
    """
    found: dict[str, object] = {}
    for name, value in settings.items():
        found |= flat(value, f"{before}{name}.") if isinstance(value, Mapping) else {f"{before}{name}": value}
    return found


def digest_of_bytes(content: bytes) -> str:
    """A short digest of a file's content."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def lines_of(entries: Iterable[Mapping[str, object]]) -> bytes:
    """JSON lines."""
    return "".join(json.dumps(entry) + "\n" for entry in entries).encode()
