"""Settings of a language model that writes texts, nested in configs as ``sampling`` and ``completions``."""

from dataclasses import dataclass

from fedlight.support.checks import Settings, check_range, refuse_below


@dataclass(frozen=True)
class Sampling(Settings):
    """How texts are drawn from a language model.

    Args:
        temperature: at least 0; 0 is greedy.
        top_p: share of the probability to draw from, in (0, 1].
        max_new_tokens: most tokens of a text.

    Raises:
        ValueError: a setting is out of range.
    """

    temperature: float = 0.7
    top_p: float = 1.0
    max_new_tokens: int = 512

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("temperature", self.temperature, 0, float("inf"))
        check_range("top_p", self.top_p, 0, 1, above_low=True)
        refuse_below(1, max_new_tokens=self.max_new_tokens)


@dataclass(frozen=True)
class Completions(Sampling):
    """How a language model completes the prompts of ``fedlight predict``.

    Args:
        temperature: see `Sampling`, as for the next two.
        top_p: share of the probability to draw from.
        max_new_tokens: most tokens of a completion.
        number: texts per prompt, >= 1.

    Raises:
        ValueError: a setting is out of range.
    """

    max_new_tokens: int = 80
    number: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_below(1, number=self.number)
