"""What Self-Instruct has made so far, on disk: a run that was killed goes on, one that is given again makes nothing.

A file has the settings in its first line and one batch of tries in each further one, written when the batch is done; each
line has a digest.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

from fedlight.support.files import sealed, unsealed
from fedlight.support.types import Fields


class Try(NamedTuple):
    """One try to make a row."""

    client: str
    number: int
    """How many tries of this client came before."""
    outcome: str
    """``accepted``, or why it was dropped."""
    instruction: str
    response: str


class TriesRecord:
    """The tries of one run; see `open_record`.

    Attributes:
        batches: those that were there already.
    """

    def __init__(self, file: IO[bytes] | None, batches: list[list[Try]]) -> None:
        self._file, self.batches = file, batches

    def append(self, tries: Sequence[Try]) -> None:
        """Writes a batch, so that it survives a crash of the machine."""
        if self._file is not None:
            self._file.write(_line({"tries": [list(one) for one in tries]}))
            self._file.flush()
            os.fsync(self._file.fileno())


def fingerprint(settings: Mapping[str, Any], clients: Mapping[str, Sequence[Fields]], seed: int) -> str:
    """Sixteen hex digits for all that the made rows depend on.

    Example:
        >>> one, other = (fingerprint({"number": 1}, {"c": [{"response": text}]}, seed=0) for text in "ab")
        >>> len(one), one == other
        (16, False)
    """
    digest = hashlib.blake2b(digest_size=8)
    digest.update(json.dumps([settings, seed], sort_keys=True).encode())
    for client, rows in clients.items():
        digest.update(json.dumps([client, [dict(row) for row in rows]]).encode())
    return digest.hexdigest()


@contextmanager
def open_record(folder: str | None, settings: Mapping[str, Any], print_: str) -> Iterator[TriesRecord]:
    """The record of a run with these settings; a second process that wants it waits until it is free.

    Args:
        folder: where; None keeps nothing.
        settings: for whoever reads the file.
        print_: the `fingerprint`.

    Raises:
        ValueError: the file is damaged elsewhere than at its end.
    """
    if folder is None:
        yield TriesRecord(None, [])
        return
    path = Path(folder).expanduser() / f"self_instruct-{print_}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        if os.name == "posix":  # elsewhere two processes had better not share a folder
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        lines = file.read().splitlines(keepends=True)
        if lines and not lines[-1].endswith(b"\n"):  # the writer was killed
            file.truncate(sum(map(len, lines[:-1])))
            lines = lines[:-1]
        batches = [_batch(line, path, number) for number, line in enumerate(lines, 1)][1:]
        if not lines:
            file.write(_line(settings))
        yield TriesRecord(file, batches)


def _line(content: Mapping[str, Any]) -> bytes:
    return json.dumps(sealed(dict(content)), ensure_ascii=False).encode() + b"\n"


def _batch(line: bytes, path: Path, number: int) -> list[Try]:
    """Of one line; that of the settings holds none."""
    try:
        content = json.loads(line)
        if isinstance(content, dict):
            content = unsealed(content).get("tries", [])
        return [Try(*one) for one in content]  # a list is a line of an earlier version, without a digest
    except (ValueError, TypeError):
        raise ValueError(
            f"{path}: line {number} is damaged; delete the lines from there on, and the run goes on before them"
        ) from None
