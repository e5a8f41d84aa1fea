"""Cache of an endpoint's answers on disk, one small file each under a hash of its request.

A file has the answer and its costs, neither prompt nor key. It is written whole, with a digest; a damaged one is replaced.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fedlight.generators.chat_server import Answer
from fedlight.support.files import read_json, sealed, whole_file


class AnswerCache:
    """Folder of answers, readable by its owner alone, that several processes may share; None keeps nothing."""

    def __init__(self, folder: str | None) -> None:
        self.folder = Path(folder).expanduser() if folder else None

    @staticmethod
    def key(base_url: str, body: Mapping[str, Any], which: str) -> str:
        """Return thirty-two hex digits for a request's body to a server; ``which`` numbers draws of the same request.

        Examples:
            >>> AnswerCache.key("http://a", {"model": "m"}, "0.0") == AnswerCache.key("http://a", {"model": "m"}, "0.1")
            False
        """
        text = json.dumps([base_url, body, which], sort_keys=True)  # the order of settings must not matter
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def read(self, keys: Iterable[str]) -> dict[str, Answer]:
        """Return the saved answers among these keys."""
        if self.folder is None:
            return {}
        answers = {key: self._read_one(key) for key in set(keys)}
        return {key: answer for key, answer in answers.items() if answer is not None}

    def write(self, key: str, answer: Answer) -> None:
        """Write an answer."""
        if self.folder is None:
            return
        file = self._file(key)
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with whole_file(file) as new:
            new.chmod(0o600)  # readable by its owner alone
            new.write_text(json.dumps(sealed(answer._asdict())), encoding="utf-8")

    def _read_one(self, key: str) -> Answer | None:
        try:
            answer = Answer(**read_json(self._file(key), "it is asked for again"))
        except (FileNotFoundError, TypeError, ValueError):  # absent, or damaged
            return None
        return answer if isinstance(answer.text, str) else None  # else damaged

    def _file(self, key: str) -> Path:
        assert self.folder is not None
        return self.folder / key[:2] / f"{key}.json"
