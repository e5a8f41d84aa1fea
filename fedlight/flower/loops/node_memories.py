"""Memories of the clients of a node, on its disk, by the round that they follow.

The server says which version counts: that of the last round that took the client's work. So a reply that was lost, a server
that goes on from an older checkpoint and a node that is started again meet the memory that the emulator would have.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fedlight.federation.client_state import ClientMemories, Memory, as_bytes, read_memory, short_digest
from fedlight.flower.messages import Refused
from fedlight.support.files import full_disk_named, write_whole


@dataclass(frozen=True)
class Versions:
    """Rounds of a client's memory; None where it has not taken part.

    Attributes:
        last: last round whose work the server has taken.
        oldest: the same at the server's newest checkpoint, where it may go on from.
    """

    last: int | None = None
    oldest: int | None = None


class NodeMemories(ClientMemories):
    """Store of a node's clients, which keeps every version that the server may still ask for."""

    def __init__(self, folder: Path, versions: Mapping[str, Versions]) -> None:
        super().__init__(str(folder), limit_mib=0)
        self._versions_by_client, self._root = versions, folder
        self._in_round: dict[str, Path] = {}
        self.in_use = True  # files of earlier rounds are there

    def open(self, folder: str) -> None:
        """Keep the node's folder; the base class would remove files that no checkpoint here names."""

    def load(self, client_id: str) -> Memory:
        """Return the client's memory after its last visit in this round, or after the last round that the server has taken.

        It is empty before the first.

        Raises:
            Refused: its file is gone or damaged.
        """
        last = self._versions_by_client.get(client_id, Versions()).last
        if client_id not in self._in_round and last is None:
            return {}
        file = self._in_round.get(client_id) or self._files(client_id).get(last or 0)
        if file is None:
            raise Refused(
                f"what client {client_id} remembers of round {(last or 0) + 1} is not in {self._root}: give the node the "
                "folder that it had, or start a new run"
            )
        try:
            return read_memory(file, client_id)
        except ValueError as error:
            raise Refused(str(error)) from error

    def save(self, client_id: str, memory: Memory, round_idx: int) -> None:
        """Keep the client's memory after a visit of a round, and remove versions that the server cannot go back to."""
        data = as_bytes(memory)
        oldest = self._versions_by_client.get(client_id, Versions()).oldest
        files_before = self._files(client_id)
        path = self._root / f"{short_digest(client_id.encode())}-{round_idx}-{short_digest(data)}.pt"
        with full_disk_named(self._root):
            self._root.mkdir(parents=True, exist_ok=True)
            write_whole(path, data)
        self._in_round[client_id] = path
        for number, file in files_before.items():
            # A server that is killed goes on from its newest checkpoint, and asks for what that one needs.
            if file != path and (number == round_idx or (oldest is not None and number < oldest)):
                file.unlink(missing_ok=True)

    def _files(self, client_id: str) -> dict[int, Path]:
        files = self._root.glob(f"{short_digest(client_id.encode())}-*-*.pt")
        # A kill may leave two of a round, and the newer one counts.
        by_age = sorted(files, key=lambda path: path.stat().st_mtime_ns)
        return {int(path.stem.split("-")[1]): path for path in by_age}
