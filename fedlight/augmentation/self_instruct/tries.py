"""Tries of Self-Instruct: judged and counted by client, and written to a file, so that a killed run can resume.

The file has the settings in its first line and one batch of tries in each further line, written when the batch is done;
each line has a digest. A run with equal settings and rows reads the tries again instead of making them.
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from fedlight.datamodules.rows.fields import instruction_text
from fedlight.evaluation.rouge_l import KnownTexts
from fedlight.support.files import sealed, unsealed
from fedlight.support.seeding import derive_seed
from fedlight.support.types import Fields

ACCEPTED = "accepted"
EMPTY = "empty instruction"
TOO_LONG = "instruction too long"
REPEATED = "a known instruction again"
TOO_NEAR = "too near to a known instruction"
NO_RESPONSE = "no response"
REASONS = (EMPTY, TOO_LONG, REPEATED, TOO_NEAR, NO_RESPONSE)


class Try(NamedTuple):
    """Try to make a row: ``number`` counts the client's earlier tries, ``outcome`` is ``accepted`` or why it was dropped."""

    client: str
    number: int
    outcome: str
    instruction: str
    response: str


class ClientTries:
    """Tries of one client, until there are ``number`` rows, ``max_tries`` tries or ``give_up_after`` dropped ones in a row.

    An instruction that passes is known from then on, whether or not it gets a response; so are those of the client's own
    ``rows``. Its ROUGE-L F1 with a known one is at most ``max_rouge_l``.

    Attributes:
        accepted: tries that became rows.
        tries: number of tries so far.
        dropped: number of dropped tries by reason.

    Examples:
        >>> rows = [{"instruction": "Add 1 and 2.", "response": "3"}]
        >>> client = ClientTries("c0", rows, 5, max_rouge_l=0.7, max_words=9, max_tries=9, give_up_after=9)
        >>> client.judge("add 1 and 2. "), client.judge("Add 1 and 7."), client.judge("Name a planet.")
        ('a known instruction again', 'too near to a known instruction', 'accepted')
    """

    def __init__(
        self,
        name: str,
        rows: Sequence[Fields],
        number: int,
        *,
        max_rouge_l: float,
        max_words: int,
        max_tries: int,
        give_up_after: int,
    ) -> None:
        self.name, self.rows, self.number = name, rows, number
        self.max_words, self.max_tries, self.give_up_after = max_words, max_tries, give_up_after
        self.accepted: list[Try] = []
        self.tries = self._dropped_in_row = 0
        self.dropped: Counter[str] = Counter()
        self._near = KnownTexts(max_rouge_l)
        self._known: set[str] = set()
        for row in rows:
            self._add_known(instruction_text(row))

    @property
    def wanted(self) -> int:
        """Number of tries that may still be made for missing rows."""
        if not self.rows or self._dropped_in_row >= self.give_up_after:
            return 0
        return min(self.number - len(self.accepted), self.max_tries - self.tries)

    def draw_examples(self, number: int, seed: int) -> tuple[Fields, Fields, Fields]:
        """Return two rows for a try's instruction and one for its response; a client with one row shows it each time."""
        draw = np.random.default_rng(derive_seed(seed, "self_instruct", self.name, number))
        first, second = draw.choice(len(self.rows), 2, replace=len(self.rows) == 1).tolist()
        return self.rows[first], self.rows[second], self.rows[int(draw.integers(len(self.rows)))]

    def judge(self, instruction: str) -> str:
        """Return ``accepted`` and remember the instruction, or return why it is dropped."""
        if not instruction:
            return EMPTY
        if len(instruction.split()) > self.max_words:
            return TOO_LONG
        if _normalize(instruction) in self._known:
            return REPEATED
        if self._near.near(instruction) is not None:
            return TOO_NEAR
        self._add_known(instruction)
        return ACCEPTED

    def count(self, attempt: Try) -> None:
        """Count a try, and keep it if it was accepted."""
        self.tries += 1
        if attempt.outcome == ACCEPTED:
            self.accepted.append(attempt)
            self._dropped_in_row = 0
        else:
            self.dropped[attempt.outcome] += 1
            self._dropped_in_row += 1

    def replay(self, attempt: Try) -> None:
        """Count a try of an earlier run."""
        if attempt.outcome in (ACCEPTED, NO_RESPONSE):  # these passed `judge`
            self._add_known(attempt.instruction)
        self.count(attempt)

    def _add_known(self, instruction: str) -> None:
        self._known.add(_normalize(instruction))
        self._near.add(instruction)


