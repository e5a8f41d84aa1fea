"""Files that are written whole or not at all: after a kill, on a full disk, and when the power goes.

Content goes to a file beside the target first, is synced, and replaces the target in one step. A killed process leaves files
named ``TARGET.<8 hex digits>.tmp``: the next writer of the target takes their place, and `remove_unfinished` finds them all
in a run's folder. Digests inside files show damage when such a file is read.
"""

import csv
import errno
import hashlib
import io
import json
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from math import inf
from pathlib import Path
from typing import Any

from fedlight.support.file_lock import hold, is_at

_UNFINISHED = re.compile(r".+\.[0-9a-f]{8}\.tmp")
MOST_WRITERS = 100
_NO_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES}
"""Errors of file systems that cannot sync a folder; they order their writes in another way, or not at all."""


@contextmanager
def whole_file(file: Path, synced: bool = True) -> Iterator[Path]:
    """Yield a new path in the same folder, unique to this process, which replaces ``file`` if the block ends without error.

    The folder is made. Unless ``synced``, `sync` must be called before anything relies on file and name on the disk.

    Raises:
        OSError: it cannot be written; then ``file`` is as it was.
    """
    with unfinished(file) as new:
        yield new
        if synced:
            sync(new)  # before the name: else a power cut may leave an empty file
        os.replace(new, file)
        if synced:
            sync(file.parent)  # the name is in the folder


@contextmanager
def unfinished(target: Path, is_folder: bool = False) -> Iterator[Path]:
    """Yield an empty file or folder beside ``target`` for this writer alone; it is removed unless it replaces the target.

    Of the names ``TARGET.00000000.tmp``, ``TARGET.00000001.tmp``, ... it has the first that no living writer holds.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    new, handle = _free_name(target, is_folder)
    try:
        yield new
    finally:
        # Where the file has replaced the target, another writer may have the name.
        if handle is None or is_at(handle, new):
            _remove(new)
        if handle is not None:
            os.close(handle)


def _free_name(target: Path, is_folder: bool) -> tuple[Path, int | None]:
    """Return an empty file or folder and the handle that holds it; None where the file system has no locks."""
    # The random name is for a file system without locks, and for more writers than that.
    names = [*(f"{number:08x}" for number in range(MOST_WRITERS)), secrets.token_hex(4)]
    for new in (target.with_name(f"{target.name}.{name}.tmp") for name in names):
        try:
            handle = hold(new, is_folder)
        except OSError:
            break
        if handle is not None:
            for left in new.iterdir() if is_folder else ():
                _remove(left)
            if not is_folder:
                os.truncate(handle, 0)
            return new, handle
    new = target.with_name(f"{target.name}.{names[-1]}.tmp")
    if is_folder:
        new.mkdir()
    return new, None


@contextmanager
def temporary_folder(name: str) -> Iterator[Path]:
    """Yield a new folder for this user alone, removed in the end, and remove those that killed processes have left."""
    target = Path(tempfile.gettempdir(), name)
    for left in target.parent.glob(f"{name}.{'[0-9a-f]' * 8}.tmp"):
        with suppress(OSError):  # no folder, or no locks
            if (handle := hold(left, is_folder=True)) is not None:
                _remove(left)
                os.close(handle)
    with unfinished(target, is_folder=True) as new:
        new.chmod(0o700)
        yield new


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Yield a new folder beside ``folder``, unique to this process, which replaces it if the block ends without error.

    For a moment there is no folder, and a kill then leaves both under names of unfinished files.

    Raises:
        OSError: it cannot be written; then ``folder`` is as it was. A full disk is named with the remedy.
    """
    with full_disk_named(folder), unfinished(folder, True) as new, unfinished(folder, True) as before:
        yield new
        for path in (*new.rglob("*"), new):
            sync(path)
        old = before / folder.name
        try:
            if folder.exists():  # os.replace cannot replace a folder that is not empty
                os.replace(folder, old)
            os.replace(new, folder)
            sync(folder.parent)
        finally:
            if old.exists() and not folder.exists():
                os.replace(old, folder)


