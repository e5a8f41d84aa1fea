"""Canaries: random rows planted among clients' training data, whose reappearance can be no accident.

Carlini et al., "The Secret Sharer: Evaluating and Testing Unintended Memorization in Neural Networks", USENIX Security 2019,
https://arxiv.org/abs/1802.08232. A canary asks for a random *key* and is answered by a random *secret*. Whoever samples
instructions from a model looks for the key, whoever prompts it with the instruction looks for the secret; neither can be
guessed, and neither follows from the other.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import Formatter

from fedlight.datamodules.instructions.augmentation import NO_SLOTS
from fedlight.support.checks import refuse_below
from fedlight.support.seeding import derive_seed
from fedlight.support.types import Fields

DIGITS = tuple("0123456789")
LEAST_ALTERNATIVES = 1000
"""A key or a secret is one of so many at least, or it could be guessed."""


@dataclass(frozen=True)
class Canaries:
    """Says which canaries each client has; in YAML ``canaries: {number: 1, repeats: 4}``.

    Args:
        number: different canaries of each client that has any, >= 1.
        repeats: how often each stands among its client's training rows, >= 1; see `plant`.
        length: words of a key and of a secret, >= 1.
        words: what they are made of, different words without blanks; None: digits. The embedded toy model knows digits and
            the words of its world alone.
        instruction: a text with the slot ``{key}``, ``{client}`` or both; the default is in the toy model's words.
        slot: slot of the prompt template that the instruction goes into; the other slots stay empty.
        clients: clients that have canaries, drawn by seed; None: all.
        seed: of clients, keys and secrets.

    Raises:
        ValueError: a setting is out of range, or so few texts are possible that one could be guessed.

    Example:
        >>> rows = {"ann": [{"instruction": "Add.", "input": "1 and 2", "response": "3"}], "ben": []}
        >>> planted = Canaries(length=4, instruction="Code {key} of {client}?").plant(rows)
        >>> planted["ben"][0]
        {'instruction': 'Code 6 3 1 3 of ben?', 'input': '', 'response': '6 4 4 3'}
        >>> list(Canaries(clients=1, seed=1).plant(rows))
        ['ann']
    """

    number: int = 1
    repeats: int = 1
    length: int = 6
    words: list[str] | None = None
    instruction: str = "which is {key} ?"
    slot: str = "instruction"
    clients: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        counts = {
            "number": self.number,
            "repeats": self.repeats,
            "length": self.length,
            "clients": self.clients,
        }
        refuse_below(1, "canaries.", **counts)
        words = self._words
        if len(set(words)) < len(words) or any(word.split() != [word] for word in words):
            raise ValueError(f"canaries.words={self.words} must be different words without blanks")
        if len(words) ** self.length < LEAST_ALTERNATIVES:
            raise ValueError(
                f"canaries.length={self.length} of {len(words)} words gives {len(words) ** self.length:,} texts, which can "
                f"be guessed: set a length or words for {LEAST_ALTERNATIVES:,} or more"
            )
        slots = _slots_in(self.instruction)
        if not slots or slots - {"key", "client"}:
            raise ValueError(
                f"canaries.instruction={self.instruction!r} must have the slot {{key}}, {{client}} or both, and no other"
            )

    def plant(self, clients: Mapping[str, Sequence[Fields]]) -> dict[str, list[Fields]]:
        """Different canaries by client, in the form of the clients' rows; the caller adds each `repeats` times.

        What a client gets depends on nothing but its id, the settings and the names of the others.

        Args:
            clients: each client's rows, which say what slots there are.

        Returns:
            Rows with all slots and ``response``, for the clients that have canaries.

        Raises:
            ValueError: there are fewer clients than are to have canaries, more canaries than keys, or the rows have no such
                slot.
        """
        slots = self._slots(clients)
        chosen = self._chosen(sorted(clients))
        if len(chosen) * self.number > len(self._words) ** self.length / 2:
            raise ValueError(
                f"canaries.number={self.number} for {len(chosen)} clients: length={self.length} of {len(self._words)} words "
                "does not give so many different keys; raise canaries.length"
            )
        keys: set[str] = set()
        return {
            client: [self._canary(slots, client, index, keys) for index in range(self.number)]
            for client in chosen
        }

    def secrets(self, number: int) -> list[str]:
        """Random texts of the kind of the secrets: what the likelihood of a planted one is compared with (its exposure).

        Example:
            >>> Canaries(length=3).secrets(2)
            ['5 0 6', '4 4 4']
        """
        rng = random.Random(derive_seed(self.seed, "canaries", "others"))
        return [self._draw(rng) for _ in range(number)]

    @property
    def _words(self) -> Sequence[str]:
        return DIGITS if self.words is None else self.words

    def _slots(self, clients: Mapping[str, Sequence[Fields]]) -> list[str]:
        row: Fields = next((row for rows in clients.values() for row in rows), {})
        slots = [name for name in row if name not in NO_SLOTS]
        if self.slot not in slots:
            raise ValueError(
                f"canaries.slot={self.slot!r} is no slot of the clients' rows: choose from {', '.join(slots) or 'none'}"
            )
        return slots

    def _chosen(self, clients: list[str]) -> list[str]:
        if self.clients is None:
            return clients
        if self.clients > len(clients):
            raise ValueError(
                f"canaries.clients={self.clients}, but there are {len(clients)}: lower it, or null for all"
            )
        return sorted(
            random.Random(derive_seed(self.seed, "canaries", "clients")).sample(clients, self.clients)
        )

    def _canary(self, slots: Sequence[str], client: str, index: int, keys: set[str]) -> Fields:
        rng = random.Random(derive_seed(self.seed, "canary", client, index))
        while (key := self._draw(rng)) in keys:
            pass
        keys.add(key)
        instruction = self.instruction.format(key=key, client=client)
        return {**dict.fromkeys(slots, ""), self.slot: instruction, "response": self._draw(rng)}

    def _draw(self, rng: random.Random) -> str:
        return " ".join(rng.choices(self._words, k=self.length))


def _slots_in(text: str) -> set[str]:
    """None where the braces do not fit together."""
    try:
        return {slot for _, slot, _, _ in Formatter().parse(text) if slot is not None}
    except ValueError:
        return set()
