"""Memories of clients between rounds: in RAM up to a limit, above it in files of a folder.

Checkpoints are exact either way. In RAM, a checkpoint holds the memories themselves. On disk, every save of a client is a
new file, its version, and a checkpoint names the versions of its round; so it is complete only together with the folder.
Versions that neither the run, nor the beginning of its round, nor a checkpoint that still exists names are removed once a
checkpoint without them is on the disk. Files that a killed run wrote after its last checkpoint, or did not get to remove,
are removed when the next run opens the folder (`fedlight.federation.unsaved_files`). A file's name has a hash of the
client's id, the round, a mark of the process, so that two runs in one folder never share a file, and a digest of the bytes,
which reveals damage.

Of several processes each writes the files of the clients that it trains, in one folder, and the others get their names. The
first one alone writes checkpoints and removes files: once the others have their names in its note, they drop theirs.
"""

import io
import math
import os
import re
import secrets
import sys
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedlight.federation.unsaved_files import Checkpoint, UnsavedFiles, remove_unsaved
from fedlight.support.files import full_disk_named, moved, read_bytes, write_whole

Memory = dict[str, Any]
"""Tensors, numbers, strings, None, and lists and dicts of them."""


LIMIT_MIB = 256
"""RAM for the memories of all clients; above it they are on disk."""
_VERSION = re.compile(r"[0-9a-f]{16}-[0-9]+-[0-9a-f]{8}-[0-9a-f]{16}\.pt")


@dataclass(frozen=True)
class _BeforeRound:
    """Memories at the beginning of a round."""

    held: dict[str, Memory]
    versions: dict[str, str]
    on_disk: bool
    num_bytes: int = 0


