"""Synthesis: generation of training data by a client for itself.

A synthesis gets the rows of some clients and a model, and generates rows that these clients may train on in this round.
`fedlight.datamodules.synthesis.datamodule` scores and selects them, `fedlight.federation.algorithms` decides which visits
train on them. No generated row leaves the client.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import Dataset

from fedlight.datamodules.instructions.augmentation import settings_of
from fedlight.datamodules.text.encoding import encode_responses
from fedlight.datamodules.text.examples import ResponseExamples, join_examples
from fedlight.datamodules.text.templates import Template
from fedlight.evaluation.tasks.model import AnswersPrompts
from fedlight.support.checks import Checked
from fedlight.support.types import Fields

TRIED, SURVIVED = "tried", "survived"


@dataclass(frozen=True)
class Candidate:
    """Generated row.

    Attributes:
        fields: a text for every slot of the template, and ``response``.
        weight: factor of its loss, >= 0; a client's own rows have 1.
    """

    fields: dict[str, str]
    weight: float = 1.0


class Dropped(NamedTuple):
    """Generated text that is no candidate: its client, its text by field, and the reason in snake case."""

    client: str
    fields: dict[str, str]
    reason: str


class Synthesis(Checked, ABC):
    """Base class of generators of candidates.

    A subclass stores every argument of its constructor under the same name: `settings` reads them, and candidates of an
    earlier run are used again only with equal settings. ``without_effect`` names arguments that change no candidate.

    Attributes:
        chooses: whether the best candidates are selected by a score; if not, all of them are used.
        counts: counts of the last `make`: ``tried``, ``survived``, and an entry for each reason to drop candidates (a name
            in snake case). ``tried`` is the sum of all others.
        notes: further counts of the last `make`, by a name in snake case.
        dropped: texts that the last `make` dropped; a subclass need not keep them.

    Examples:
        >>> class Echo(Synthesis):
        ...     def make(self, clients, template, model, seed):
        ...         made = {client: [Candidate(dict(row)) for row in rows] for client, rows in clients.items()}
        ...         self.counts = Counter(tried=sum(map(len, made.values())), survived=sum(map(len, made.values())))
        ...         return made
        >>> echo = Echo()
        >>> echo.make({"c0": [{"instruction": "Add.", "response": "3"}]}, Template("{instruction}"), None, seed=0)
        {'c0': [Candidate(fields={'instruction': 'Add.', 'response': '3'}, weight=1.0)]}
        >>> echo.counts["survived"], echo.settings()
        (1, {'class': 'Echo'})
    """

    chooses: bool = True
    without_effect: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.notes: Counter[str] = Counter()
        self.dropped: list[Dropped] = []

    @abstractmethod
    def make(
        self, clients: Mapping[str, Sequence[Fields]], template: Template, model: AnswersPrompts, seed: int
    ) -> dict[str, list[Candidate]]:
        """Generate candidates for each client and count them in `counts`.

        Args:
            clients: client -> its own training rows.
            template: prompt template, whose slots a candidate fills.
            model: generating model in its present state.
            seed: the result is a function of rows, template, model, settings and seed.

        Returns:
            Client -> its candidates in the order of generation, for every client of ``clients``.
        """

    def settings(self) -> dict[str, object]:
        """Return all that the result depends on besides rows, template, model and seed: the class and its arguments."""
        return settings_of(self, self.without_effect)


class CandidatePool(Dataset):
    """Clients' own examples, then all candidates of a round so far, whose examples have a ``weight``.

    ``lengths`` and ``labelled`` are tokens and labelled tokens of each example, ``(examples,)``.
    """

    def __init__(self, train: ResponseExamples, tokenizer: Any, template: Template, max_tokens: int) -> None:
        self.own, self.lengths, self.labelled = train, train.lengths, train.labelled
        self.tokenizer, self._uncut, self.max_tokens = tokenizer, template.uncut(), max_tokens
        self.candidates: dict[str, list[Candidate]] = {}  # client -> candidates that fit
        # client -> places of these in this dataset, ``(candidates,)``
        self.positions: dict[str, np.ndarray] = {}
        self.too_long: dict[str, int] = {}  # client -> number of others; a candidate is never truncated
        self._encoded: ResponseExamples | None = None
        self._weights = np.empty(0)  # of all candidates so far

    def __len__(self) -> int:
        """Return the number of examples."""
        return len(self.lengths)

    def __getitem__(self, item: int) -> dict[str, Any]:
        """Return one example."""
        at = item - len(self.own)  # own examples come first
        if at < 0 or self._encoded is None:
            return {**self.own[item]}
        return {**self._encoded[at], "weight": float(self._weights[at])}

    def put(self, made: Mapping[str, Sequence[Candidate]]) -> None:
        """Replace the candidates of some clients."""
        rows = [candidate.fields for candidates in made.values() for candidate in candidates]
        encoded = encode_responses(
            self.tokenizer, self._uncut, rows, [row["response"] for row in rows], self.max_tokens
        )
        fits = iter(encoded.kept)  # in the order of rows, client by client
        kept = {client: [each for each in candidates if next(fits)] for client, candidates in made.items()}
        new = [candidate for candidates in kept.values() for candidate in candidates]
        at = len(self.own) + len(self._weights)  # replaced candidates keep their places
        for client, candidates in kept.items():
            self.candidates[client], self.too_long[client] = candidates, len(made[client]) - len(candidates)
            self.positions[client] = np.arange(at, at + len(candidates))
            at += len(candidates)
        if new:
            more = ResponseExamples(encoded, np.flatnonzero(encoded.kept))
            self._encoded = more if self._encoded is None else join_examples(self._encoded, more)
            self._weights = np.concatenate([self._weights, [candidate.weight for candidate in new]])
            self.lengths = np.concatenate([self.own.lengths, self._encoded.lengths])
            self.labelled = np.concatenate([self.own.labelled, self._encoded.labelled])