def write_whole(file: Path, content: str | bytes, synced: bool = True) -> None:
    """Write a file, all of it or nothing, as `whole_file` does; text becomes UTF-8.

    Raises:
        OSError: it cannot be written; a full disk is named with the remedy.
    """
    data = content.encode() if isinstance(content, str) else content
    with full_disk_named(file), whole_file(file, synced) as new:
        new.write_bytes(data)


MOST_BYTES = 2**29
_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


class BoundError(ValueError):
    """Error of a file that could stop or exhaust a command; the message names the file and the remedy."""


def check_regular(file: Path, most_bytes: float = inf) -> Path:
    """Return the path of a file that can be read to its end; links are followed, and folders are not looked at.

    Raises:
        FileNotFoundError: there is no such file.
        BoundError: it is a pipe, a device or a socket, which may never end, or larger than ``most_bytes``.
    """
    facts = file.stat()
    if (kind := _KINDS.get(stat.S_IFMT(facts.st_mode))) is not None:
        raise BoundError(f"{file} is {kind}, which may never end: give a plain file, or remove it")
    if facts.st_size > most_bytes:
        raise BoundError(
            f"{file} has {facts.st_size / 2**20:,.0f} MiB, and at most {most_bytes / 2**20:,.0f} MiB are read: "
            "give a smaller file, or remove it"
        )
    return file


def read_bytes(file: Path, most_bytes: int = MOST_BYTES) -> bytes:
    """Return the content of a plain file; raise as `check_regular`."""
    return check_regular(file, most_bytes).read_bytes()


def read_text(file: Path, most_bytes: int = MOST_BYTES, errors: str = "strict") -> str:
    """Return the text of a plain file in UTF-8; raise as `check_regular`, and UnicodeDecodeError for other bytes."""
    return check_regular(file, most_bytes).read_text(encoding="utf-8", errors=errors)


def moved(file: str, before: Path, now: Path) -> str:
    """Return where a file is if the folder ``before``, with what is around it, has become ``now``; else ``file``."""
    there = os.path.normpath(now / os.path.relpath(file, before))
    return there if os.path.exists(there) else file


def sync(path: Path) -> None:
    """Sync a file, or the names in a folder, to the disk."""
    if path.is_dir() and os.name != "posix":  # elsewhere a folder cannot be opened
        return
    # Windows syncs only what is open for writing.
    handle = os.open(path, os.O_RDONLY if os.name == "posix" else os.O_RDWR)
    try:
        os.fsync(handle)
    except OSError as error:
        if not path.is_dir() or error.errno not in _NO_SYNC:
            raise
    finally:
        os.close(handle)


def remove_unfinished(folder: Path, but_below: str) -> int:
    """Remove unfinished files and folders of killed processes, and return how many there were.

    No other process may write in the folder. A sub-folder with a file ``but_below`` is another run's and left alone.

    Raises:
        BoundError: there is a pipe, a device or a socket among the other files.
    """
    removed = 0
    for place, folders, files in os.walk(folder):
        if Path(place) != folder and but_below in files:
            folders.clear()
            continue
        for name in filter(_UNFINISHED.fullmatch, [*folders]):
            shutil.rmtree(Path(place, name), ignore_errors=True)
            folders.remove(name)
            removed += 1
        for name in files:
            if _UNFINISHED.fullmatch(name):
                Path(place, name).unlink(missing_ok=True)
                removed += 1
            elif (file := Path(place, name)).exists():
                check_regular(file)
    return removed


MESSAGE = "the disk is full"


