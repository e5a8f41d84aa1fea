"""One client's tries in Self-Instruct: what is known, what was accepted, what was dropped and why."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from fedlight.augmentation.self_instruct.record import Try
from fedlight.datamodules.rows.fields import instruction_text
from fedlight.evaluation.rouge_l import KnownTexts
from fedlight.support.seeding import derive_seed
from fedlight.support.types import Fields

ACCEPTED = "accepted"
EMPTY = "empty instruction"
TOO_LONG = "instruction too long"
REPEATED = "a known instruction again"
TOO_NEAR = "too near to a known instruction"
NO_RESPONSE = "no response"
REASONS = (EMPTY, TOO_LONG, REPEATED, TOO_NEAR, NO_RESPONSE)


class ClientTries:
    """Judges and counts the tries of one client.

    An instruction that passes is known from then on, whether or not a response to it comes.

    Args:
        name: of the client.
        rows: its own.
        number: rows wanted.
        max_rouge_l: most ROUGE-L F1 with a known instruction.
        max_words: of an instruction.
        max_tries: in all.
        give_up_after: dropped tries in a row.

    Attributes:
        accepted: the tries that became rows.
        tries: so far.
        dropped: how many, by reason.

    Example:
        >>> own = [{"instruction": "Add 1 and 2.", "response": "3"}]
        >>> client = ClientTries("c0", own, 5, max_rouge_l=0.7, max_words=9, max_tries=9, give_up_after=9)
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
        self.tries = self._in_vain = 0
        self.dropped: Counter[str] = Counter()
        self._near = KnownTexts(max_rouge_l)
        self._known: set[str] = set()
        for row in rows:
            self._know(instruction_text(row))

    @property
    def wanted(self) -> int:
        """Tries that may still be made for rows that are still missing."""
        if not self.rows or self._in_vain >= self.give_up_after:
            return 0
        return min(self.number - len(self.accepted), self.max_tries - self.tries)

    def examples(self, number: int, seed: int) -> tuple[Fields, Fields, Fields]:
        """Two rows for the instruction and one for the response of a try; of a client with one row always that one."""
        draw = np.random.default_rng(derive_seed(seed, "self_instruct", self.name, number))
        first, second = draw.choice(len(self.rows), 2, replace=len(self.rows) == 1).tolist()
        return self.rows[first], self.rows[second], self.rows[int(draw.integers(len(self.rows)))]

    def judge(self, instruction: str) -> str:
        """Whether an instruction is accepted, or why not; if it is, it is known."""
        if not instruction:
            return EMPTY
        if len(instruction.split()) > self.max_words:
            return TOO_LONG
        if _plain(instruction) in self._known:
            return REPEATED
        if self._near.near(instruction) is not None:
            return TOO_NEAR
        self._know(instruction)
        return ACCEPTED

    def count(self, one: Try) -> None:
        """Counts a try, and keeps it if it was accepted."""
        self.tries += 1
        if one.outcome == ACCEPTED:
            self.accepted.append(one)
            self._in_vain = 0
        else:
            self.dropped[one.outcome] += 1
            self._in_vain += 1

    def replay(self, one: Try) -> None:
        """Counts a try of an earlier run."""
        if one.outcome in (ACCEPTED, NO_RESPONSE):
            self._know(one.instruction)
        self.count(one)

    def _know(self, instruction: str) -> None:
        self._known.add(_plain(instruction))
        self._near.add(instruction)


def _plain(instruction: str) -> str:
    return " ".join(instruction.casefold().split())


def next_tries(clients: Sequence[ClientTries], most: int) -> list[tuple[ClientTries, int]]:
    """The next tries, in turn from client to client: each with its number.

    Args:
        clients: those of the federation.
        most: tries.

    Returns:
        None of a client more than it still wants; empty when nobody wants any.
    """
    rounds = range(max((client.wanted for client in clients), default=0))
    in_turn = ((client, client.tries + more) for more in rounds for client in clients if more < client.wanted)
    return [one for _, one in zip(range(most), in_turn, strict=False)]