def _normalize(instruction: str) -> str:
    return " ".join(instruction.casefold().split())


def next_tries(clients: Sequence[ClientTries], most: int) -> list[tuple[ClientTries, int]]:
    """Return the next tries with their numbers, in turn from client to client: ``most``, or as many as are still wanted."""
    rounds = range(max((client.wanted for client in clients), default=0))
    in_turn = ((client, client.tries + more) for more in rounds for client in clients if more < client.wanted)
    return [pair for _, pair in zip(range(most), in_turn, strict=False)]


class TriesRecord:
    """File of the tries of one run; see `open_record`.

    Attributes:
        batches: batches of an earlier run.
    """

    def __init__(self, file: IO[bytes] | None, batches: list[list[Try]]) -> None:
        self._file, self.batches = file, batches

    def append(self, tries: Sequence[Try]) -> None:
        """Write a batch, so that it survives a crash of the machine."""
        if self._file is not None:
            self._file.write(_make_line({"tries": [list(attempt) for attempt in tries]}))
            self._file.flush()
            os.fsync(self._file.fileno())


def fingerprint(settings: Mapping[str, Any], clients: Mapping[str, Sequence[Fields]], seed: int) -> str:
    """Return sixteen hex digits of all that the made rows depend on.

    Examples:
        >>> first, second = (fingerprint({"number": 1}, {"c": [{"response": text}]}, seed=0) for text in "ab")
        >>> len(first), first == second
        (16, False)
    """
    digest = hashlib.blake2b(digest_size=8)
    digest.update(json.dumps([settings, seed], sort_keys=True).encode())
    for client, rows in clients.items():
        digest.update(json.dumps([client, [dict(row) for row in rows]]).encode())
    return digest.hexdigest()


@contextmanager
def open_record(folder: str | None, settings: Mapping[str, Any], key: str) -> Iterator[TriesRecord]:
    """Open the record of a run with these settings; another process waits until it is closed. No folder keeps nothing.

    ``settings`` are for a human reader of the file; ``key`` is the `fingerprint` of the run.

    Raises:
        ValueError: the file is damaged elsewhere than at its end.
    """
    if folder is None:
        yield TriesRecord(None, [])
        return
    path = Path(folder).expanduser() / f"self_instruct-{key}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:  # neither truncates the file nor needs one
        if os.name == "posix":  # elsewhere two processes must not share a folder
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)  # "a" opens at the end
        lines = file.read().splitlines(keepends=True)
        if lines and not lines[-1].endswith(b"\n"):  # the writer was killed
            file.truncate(sum(map(len, lines[:-1])))
            lines = lines[:-1]
        # The first line has the settings; it is checked like the others.
        batches = [_read_line(line, path, number) for number, line in enumerate(lines, 1)][1:]
        if not lines:
            file.write(_make_line(settings))
        yield TriesRecord(file, batches)


def _make_line(content: Mapping[str, Any]) -> bytes:
    return json.dumps(sealed(dict(content)), ensure_ascii=False).encode() + b"\n"


def _read_line(line: bytes, path: Path, number: int) -> list[Try]:
    try:
        return [Try(*attempt) for attempt in unsealed(json.loads(line)).get("tries", [])]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(
            f"{path}: line {number} is damaged; delete the lines from there on, and the run goes on before them"
        ) from None
