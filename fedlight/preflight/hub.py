"""What the Hugging Face hub says of a model or data set: is it there, may it be had, what does it weigh, which columns.

Only small metadata is asked for: a repository's list of files, its card, and the first bytes of a file. A hub that cannot be
reached is asked once and no more.
"""

import io
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote

Answer = TypeVar("Answer")
TIMEOUT_SECONDS = 10.0
HEAD_BYTES = 262_144


class HubUnreachableError(Exception):
    """Nothing can be asked; the message is the reason."""


class Repository(NamedTuple):
    """A model or data set.

    Attributes:
        name: ``owner/name``.
        files: path -> bytes.
        card: the YAML head of its README.
        license: as its card says, else empty.
        gated: must its terms be accepted?
        revision: whose files these are.
    """

    name: str
    files: dict[str, int]
    card: dict[str, Any]
    license: str
    gated: bool
    revision: str


class Hub:
    """Asks ``HF_ENDPOINT``, with the token of ``hf auth login`` or ``HF_TOKEN`` where there is one.

    Attributes:
        silent: why it cannot be reached; None as long as it answers.
    """

    def __init__(self) -> None:
        self.silent: str | None = None
        self._asked: dict[tuple[str, str, str], Repository | ValueError] = {}

    def repository(self, name: str, kind: str, revision: str = "main") -> Repository:
        """A model (``kind="model"``) or data set (``"dataset"``) that can be read.

        Raises:
            ValueError: there is none of that name, or it is gated and the token gives no access; with the remedy.
            HubUnreachableError: the hub cannot be reached.
        """
        key = (name, kind, revision)
        if key not in self._asked:
            try:
                self._asked[key] = self._ask(lambda: _repository(name, kind, revision))
            except ValueError as error:
                self._asked[key] = error
        found = self._asked[key]
        if isinstance(found, ValueError):
            raise found
        return found

    def file(self, of: Repository, kind: str, path: str, first: int = 0, size: int = HEAD_BYTES) -> bytes:
        """Some bytes of a file.

        Raises:
            ValueError: it cannot be had.
            HubUnreachableError: the hub cannot be reached.
        """
        return self._ask(lambda: _bytes(of, kind, path, first, size))

    def _ask(self, question: Callable[[], Answer]) -> Answer:
        if self.silent is not None:
            raise HubUnreachableError(self.silent)
        try:
            return question()
        except ValueError:  # some libraries make an OSError of it as well
            raise
        except _failures() as error:
            self.silent = type(error).__name__
            raise HubUnreachableError(self.silent) from None


def _failures() -> tuple[type[Exception], ...]:
    """Errors of the HTTP library under the hub's client, three so far: its own errors extend that one's."""
    from huggingface_hub.errors import HfHubHTTPError

    return OSError, *HfHubHTTPError.__bases__


def _repository(name: str, kind: str, revision: str) -> Repository:
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    api = HfApi(endpoint=constants.ENDPOINT)
    ask = api.model_info if kind == "model" else api.dataset_info
    quiet = logging.getLogger("huggingface_hub")
    level = quiet.level
    quiet.setLevel(logging.ERROR)  # what it would warn of is told in the table
    try:
        info: Any = ask(
            name,
            revision=None if revision == "main" else revision,
            timeout=TIMEOUT_SECONDS,
            files_metadata=True,
        )
        if info.gated:  # the list of files is open to all, the files are not
            api.auth_check(name, repo_type=kind)
    except GatedRepoError:
        remedy = "accept its terms there and run `hf auth login`"
        raise ValueError(
            f"gated, and {_who()} no access: {remedy}; {constants.ENDPOINT}/{_path(name, kind)}"
        ) from None
    except RepositoryNotFoundError:
        raise ValueError(
            f"no such {kind} at the hub: check the name; a private one needs `hf auth login`"
        ) from None
    except RevisionNotFoundError:
        raise ValueError(f"it has no revision {revision}") from None
    finally:
        quiet.setLevel(level)
    card = info.card_data.to_dict() if info.card_data is not None else {}
    files = {file.rfilename: int(file.size or 0) for file in info.siblings or []}
    return Repository(name, files, card, _license(card), bool(info.gated), revision)


def _who() -> str:
    from huggingface_hub import get_token

    return "this account has" if get_token() else "without an account there is"


def _path(name: str, kind: str) -> str:
    return name if kind == "model" else f"datasets/{name}"


def _license(card: dict[str, Any]) -> str:
    found = card.get("license_name") or card.get("license") or ""
    return ", ".join(found) if isinstance(found, list) else str(found)


def _bytes(of: Repository, kind: str, path: str, first: int, size: int) -> bytes:
    from huggingface_hub import constants, get_session, get_token

    place = f"{_path(of.name, kind)}/resolve/{quote(of.revision, safe='')}/{quote(path)}"
    url = f"{constants.ENDPOINT}/{place}"
    token = get_token()
    headers = ({"Authorization": f"Bearer {token}"} if token else {}) | {
        "Range": f"bytes={first}-{first + size - 1}",
        "Accept-Encoding": "identity",
    }
    with _streamed(get_session(), url, headers) as (status, pieces):
        if status not in (200, 206):
            raise ValueError(f"{path}: the hub answers {status}")
        if status == 200 and first:
            raise ValueError(f"{path}: the hub gives whole files alone")
        found = b""
        for piece in pieces:
            found += piece
            if len(found) >= size:
                break
    return found[:size]


@contextmanager
def _streamed(session: Any, url: str, headers: dict[str, str]) -> Iterator[tuple[int, Iterator[bytes]]]:
    """The status of an answer, and its bytes as they come: a server may pass over the range and send gigabytes."""
    if callable(session.stream):  # httpx and its successor, since huggingface_hub 1.0
        options = {"headers": headers, "timeout": TIMEOUT_SECONDS, "follow_redirects": True}
        with session.stream("GET", url, **options) as response:
            yield response.status_code, response.iter_bytes()
    else:  # requests
        with session.get(url, headers=headers, timeout=TIMEOUT_SECONDS, stream=True) as response:
            yield response.status_code, response.iter_content(2**14)


class RangedFile(io.RawIOBase):
    """A file of the hub that is read where it is sought, for formats whose description stands at their end."""

    def __init__(self, hub: Hub, of: Repository, path: str) -> None:
        super().__init__()
        self._read_at, self._size, self._place = (
            lambda first, size: hub.file(of, "dataset", path, first, size),
            of.files[path],
            0,
        )

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Moves to a place."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._size}[whence]
        self._place = base + offset
        return self._place

    def tell(self) -> int:
        """The place."""
        return self._place

    def readinto(self, buffer: Any) -> int:
        """Reads on from there."""
        size = min(len(buffer), self._size - self._place)
        found = self._read_at(self._place, size) if size > 0 else b""
        buffer[: len(found)] = found
        self._place += len(found)
        return len(found)


def first_json(text: str) -> dict[str, Any]:
    r"""The first row of JSON lines or of a JSON list, of which only the beginning is known.

    Raises:
        ValueError: it holds no whole object.

    Example:
        >>> first_json('[ {"a": 1, "b": [2]}, {"a"'), first_json('{"a": 3}\n{"a')
        ({'a': 1, 'b': [2]}, {'a': 3})
    """
    row = json.JSONDecoder().raw_decode(text.lstrip("\ufeff \n\r\t[").lstrip())[0]
    if not isinstance(row, dict):
        raise ValueError("its rows are no objects")
    return row
