"""Metadata of models and data sets at the Hugging Face hub: files and sizes, license, access, columns.

Requests are small: a list of files, a card, parts of a file. A hub that cannot be reached is asked once and no more.
"""

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

from fedlight.preflight.finding import Finding, ok, problem

T = TypeVar("T")
TIMEOUT_SECONDS = 10.0
HEAD_BYTES = 262_144


class HubUnreachableError(Exception):
    """The hub cannot be reached; the message is the reason."""


class Repository(NamedTuple):
    """Model or data set at the hub."""

    name: str  # ``owner/name``
    files: dict[str, int]  # path -> bytes
    card: dict[str, Any]  # YAML head of its README
    license: str  # license in its card, else empty
    gated: bool  # whether its terms have to be accepted
    revision: str

    @property
    def terms(self) -> str:
        """License and access, for a finding."""
        licence = f"; license {self.license}" if self.license else "; its card names no license"
        return licence + ("; gated, and there is access" if self.gated else "")


@dataclass
class Report:
    """Result of the checks of all models, or of all data sets."""

    findings: list[Finding] = field(default_factory=list)
    # hub name -> bytes to be fetched, as far as they are known
    downloads: dict[str, int] = field(default_factory=dict)
    unasked: list[str] = field(default_factory=list)  # hub names that could not be looked up
    # hub name of a model -> its ``config.json``, fetched for the memory plan
    configs: dict[str, bytes] = field(default_factory=dict)
    # (source, split) of rows -> their number, as far as it is known
    counts: dict[tuple[str, str], int] = field(default_factory=dict)

    @contextmanager
    def asking(self, what: str, name: str, cached: str | None) -> Iterator[None]:
        """Add the finding of a refusal in the block, or, of a hub that cannot be reached, of what the cache has."""
        try:
            yield
        except HubUnreachableError:
            if cached:
                self.findings.append(ok(what, f"in the cache, {cached}"))
            else:
                self.unasked.append(name)
        except ValueError as error:
            self.findings.append(problem(what, str(error)))


class Hub:
    """Client of ``HF_ENDPOINT``, with the token of ``hf auth login`` or ``HF_TOKEN`` if there is one."""

    def __init__(self) -> None:
        self.silent: str | None = None  # why the hub cannot be reached; None as long as it answers
        self._known: dict[tuple[str, str, str], Repository] = {}

    def repository(self, name: str, kind: str, revision: str = "main") -> Repository:
        """Return a model (``kind="model"``) or data set (``"dataset"``) that can be read.

        Raises:
            ValueError: there is none of this name, or it is gated and the token gives no access; with the remedy.
            HubUnreachableError: the hub cannot be reached.
        """
        key = (name, kind, revision)
        if key not in self._known:
            self._known[key] = self._ask(lambda: _repository(name, kind, revision))
        return self._known[key]

    def head(self, repo: Repository, kind: str, path: str, size: int = HEAD_BYTES) -> bytes:
        """Return the first bytes of a file; raise as `read` does."""
        # Streamed, with a block size of 0: a server may ignore ranges and send gigabytes.
        return self.read(repo, kind, path, lambda file: file.read(size), block_size=0)

    def read(self, repo: Repository, kind: str, path: str, read: Callable[[Any], T], **options: Any) -> T:
        """Return the result of a function of the open file; only the parts that it seeks are fetched.

        Options are those of ``HfFileSystem.open``. Raises ValueError for a file that cannot be read.
        """
        from huggingface_hub.errors import HfHubHTTPError

        def question() -> T:
            place = f"{_path(repo.name, kind)}/{path}"
            try:
                with self._files.open(place, revision=repo.revision, **options) as file:
                    return read(file)
            except HfHubHTTPError as error:
                raise ValueError(f"{path}: the hub answers {error.response.status_code}") from None
            except FileNotFoundError as error:
                raise ValueError(str(error)) from None

        return self._ask(question)

    @cached_property
    def _files(self) -> Any:
        from huggingface_hub import HfFileSystem, constants

        return HfFileSystem(endpoint=constants.ENDPOINT, skip_instance_cache=True)

    def _ask(self, question: Callable[[], T]) -> T:
        from huggingface_hub.errors import HfHubHTTPError

        bases: tuple[Any, ...] = HfHubHTTPError.__bases__
        if self.silent is not None:
            raise HubUnreachableError(self.silent)
        try:
            return question()
        except ValueError:  # in some libraries a ValueError is an OSError as well
            raise
        # The client has changed its HTTP library twice; the library's own error is a base of the client's.
        except (OSError, *bases) as error:
            self.silent = type(error).__name__
            raise HubUnreachableError(self.silent) from None


def _repository(name: str, kind: str, revision: str) -> Repository:
    from huggingface_hub import HfApi, constants, get_token
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    api = HfApi(endpoint=constants.ENDPOINT)
    ask = api.model_info if kind == "model" else api.dataset_info
    quiet = logging.getLogger("huggingface_hub")
    level = quiet.level
    quiet.setLevel(logging.ERROR)  # the table shows its warnings
    try:
        at = None if revision == "main" else revision
        info: Any = ask(name, revision=at, timeout=TIMEOUT_SECONDS, files_metadata=True)
        if info.gated:  # anyone may list the files, but not read them
            api.auth_check(name, repo_type=kind)
    except GatedRepoError:
        who = "this account has" if get_token() else "without an account there is"
        raise ValueError(
            f"gated, and {who} no access: accept its terms there and run `hf auth login`; "
            f"{constants.ENDPOINT}/{_path(name, kind)}"
        ) from None
    except RepositoryNotFoundError:
        raise ValueError(f"no such {kind} at the hub: check the name, or use `hf auth login`") from None
    except RevisionNotFoundError:
        raise ValueError(f"it has no revision {revision}") from None
    finally:
        quiet.setLevel(level)
    card = info.card_data.to_dict() if info.card_data is not None else {}
    files = {file.rfilename: int(file.size or 0) for file in info.siblings or []}
    names = card.get("license_name") or card.get("license") or ""
    licence = ", ".join(names) if isinstance(names, list) else str(names)
    return Repository(name, files, card, licence, bool(info.gated), revision)


def _path(name: str, kind: str) -> str:
    return name if kind == "model" else f"datasets/{name}"


def first_json(text: str) -> dict[str, Any]:
    r"""Return the first row of JSON lines or of a JSON list, given only its beginning.

    Raises:
        ValueError: it has no whole object.

    Examples:
        >>> first_json('[ {"a": 1, "b": [2]}, {"a"'), first_json('{"a": 3}\n{"a')
        ({'a': 1, 'b': [2]}, {'a': 3})
    """
    # raw_decode stops after the first object; before it: a byte order mark, or the bracket of a list.
    row = json.JSONDecoder().raw_decode(text.lstrip("\ufeff \n\r\t[").lstrip())[0]
    if not isinstance(row, dict):
        raise ValueError("its rows are no objects")
    return row
