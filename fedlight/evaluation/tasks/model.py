"""What a task needs of a model: answers, and likelihoods of answers."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable


class Likelihood(NamedTuple):
    """How likely a text is behind another.

    Attributes:
        log_prob: natural logarithm of its probability.
        tokens: of the text.
        greedy: whether greedy decoding would have written it.
    """

    log_prob: float
    tokens: int
    greedy: bool


@runtime_checkable
class AnswersPrompts(Protocol):
    """What is needed of a module; see :class:`fedlight.modules.language.module.LanguageModule`."""

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
        """Completes each prompt n times."""

    def log_likelihoods(
        self, prompts: Sequence[str], continuations: Sequence[Sequence[str]]
    ) -> list[list[Likelihood]]:
        """How likely each continuation of each prompt is."""


@runtime_checkable
class KnowsWhatFits(Protocol):
    """A module that can say beforehand which prompts are too long for it."""

    def fits(self, prompts: Sequence[str], new_tokens: int) -> list[bool]:
        """Whether each prompt fits into the model with so many tokens behind it."""
