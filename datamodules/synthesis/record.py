"""The candidates of each round on disk: a round that is resumed or run again takes them from there and makes none.

A folder has one file for each round, ``round_0003.jsonl``. It holds one part for each time that candidates were made in the
round, in most algorithms one for the whole cohort: a line with what the part depends on, what was counted and digests, then
a line for each candidate with its client, fields and weight. A file appears whole or not at all. In a federation of real
devices each client would keep its own lines: they are made from its private rows.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from fedlight.datamodules.instructions.augmentation_record import digest_of_bytes, flat, lines_of
from fedlight.datamodules.synthesis.synthesis import Candidate
from fedlight.support.files import refuse_unwritable, sealed, unsealed, write_whole

Settings = Mapping[str, object]

OF_ROWS = "digest of rows"

OF_A_PART = ("client rows", "model state", "base bits")
"""Settings in which the parts of one file differ."""


@dataclass
class Part:
    """What was made at once.

    Attributes:
        settings: what it depends on.
        clients: for whom.
        candidates: of each of them.
        counts: see `Synthesis`.
        notes: see `Synthesis`.
    """

    settings: Settings
    clients: list[str]
    candidates: dict[str, list[Candidate]]
    counts: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)


@runtime_checkable
class DescribesBase(Protocol):
    """A module that says which frozen base it has, by a checksum among other things."""

    base: dict[str, Any]


class SynthesisRecord:
    """The files of a folder.

    Args:
        folder: where they lie.
        setting: what to change where nothing can be written there.
    """

    def __init__(self, folder: str | Path, setting: str = "synthesis_folder") -> None:
        self.folder, self.setting = Path(folder).expanduser(), setting

    def file(self, round_idx: int) -> Path:
        """Of a round, from 0."""
        return self.folder / f"round_{round_idx:04d}.jsonl"

    def find(self, round_idx: int, settings: Settings, clients: Sequence[str]) -> tuple[Part | None, str]:
        """The part that was made for these clients with equal settings.

        Args:
            round_idx: from 0.
            settings: what it depends on; those named in ``OF_A_PART`` differ between the parts of a file.
            clients: for whom, in order.

        Returns:
            The part and ""; or None and why the file cannot be used, "" where it only lacks these clients.
        """
        try:
            parts = self._parts(round_idx)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None, ""
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None, "damaged"
        for part in parts:
            differing = _differing(part.settings, settings)
            own = part.clients == list(clients)
            if own and not differing:
                return part, ""
            if differing and (own or not set(differing) <= set(OF_A_PART)):
                return None, f"made with other {', '.join(differing)}"
        return None, ""

    def make_room(self, round_idx: int) -> None:
        """Makes the folder and tries it, before anything is generated.

        Args:
            round_idx: whose file will be written.

        Raises:
            OSError: nothing can be written there, or a folder lies in the file's place.
        """
        refuse_unwritable(self.folder, self.setting)
        if (file := self.file(round_idx)).is_dir():
            raise OSError(f"{file} is a folder, where a file is to be written: move it away")

    def write(self, round_idx: int, parts: Sequence[Part]) -> None:
        """Writes all that was made in a round so far; after `make_room`."""
        write_whole(self.file(round_idx), b"".join(map(_text, parts)))

    def _parts(self, round_idx: int) -> list[Part]:
        lines = self.file(round_idx).read_bytes().splitlines(keepends=True)
        parts = []
        while lines:
            head = json.loads(lines[0])
            if OF_ROWS in head:
                head = unsealed(head)
            else:  # of an earlier version
                head[OF_ROWS] = head["digest"]
            rows, lines = lines[1 : 1 + head["rows"]], lines[1 + head["rows"] :]
            if digest_of_bytes(b"".join(rows)) != head[OF_ROWS]:
                raise ValueError("other rows than were written")
            candidates: dict[str, list[Candidate]] = {client: [] for client in head["clients"]}
            for row in map(json.loads, rows):
                candidates[row["client"]].append(Candidate(row["fields"], row["weight"]))
            counts, notes = Counter(head["counts"]), Counter(head["notes"])
            parts.append(Part(dict(head["settings"]), head["clients"], candidates, counts, notes))
        return parts


def state_digest(module: nn.Module) -> str:
    """A digest of what is trained, of the names, shapes and types of everything else, and of the base's description.

    Args:
        module: as it stands; another trained value, another frozen base or one in another number form changes the digest.

    Example:
        >>> layer = nn.Linear(1, 1, bias=False)
        >>> before = state_digest(layer)
        >>> with torch.no_grad():
        ...     _ = layer.weight.add_(1)
        >>> before == state_digest(layer)
        False
    """
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        if tensor.requires_grad:
            values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            digest.update(values.numpy().tobytes())
    if isinstance(module, DescribesBase):  # the model may move
        described = {name: value for name, value in module.base.items() if name != "model"}
        digest.update(json.dumps(described, sort_keys=True, default=str).encode())
    return digest.hexdigest()


def _text(part: Part) -> bytes:
    rows = lines_of(
        {"client": client, "fields": one.fields, "weight": one.weight}
        for client, own in part.candidates.items()
        for one in own
    )
    head = {
        **{"rows": rows.count(b"\n"), OF_ROWS: digest_of_bytes(rows), "clients": part.clients},
        **{"counts": part.counts, "notes": part.notes, "settings": part.settings},
    }
    return lines_of([sealed(head)]) + rows


def _differing(before: Settings, now: Settings) -> list[str]:
    """The dotted names of the settings that differ."""
    old, new = flat(before), flat(json.loads(json.dumps(now)))  # as they come back from a file
    return sorted(name for name in {*old, *new} if old.get(name, "absent") != new.get(name, "absent"))
