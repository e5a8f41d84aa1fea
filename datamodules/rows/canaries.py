"""Canaries: random rows planted among clients' training data, which a model can only repeat if it has memorized them.

Carlini et al., "The Secret Sharer: Evaluating and Testing Unintended Memorization in Neural Networks", USENIX Security 2019,
https://arxiv.org/abs/1802.08232. A canary's instruction holds a random *key*, its response an independent random *secret*.
An attack that samples instructions looks for the key; an attack that prompts with the instruction looks for the secret.
"""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from string import Formatter
from typing import Any

from fedlight.datamodules.rows.fields import NO_SLOTS
from fedlight.support.checks import Settings, refuse_below
from fedlight.support.seeding import derive_seed
from fedlight.support.types import Fields, FieldsByClient

DIGITS = tuple("0123456789")
LEAST_ALTERNATIVES = 1000
"""Least number of possible keys and of possible secrets, so that none can be guessed."""


@dataclass(frozen=True)
class Canaries(Settings):
    """Settings of the canaries of each client; in YAML ``canaries: {number: 1, repeats: 4}``.

    Args:
        number: different canaries of each client that has any, >= 1.
        repeats: copies of each among its client's training rows, >= 1; see `plant`.
        length: words of a key and of a secret, >= 1.
        words: different words without blanks, the parts of keys and secrets; None: digits. The embedded toy model knows
            digits and the words of its world only.
        instruction: text with the slot ``{key}``, ``{client}`` or both; the default is in the toy model's words.
        slot: slot of the prompt template that the instruction fills; the other slots stay empty.
        clients: number of clients with canaries, drawn by seed; None: all.
        seed: seed of clients, keys and secrets.

    Raises:
        ValueError: a setting is out of range, or fewer than 1,000 texts are possible.

    Examples:
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
        super().__post_init__()
        counts = {"number": self.number, "repeats": self.repeats, "length": self.length}
        refuse_below(1, "canaries.", **counts, clients=self.clients)
        words = self._words
        if len(set(words)) < len(words) or any(word.split() != [word] for word in words):
            raise ValueError(f"canaries.words={self.words} must be different words without blanks")
        if len(words) ** self.length < LEAST_ALTERNATIVES:
            raise ValueError(
                f"canaries.length={self.length} of {len(words)} words gives {len(words) ** self.length:,} texts, which can "
                f"be guessed: set a length or words for {LEAST_ALTERNATIVES:,} or more"
            )
        slots = _read_slots(self.instruction)
        if not slots or slots - {"key", "client"}:
            raise ValueError(
                f"canaries.instruction={self.instruction!r} must have the slot {{key}}, {{client}} or both, and no other"
            )

    def plant(self, clients: FieldsByClient) -> dict[str, list[Fields]]:
        """Return the canaries of each client that has any, as rows with all slots of the clients' rows and ``response``.

        The caller adds each `repeats` times. A client's canaries depend on the settings and the clients' ids only.

        Raises:
            ValueError: there are fewer clients than are to have canaries, more canaries than keys, or the rows have no such
                slot.
        """
        slots = self._find_slots(clients)
        chosen = self._draw_clients(sorted(clients))  # the draw depends on ids, not on their order
        # With at least half of the keys free, a new one takes two draws on average.
        if len(chosen) * self.number > len(self._words) ** self.length / 2:
            raise ValueError(
                f"canaries.number={self.number} for {len(chosen)} clients: length={self.length} of {len(self._words)} words "
                "does not give enough different keys; raise canaries.length"
            )
        keys: set[str] = set()
        return {
            client: [self._make(slots, client, index, keys) for index in range(self.number)]
            for client in chosen
        }

    def secrets(self, number: int) -> list[str]:
        """Return random secrets that are not planted; a planted one's exposure is its likelihood among theirs.

        Examples:
            >>> Canaries(length=3).secrets(2)
            ['5 0 6', '4 4 4']
        """
        rng = random.Random(derive_seed(self.seed, "canaries", "others"))
        return [self._draw_words(rng) for _ in range(number)]

    @property
    def _words(self) -> Sequence[str]:
        return DIGITS if self.words is None else self.words

    def _find_slots(self, clients: FieldsByClient) -> list[str]:
        row: Fields = next((row for rows in clients.values() for row in rows), {})
        slots = [name for name in row if name not in NO_SLOTS]
        if self.slot not in slots:
            raise ValueError(
                f"canaries.slot={self.slot!r} is no slot of the clients' rows: choose from {', '.join(slots) or 'none'}"
            )
        return slots

    def _draw_clients(self, clients: list[str]) -> list[str]:
        if self.clients is None:
            return clients
        if self.clients > len(clients):
            raise ValueError(
                f"canaries.clients={self.clients}, but there are {len(clients)}: lower it, or null for all"
            )
        return sorted(
            random.Random(derive_seed(self.seed, "canaries", "clients")).sample(clients, self.clients)
        )

    def _make(self, slots: Sequence[str], client: str, index: int, keys: set[str]) -> Fields:
        rng = random.Random(derive_seed(self.seed, "canary", client, index))
        while (key := self._draw_words(rng)) in keys:  # one key in two canaries would not tell whose it is
            pass
        keys.add(key)
        instruction = self.instruction.format(key=key, client=client)
        return {**dict.fromkeys(slots, ""), self.slot: instruction, "response": self._draw_words(rng)}

    def _draw_words(self, rng: random.Random) -> str:
        return " ".join(rng.choices(self._words, k=self.length))


def check_words(tokenizer: Any, texts: Iterable[str], setting: str = "canaries.words") -> None:
    """Raise ValueError for a word of planted rows that the tokenizer does not know: a model cannot tell unknown words apart.

    A tokenizer without an unknown token accepts every word.
    """
    words = sorted({word for text in texts for word in text.split()})
    unknown = [
        word
        for word in words
        if tokenizer.unk_token_id in tokenizer(word, add_special_tokens=False)["input_ids"]
    ]
    if unknown:
        raise ValueError(
            f"{setting}: the tokenizer does not know {len(unknown)} of {len(words)} words, such as {unknown[0]!r}, so "
            "a model cannot tell them apart. Set words that it knows."
        )


def _read_slots(text: str) -> set[str]:
    """Return the slots of a text, none where its braces do not match."""
    try:
        return {slot for _, slot, _, _ in Formatter().parse(text) if slot is not None}  # None: text only
    except ValueError:
        return set()