class ClientMemories:
    """Memories of all clients, with at most ``limit_mib`` of them in RAM.

    Above the limit all of them move to the disk and stay there; RAM then holds one file name for each client.

    Args:
        folder: folder of the files; None takes that of `open`, ``clients`` in the run's folder.
        limit_mib: RAM for all clients together, at least 0; 0 keeps every memory on disk; None: `LIMIT_MIB`.

    Attributes:
        resumed_from: path of the checkpoint whose state is loaded next; empty for another state.
        folder: folder of the files; None before it is known.
        in_use: whether a client has had a memory; until then there is nothing to load.
        on_disk: whether memories are in files.

    Examples:
        >>> memories = ClientMemories()
        >>> memories.save("a", {"seen": 3}, round_idx=0)
        >>> memories.load("a"), memories.load("b")
        ({'seen': 3}, {})
    """

    recent = 2
    """Newest rounds whose versions stay, whether a checkpoint of them is known or not."""

    def __init__(self, folder: str | Path | None = None, limit_mib: float | None = None) -> None:
        self.limit_mib = LIMIT_MIB if limit_mib is None else limit_mib
        self.resumed_from, self.in_use = "", False
        self.folder = None if folder is None else Path(folder).absolute()
        self._process = uuid.uuid4().hex[:8]
        self._held: dict[str, Memory] = {}
        self._sizes: dict[str, int] = {}
        self._versions: dict[str, str] = {}
        self._snapshots: dict[int, set[str]] = {}
        self._saved: dict[int, set[str]] = {}
        self._obsolete: set[str] = set()
        self._begun: list[Checkpoint] = []
        self._before: _BeforeRound | None = None
        self._origin: Path | None = None
        self._unsaved: UnsavedFiles | None = None
        self.on_disk = self._opened = self._is_shared = False

    @property
    def bytes_in_ram(self) -> int:
        """Size of the memories that are held in RAM."""
        return sum(self._sizes.values())

    def open(self, folder: str) -> None:
        """Take ``folder`` if none was given, before training; it is made when the first file is written.

        Raises:
            ValueError: the folder cannot be written, or files of a loaded checkpoint are gone.
        """
        self.folder = self.folder or Path(folder).absolute()
        _check_writable(self.folder)
        self._opened = True
        if self.folder.is_dir():
            remove_unsaved(self.folder, _VERSION)
        self._settle()

    def load(self, client_id: str) -> Memory:
        """Return a copy of the client's memory, empty where nothing was saved.

        Raises:
            ValueError: its file is gone or damaged.
        """
        if (name := self._versions.get(client_id)) is not None:
            return read_memory(self._find(name), client_id)
        return {key: _own(value) for key, value in self._held.get(client_id, {}).items()}

    def save(self, client_id: str, memory: Memory, round_idx: int) -> None:
        """Keep a copy of the client's memory after a visit of round ``round_idx``.

        Raises:
            ValueError: the memory holds a value that a checkpoint cannot hold, or there is no folder to write to.
        """
        self.in_use = True
        owned = {key: _own(value) for key, value in memory.items()}
        size = _num_bytes(owned) if owned else 0
        others = self.bytes_in_ram - self._sizes.get(client_id, 0)
        if not self.on_disk and others + size > self.limit_mib * 2**20:
            self._move_to_disk(round_idx)
        if self.on_disk:
            self._write(client_id, owned, round_idx)
        self._hold(client_id, {} if self.on_disk else owned)

    def _hold(self, client_id: str, memory: Memory) -> None:
        """Keep a memory in RAM; an empty one is none."""
        self._held.pop(client_id, None)
        self._sizes.pop(client_id, None)
        if memory:
            self._held[client_id], self._sizes[client_id] = memory, _num_bytes(memory)

    def begin_round(self) -> None:
        """Let checkpoints until `end_round` hold the memories of this moment, whose files stay."""
        # Memories and versions are replaced by every save and never changed, so shallow copies are enough.
        self._before = _BeforeRound(dict(self._held), dict(self._versions), self.on_disk, self.bytes_in_ram)

    def end_round(self) -> None:
        """Let a checkpoint hold the memories of the moment when it is made."""
        before, self._before = self._before, None
        if before is not None:
            self._unlink({*before.versions.values()} - self._named() - self._obsolete)

    def use(self) -> tuple[float, bool]:
        """Return the growth of RAM since `begin_round` in bytes, infinite on disk, and whether the round began on disk."""
        assert self._before is not None
        return math.inf if self.on_disk else self.bytes_in_ram - self._before.num_bytes, self._before.on_disk

    def move_if_over(self, growth: float, round_idx: int) -> dict[str, str]:
        """Move to disk if RAM would grow over the limit by ``growth`` in all processes; return all clients' versions."""
        assert self._before is not None
        if self._before.num_bytes + growth > self.limit_mib * 2**20:
            self._move_to_disk(round_idx)
        return dict(self._versions)

    def sent(self, client_id: str) -> Memory | str:
        """Return the name of a client's file, or its memory in RAM, for the other processes."""
        return self._versions.get(client_id) or self._held.get(client_id, {})

    def take(self, client_id: str, sent: Memory | str) -> None:
        """Keep what `sent` has returned in another process; `move_if_over` has decided where.

        Raises:
            ValueError: that process writes to another folder.
        """
        self.in_use = True
        # The order of clients must not matter, so the limit is not looked at here.
        self._hold(client_id, {} if isinstance(sent, str) else sent)
        if not isinstance(sent, str):
            self._replace(client_id, None)
            return
        if self._versions.get(client_id) == sent:
            return
        if not self._is_shared and not self._path(sent).exists():
            raise ValueError(
                f"{self._path(sent)} is not here, and another process has written it: the clients' memories are more than "
                f"{self.limit_mib} MiB, so the processes share them in this folder. Set trainer.default_root_dir to a "
                "folder that all hosts see"
            )
        self._is_shared = True
        self._note(sent)
        self._replace(client_id, sent)

    def hand_over(self) -> None:
        """Do nothing: this is the first process, and its note keeps all files."""

    def state_dict(self, round_idx: int) -> dict[str, Any]:
        """Return the memories or the names of their versions, and keep these as the snapshot of ``round_idx``.

        No file is removed before the checkpoint is on the disk: see `being_saved`.

        Args:
            round_idx: number of finished rounds; after `begin_round`, the number at that moment.
        """
        now = self._before or _BeforeRound(self._held, self._versions, self.on_disk)
        if not now.on_disk:
            return {"memories": dict(now.held)}
        # Without begin_round a snapshot only grows: an earlier checkpoint of the same round must stay complete.
        self._snapshots.setdefault(round_idx, set()).update(now.versions.values())
        self._forget_lost_rounds(round_idx)
        return {
            "folder": str(self.folder),
            "round": round_idx,
            "versions": dict(now.versions),
            "snapshots": {idx: sorted(names) for idx, names in self._snapshots.items()},
            "saved": {idx: sorted(paths) for idx, paths in self._saved.items()},
            "mark": secrets.token_hex(8),
        }

    def _forget_lost_rounds(self, newest: int) -> None:
        """Leave each version to the last round that needs it, and release those of rounds without a checkpoint."""
        for idx in self._snapshots:
            if idx < newest:  # else each checkpoint would list all clients once for every other one
                self._snapshots[idx] -= self._snapshots[newest]
        # The newest first, because an earlier round may need the versions of a lost one.
        for idx in sorted(self._snapshots, reverse=True)[self.recent :]:
            if self._has_checkpoint(idx):
                continue
            names = self._snapshots.pop(idx)
            self._saved.pop(idx, None)
            earlier = max((kept for kept in self._snapshots if kept < idx), default=0)
            # By the round that wrote it.
            needed = {name for name in names if int(name.split("-")[1]) < earlier}
            self._snapshots.get(earlier, set()).update(needed)
            self._obsolete |= names - needed

    def _has_checkpoint(self, round_idx: int) -> bool:
        return any(os.path.exists(path) for path in self._saved.get(round_idx, ()))

    @contextmanager
    def being_saved(self, state: dict[str, Any], path: str | Path) -> Iterator[None]:
        """Remove files that the checkpoint at ``path`` makes needless, once the body has written it.

        Args:
            state: result of `state_dict` as it is in the checkpoint; empty where that has none.
            path: path of the checkpoint.
        """
        if "mark" not in state:
            yield
            return
        self._remove_obsolete()
        named = {*state["versions"].values()}.union(*state["snapshots"].values())
        place = str(path) if "://" in str(path) else os.path.abspath(path)
        obsolete = frozenset(self._obsolete - named - self._named())
        begun = Checkpoint(place, state["mark"], frozenset(named), obsolete)
        self._notes().begin(begun)
        self._begun.append(begun)
        try:
            yield
        except BaseException:
            self._begun.remove(begun)
            raise
        for paths in self._saved.values():
            paths.discard(begun.path)  # it was overwritten
        self._saved.setdefault(state["round"], set()).add(begun.path)
        self._remove_obsolete()

    def _remove_obsolete(self) -> None:
        """Remove needless files of checkpoints that are written by now; some may still be written in the background."""
        # Over a copy, as entries are removed.
        for begun in [note for note in self._begun if note.is_there() is not False]:
            obsolete = begun.obsolete - self._named()
            self._unlink(obsolete)
            self._obsolete -= obsolete
            self._notes().end(begun)
            self._begun.remove(begun)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned.

        A run that trains, and so has called `open`, links or copies files of another folder into its own. A run that
        only evaluates reads them in place.

        Raises:
            ValueError: files of the checkpoint are gone, or it names files that are no memories.
        """
        self._held = dict(state.get("memories", {}))
        self._sizes = {client_id: _num_bytes(memory) for client_id, memory in self._held.items()}
        self.on_disk = "versions" in state
        self._versions = dict(state.get("versions", {}))
        self._snapshots = {idx: set(names) for idx, names in state.get("snapshots", {}).items()}
        origin = Path(state.get("folder", ""))
        self._origin, here = origin if self.on_disk else None, self.folder or origin
        self._saved = {
            idx: {moved(path, origin, here) for path in paths}
            for idx, paths in state.get("saved", {}).items()
        }
        if self.on_disk and self.resumed_from:
            self._saved.setdefault(state["round"], set()).add(os.path.abspath(self.resumed_from))
        self.resumed_from = ""  # states that are loaded later are of other rounds
        self._before, self.in_use = None, bool(self._held or self._versions)
        for name in {*self._versions.values()}.union(*self._snapshots.values()):
            if not _VERSION.fullmatch(name):
                raise ValueError(f"the checkpoint names {name!r}, which is no file of clients' memories")
        if self._opened:
            self._settle()

    def _settle(self) -> None:
        """Bring the memories of a checkpoint into this run's folder."""
        gone = [name for name in self._versions.values() if not self._find(name).exists()]
        if gone:
            raise ValueError(
                f"{len(gone)} of the {len(self._versions)} clients' memories of this checkpoint are not in "
                f"{self._origin}: the folder was moved or emptied, or later rounds took their place. Resume from a later "
                "checkpoint"
            )
        for name in self._versions.values():
            if not self._path(name).exists():
                self._notes().add(name)
                _link_or_copy(self._find(name), self._path(name))
        if self.bytes_in_ram > self.limit_mib * 2**20:
            self._move_to_disk(round_idx=0)

    def _find(self, name: str) -> Path:
        """Return the path of a version: in the run's own folder, or in that of its checkpoint."""
        if self.folder is not None and (self.folder / name).exists():
            return self.folder / name
        return (self._origin or self._path(name).parent) / name

    def _move_to_disk(self, round_idx: int) -> None:
        self.on_disk = True
        for client_id in list(self._held):
            self._write(client_id, self._held[client_id], round_idx)
            del self._held[client_id], self._sizes[client_id]

    def _write(self, client_id: str, memory: Memory, round_idx: int) -> None:
        name = None
        if memory:
            data = as_bytes(memory)
            name = f"{short_digest(client_id.encode())}-{round_idx}-{self._process}-{short_digest(data)}.pt"
            with full_disk_named(self._path(name).parent):
                self._notes().add(name)
                write_whole(self._path(name), data, synced=False)  # synced before a checkpoint names it
        self._replace(client_id, name)

    def _replace(self, client_id: str, name: str | None) -> None:
        """Let a client have another version, or none."""
        before = self._versions.pop(client_id, None)
        if name is not None:
            self._versions[client_id] = name
        if before is not None and not self._is_named(client_id, before):
            self._unlink([before])

    def _note(self, name: str) -> None:
        """Note a file that another process has written."""
        self._notes().add(name)

    def _notes(self) -> UnsavedFiles:
        """Return the note of files that a later run removes if this process is killed."""
        folder = self._path("note").parent
        if self._unsaved is None or self._unsaved.folder != folder:
            _check_writable(folder)
            folder.mkdir(parents=True, exist_ok=True)
            self._unsaved = UnsavedFiles(folder, self._process)
        return self._unsaved

    def _is_named(self, client_id: str, version: str) -> bool:
        """Return whether the client's version may still be needed."""
        now = [self._versions.get(client_id), self._before and self._before.versions.get(client_id)]
        return version in now or any(
            version in names for names in (self._obsolete, *self._snapshots.values())
        )

    def _named(self) -> set[str]:
        """Return the versions that the run, the round's beginning or a snapshot names."""
        before = self._before.versions.values() if self._before else ()
        return {*self._versions.values()}.union(before, *self._snapshots.values())

    def _unlink(self, versions: Iterable[str]) -> None:
        for name in versions:
            self._path(name).unlink(missing_ok=True)
            if self._unsaved is not None:
                self._unsaved.forget(name)

    def _path(self, name: str) -> Path:
        if self.folder is None:
            raise ValueError(
                f"the clients' memories are more than {self.limit_mib} MiB and there is no folder for them: call open"
            )
        return self.folder / name


