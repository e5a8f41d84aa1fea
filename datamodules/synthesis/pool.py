"""The candidates of one round beside the clients' own examples: encoded once, found by client."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from fedlight.datamodules.synthesis.synthesis import Candidate
from fedlight.datamodules.text.encoding import encode_responses
from fedlight.datamodules.text.examples import ResponseExamples, joined
from fedlight.datamodules.text.templates import Template
from fedlight.datamodules.text.tokens import encode, leading_ids


class WithCandidates(Dataset):
    """The clients' own examples, then the candidates, whose examples have a ``weight``.

    Args:
        own: of all clients.
        more: the candidates; None where there are none.
        weights: of the candidates, ``(candidates,)``.
    """

    def __init__(self, own: ResponseExamples, more: ResponseExamples | None, weights: np.ndarray) -> None:
        self.own, self.more, self.weights = own, more, weights
        parts = [own] if more is None else [own, more]
        self.lengths = np.concatenate([part.lengths for part in parts])
        self.labelled = np.concatenate([part.labelled for part in parts])

    def __len__(self) -> int:
        """Number of examples."""
        return len(self.lengths)

    def __getitem__(self, item: int) -> dict[str, Any]:
        """One example."""
        at = item - len(self.own)
        if at < 0 or self.more is None:
            return {**self.own[item]}
        return {**self.more[at], "weight": float(self.weights[at])}


class CandidatePool:
    """What was made in a round so far.

    Args:
        own: examples of all clients.
        tokenizer: a fast tokenizer.
        template: the prompt.
        max_tokens: most tokens of an example.

    Attributes:
        candidates: by client, those that fit.
        positions: of these in `examples`, by client, ``(candidates,)``.
        too_long: by client, how many do not fit: a candidate is never cut.
    """

    def __init__(self, own: ResponseExamples, tokenizer: Any, template: Template, max_tokens: int) -> None:
        self.own = own
        self.tokenizer, self.template, self.max_tokens = tokenizer, template, max_tokens
        self.candidates: dict[str, list[Candidate]] = {}
        self.positions: dict[str, np.ndarray] = {}
        self.too_long: dict[str, int] = {}
        self._more: ResponseExamples | None = None
        self._weights = np.empty(0)

    @property
    def examples(self) -> WithCandidates:
        """All examples, those of the clients first."""
        return WithCandidates(self.own, self._more, self._weights)

    def put(self, made: Mapping[str, Sequence[Candidate]]) -> None:
        """Takes the candidates of some clients, in place of what these had."""
        fits = iter(self._fit([one for own in made.values() for one in own]))
        kept = {client: [one for one in own if next(fits)] for client, own in made.items()}
        new = [one for own in kept.values() for one in own]
        at = len(self.own) + len(self._weights)
        for client, own in kept.items():
            self.candidates[client], self.too_long[client] = own, len(made[client]) - len(own)
            self.positions[client] = np.arange(at, at + len(own))
            at += len(own)
        if new:
            rows = [one.fields for one in new]
            encoded = encode_responses(
                self.tokenizer, self.template, rows, [row["response"] for row in rows], self.max_tokens
            )
            more = ResponseExamples(encoded, np.arange(len(new)))
            self._more = more if self._more is None else joined(self._more, more)
            self._weights = np.concatenate([self._weights, [one.weight for one in new]])

    def _fit(self, candidates: Sequence[Candidate]) -> list[bool]:
        """Whether each fits as a whole, the opening and the end token included."""
        if not candidates:
            return []
        blank = "" if self.template.text[-1:].isspace() else " "
        texts = [self.template.render(one.fields, blank + one.fields["response"]).text for one in candidates]
        room = self.max_tokens - len(leading_ids(self.tokenizer)) - 1
        return [len(encoding) <= room for encoding in encode(self.tokenizer, texts)]