@contextmanager
def full_disk_named(path: Path) -> Iterator[None]:
    """Name ``path`` (in nested blocks the inner one) and the remedy in the error of a full disk inside the block.

    Examples:
        >>> with full_disk_named(Path("runs/demo/visits.csv")):
        ...     raise OSError(errno.ENOSPC, "No space left on device")
        Traceback (most recent call last):
        OSError: [Errno 28] the disk is full while writing runs/demo/visits.csv: free some space and ...
    """
    try:
        yield
    except Exception as error:
        if not _is_full(error) or MESSAGE in str(error):
            raise
        raise OSError(
            errno.ENOSPC,
            f"{MESSAGE} while writing {path}: free some space and give the same command again, which goes on from what "
            "is finished",
        ) from error


def _is_full(error: Exception) -> bool:
    # safetensors has a special error class, without an errno.
    code = getattr(error, "errno", None)
    return code in (errno.ENOSPC, errno.EDQUOT) or "No space left on device" in str(error)


def refuse_unwritable(folder: Path, setting: str) -> None:
    """Make the folder that ``setting`` names; raise OSError if it cannot be written, before hours of work."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise OSError(
            f"{setting}={folder} cannot be written ({error.strerror}): choose another folder"
        ) from error


DIGEST = "digest"
CHANGED = "it is not what was written"
_NUM_BYTES = 8


def sealed(content: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a JSON object with its digest.

    Examples:
        >>> sealed({"a": 1})
        {'a': 1, 'digest': '165b44bb3d3e0923'}
    """
    plain: dict[str, Any] = json.loads(json.dumps(content))  # as it is read back from a file
    return {**plain, DIGEST: _digest(plain)}


def unsealed(content: dict[str, Any]) -> dict[str, Any]:
    """Return the content without its digest, unchanged if it has none; raise ValueError if that is of other content."""
    plain = {key: value for key, value in content.items() if key != DIGEST}
    if content.get(DIGEST, _digest(plain)) != _digest(plain):
        raise ValueError(CHANGED)
    return plain


def sealed_bytes(data: bytes) -> bytes:
    """Return the data with their digest, for `unsealed_bytes`."""
    return data + hashlib.blake2b(data, digest_size=_NUM_BYTES).digest()


def unsealed_bytes(data: bytes) -> bytes:
    """Return the data without their digest; raise ValueError if that is of other data."""
    if sealed_bytes(data[:-_NUM_BYTES]) != data:
        raise ValueError(CHANGED)
    return data[:-_NUM_BYTES]


def _digest(content: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=_NUM_BYTES).hexdigest()


DONE = "done.json"
"""File of a finished stage of a recipe, with ``result``, ``seconds`` and ``files``."""


def write_json(file: Path, content: Any) -> None:
    """Write plain values as JSON, all or nothing."""
    write_whole(file, json.dumps(content, indent=2) + "\n")


_ODD = r"\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff"
"""Control characters but the line feed, characters that turn the direction of text, and halves of pairs."""
_UNSAFE = re.compile(rf"[=+\-@]?\n|[=+\-@].|[^{_ODD}]*[{_ODD}]")
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?(e[+-]?\d+)?|inf|nan)", re.ASCII)
_QUOTED = re.compile(r'"(?:[^"\\]|\\u[0-9a-f]{4})*"')


def csv_text(
    rows: Sequence[Mapping[str, Any]], columns: Sequence[str] | None = None, with_header: bool = True
) -> str:
    """Return rows as CSV text, by default with all columns that any row has; a missing value is empty.

    A spreadsheet runs text that begins with ``=``, ``+``, ``-`` or ``@``, and a terminal obeys control characters. Such text
    is written as a JSON string (`quoted`), which `csv_rows` reads back exactly. Numbers and all other text stay as they are.

    Examples:
        >>> csv_text([{"a": 1}, {"a": -2.5, "b": "x, y"}]).splitlines()
        ['a,b', '1,', '-2.5,"x, y"']
    """
    text = io.StringIO()
    names = list(dict.fromkeys(key for row in rows for key in row)) if columns is None else columns
    writer = csv.DictWriter(text, names, lineterminator="\n")
    header = [{name: name for name in names}] if with_header else []
    for row in (*header, *rows):
        writer.writerow({name: quoted(cell) if isinstance(cell, str) else cell for name, cell in row.items()})
    return text.getvalue()