class FollowingMemories(ClientMemories):
    """Memories in a process other than the first: it writes those of the clients that it trains, and removes none later."""

    def open(self, folder: str) -> None:
        """Take ``folder`` if none was given; the first process brings memories of a checkpoint there."""
        self.folder = self.folder or Path(folder).absolute()

    def end_round(self) -> None:
        self._before = None

    def hand_over(self) -> None:
        if self._unsaved is not None:
            self._unsaved.drop()

    def state_dict(self, round_idx: int) -> dict[str, Any]:
        """Return nothing: the first process writes the checkpoint."""
        return {}

    def _move_to_disk(self, round_idx: int) -> None:
        """Write the memories that this process has changed in the round; the others' stay in RAM until their names come."""
        self.on_disk = True
        held = self._before.held if self._before else {}
        for client_id in [name for name, memory in self._held.items() if memory is not held.get(name)]:
            self._write(client_id, self._held.pop(client_id), round_idx)
            del self._sizes[client_id]

    def _note(self, name: str) -> None:
        """Do nothing: the first process notes it."""


def _own(value: Any) -> Any:
    """Return a copy on the CPU that shares no memory with ``value``."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if type(value) is dict:
        return {key: _own(item) for key, item in value.items()}
    if type(value) is list:
        return [_own(item) for item in value]
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise ValueError(
        f"a client's memory holds a {type(value).__name__}, which a checkpoint cannot: keep tensors, numbers, strings, "
        "None, and lists and dicts of them"
    )


def _num_bytes(value: Any) -> int:
    """Return the bytes of ``value``, without its containers."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, (dict, list)):
        return sum(_num_bytes(item) for item in (value.values() if isinstance(value, dict) else value))
    return sys.getsizeof(value)


