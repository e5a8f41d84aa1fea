"""Protocols of models that do tasks: they write answers and return likelihoods."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable


class Likelihood(NamedTuple):
    """Likelihood of a text after another."""

    log_prob: float  # natural logarithm of its probability
    tokens: int  # its number of tokens
    greedy: bool  # whether greedy decoding would have written it
    # natural logarithm of each token's probability; empty where a model does not give them
    token_log_probs: tuple[float, ...] = ()


@runtime_checkable
class AnswersPrompts(Protocol):
    """Module that completes prompts; see `fedlight.modules.language.module.LanguageModule`."""

    def generate(
        self,
        prompts: Sequence[str],
        n: int,
        temperature: float,
        top_p: float,
        max_new_tokens: int,
        seed: int,
        *,
        stop: Sequence[str],
        strip: bool,
    ) -> list[list[str]]:
        """Return n completions of each prompt."""

    def log_likelihoods(
        self, prompts: Sequence[str], continuations: Sequence[Sequence[str]]
    ) -> list[list[Likelihood]]:
        """Return the likelihood of each continuation of each prompt."""


@runtime_checkable
class ScoresRaw(Protocol):
    """Module that returns likelihoods, also those of the model before tuning."""

    def log_likelihoods(
        self, prompts: Sequence[str], continuations: Sequence[Sequence[str]], raw: bool
    ) -> list[list[Likelihood]]:
        """Return the likelihood of each continuation; ``raw`` turns the adapter off."""


@runtime_checkable
class KnowsWhatFits(Protocol):
    """Module that knows which prompts are too long for it."""

    def fits(self, prompts: Sequence[str], new_tokens: int) -> list[bool]:
        """Return whether each prompt fits into the model together with so many new tokens."""


@runtime_checkable
class HoldsTokenizer(Protocol):
    """Module or data with the model's tokenizer, None before it is loaded."""

    tokenizer: Any
