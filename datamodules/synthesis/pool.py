"""Encoded candidates of one round, appended to the clients' own examples."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from fedlight.datamodules.synthesis.synthesis import Candidate
from fedlight.datamodules.text.encoding import encode_responses
from fedlight.datamodules.text.examples import ResponseExamples, join_examples
from fedlight.datamodules.text.templates import Template


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