def short_digest(data: bytes) -> str:
    """Return the part of a file's name for its data, or for a client's id, which may hold any character."""
    return blake2b(data, digest_size=8).hexdigest()


def as_bytes(memory: Memory) -> bytes:
    """Return the content of a memory's file, which `read_memory` reads."""
    buffer = io.BytesIO()
    torch.save(memory, buffer)
    return buffer.getvalue()


def _check_writable(folder: Path) -> None:
    """Raise ValueError for a folder that cannot be written: its first file may come after hundreds of rounds."""
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(
            f"{folder}: nothing can be written in {there}. Set trainer.default_root_dir to another folder"
        )


def _link_or_copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:  # another disk, or one without links
        write_whole(target, source.read_bytes())


def read_memory(path: Path, client_id: str) -> Memory:
    """Return the memory in a file; raise ValueError if it is gone, or other than the digest in its name says."""
    if not path.exists():
        raise ValueError(
            f"{path}, the memory of client {client_id!r}, is gone: resume from an earlier checkpoint; if it is on another "
            "host, set trainer.default_root_dir to a folder that all hosts see"
        )
    data = read_bytes(path)
    if short_digest(data) != path.stem.rpartition("-")[2]:
        raise ValueError(
            f"{path}, the memory of client {client_id!r}, is damaged: resume from an earlier checkpoint"
        )
    memory: Memory = torch.load(io.BytesIO(data), weights_only=True)
    return memory