def csv_rows(text: str) -> list[dict[str, str]]:
    r"""Return the rows of `csv_text`; as by ``csv.DictReader``, one that is not whole has None as a key or a value.

    Raises:
        csv.Error: the text is no CSV.

    Examples:
        >>> csv_rows(csv_text([{"a": "\x1b[31m", "b": 1}]))
        [{'a': '\x1b[31m', 'b': '1'}]
    """
    reader = csv.DictReader(io.StringIO(text, newline=""))
    reader.fieldnames = [unquoted(name) for name in reader.fieldnames or ()]
    return [
        {name: unquoted(cell) if isinstance(cell, str) else cell for name, cell in row.items()}
        for row in reader
    ]


def read_csv(file: Path) -> list[dict[str, str]]:
    """Return the rows of a plain file that `csv_text` has made; a damaged character becomes U+FFFD."""
    with check_regular(file).open(newline="", encoding="utf-8", errors="replace") as opened:
        return csv_rows(opened.read())


def quoted(text: str) -> str:
    r"""Return text that a spreadsheet or a terminal would act on as a JSON string, other text as it is.

    Examples:
        >>> for text in ("c001", "-1.5", "=1+1", "a\x00b"):
        ...     print(quoted(text))
        c001
        -1.5
        "=1+1"
        "a\u0000b"
    """
    # Text in the form of quoted text is quoted too, or `unquoted` would change it.
    if _NUMBER.fullmatch(text) or not (_UNSAFE.match(text) or _QUOTED.fullmatch(text)):
        return text
    return '"' + printable(text, r'"\\') + '"'


def printable(text: str, also: str = "") -> str:
    r"""Return text for a terminal, with control characters escaped, and the characters of ``also``, as in a set of `re`.

    Examples:
        >>> print(printable("\x1b[31m=1+1"))
        \u001b[31m=1+1
    """
    return re.sub(f"[{also}{_ODD}]", lambda match: f"\\u{ord(match[0]):04x}", text)


def unquoted(text: str) -> str:
    """Undo `quoted`: return the text of a cell."""
    if not _QUOTED.fullmatch(text):
        return text
    return re.sub(r"\\u([0-9a-f]{4})", lambda match: chr(int(match[1], 16)), text[1:-1])


def write_json_lines(file: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Write one line of JSON for each record, all or nothing."""
    write_whole(file, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))


def read_json(file: Path, remedy: str) -> dict[str, Any]:
    """Return the object in a JSON file, without its digest if it has one; ``remedy`` says what to do if it is damaged.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is empty, cut, no JSON object, no plain file, or its digest is of other content.
    """
    data = read_bytes(file)
    try:
        content = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        fault = "it is no JSON: " + " ".join(str(error).split()) if data.strip(b"\0 \n") else "it is empty"
        raise ValueError(f"{file} is damaged ({fault}): {remedy}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{file} is damaged (it holds no object): {remedy}")
    try:
        return unsealed(content)
    except ValueError as error:
        raise ValueError(f"{file} is damaged ({error}): {remedy}") from None


def result_of(folder: str | Path) -> dict[str, Any]:
    """Return the result of a finished stage: the dict of its call, or ``{"metrics": ...}`` of its command.

    Raises:
        ValueError: the stage is not done, or its ``done.json`` is damaged.
    """
    file = Path(folder) / DONE
    if not file.is_file():
        raise ValueError(f"{file}: there is no such file: give the folder of a finished stage")
    return read_json(file, remedy_for(file.parent)).get("result", {})


def remedy_for(stage: Path) -> str:
    """Return how to have a damaged stage done again."""
    return f"delete the folder {stage} and those of the stages after it, and the same command does them again"
