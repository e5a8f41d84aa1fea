"""Costs of requests to an endpoint, known before the first of them is sent, and their limits."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fedlight.support.checks import Settings, check_range, refuse_below

BYTES_PER_TOKEN = 4
"""Bytes of English text in a token, by the services' rule of thumb; code and other languages take more tokens."""

TOKENS_PER_MESSAGE = 4
"""Tokens that mark the speaker and the end of a message."""


@dataclass(frozen=True)
class Prices(Settings):
    """Prices of a million tokens, in any currency, both or none; ValueError for one alone or a negative one."""

    prompt: float | None = None
    answer: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        both = (self.prompt or 0.0, self.answer or 0.0)
        if (self.prompt is None) != (self.answer is None) or not all(0 <= cost < math.inf for cost in both):
            raise ValueError(
                f"prices.prompt={self.prompt} and prices.answer={self.answer}: give both, per million tokens and at least "
                "0, or none"
            )

    def of(self, prompt_tokens: float, answer_tokens: float) -> float | None:
        """Return the price of so many tokens, None where prices are not known.

        Examples:
            >>> Prices(2.0, 8.0).of(500_000, 100_000), Prices().of(1, 1)
            (1.8, None)
        """
        if self.prompt is None or self.answer is None:
            return None
        return (prompt_tokens * self.prompt + answer_tokens * self.answer) / 1e6


@dataclass(frozen=True)
class Costs:
    """Costs of requests that have to be sent; ``str`` gives one line.

    Examples:
        >>> print(Costs(requests=120, saved=80, prompt_tokens=48_000, most_answer_tokens=61_440, most=0.587))
        120 requests (80 answers are saved already), some 48,000 tokens to read, at most 61,440 to write, 0.59 at most
    """

    requests: int  # without a saved answer
    saved: int  # prompts whose answers are on disk already
    prompt_tokens: int  # estimated, of the requests
    most_answer_tokens: int
    most: float | None  # their price, estimated for prompts and at most for answers; None without prices

    def __str__(self) -> str:
        return (
            f"{self.requests:,} requests ({self.saved:,} answers are saved already), some {self.prompt_tokens:,} tokens to "
            f"read, at most {self.most_answer_tokens:,} to write"
            + ("" if self.most is None else f", {self.most:,.2f} at most")
        )


@dataclass(frozen=True)
class Budget(Settings):
    """Limits on what one process sends and spends.

    Args:
        max_requests: most requests; more are refused before the first is sent. None: no limit.
        max_cost: most that it may spend, by ``prices``; likewise.
        prices: of a million tokens of prompts and of answers.

    Raises:
        ValueError: a limit is below 0, or ``max_cost`` has no prices.
    """

    max_requests: int | None = None
    max_cost: float | None = None
    prices: Prices = Prices()

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_below(0, max_requests=self.max_requests)
        check_range("max_cost", self.max_cost or 0.0, 0, math.inf)
        if self.max_cost is not None and self.prices.prompt is None:
            raise ValueError(f"max_cost={self.max_cost} needs prices, of a million tokens each")

    def check(self, costs: Costs, requests: int, prompt_tokens: int, answer_tokens: int) -> None:
        """Raise ValueError if ``costs``, on top of what this process has sent and received so far, would pass a limit."""
        total = requests + costs.requests
        if self.max_requests is not None and total > self.max_requests:
            raise ValueError(
                f"max_requests={self.max_requests}, but there are {costs}, behind {requests:,} that were sent: nothing more "
                f"is asked; set max_requests to {total} or more, or judge fewer prompts"
            )
        spent = self.prices.of(prompt_tokens, answer_tokens)
        if costs.requests and self.max_cost is not None and (spent or 0) + (costs.most or 0) > self.max_cost:
            raise ValueError(
                f"max_cost={self.max_cost:g}, but there are {costs}, behind {spent or 0:.2f} that was spent: nothing more "
                "is asked; raise max_cost, lower sampling.max_new_tokens, or judge fewer prompts"
            )


def costs_of(bodies: Iterable[Mapping[str, Any]], saved: int, max_tokens: int, prices: Prices) -> Costs:
    """Return the costs of requests to be sent, each once, beside ``saved`` ones; ``max_tokens`` bounds an answer.

    Examples:
        >>> body = {"messages": [{"content": "Be brief."}, {"content": "Which one is better?"}]}
        >>> costs_of([body, body], saved=1, max_tokens=100, prices=Prices(10.0, 30.0))
        Costs(requests=2, saved=1, prompt_tokens=32, most_answer_tokens=200, most=0.00632)
    """
    each = [sum(tokens_of(message["content"]) for message in body["messages"]) for body in bodies]
    answers = max_tokens * len(each)
    return Costs(len(each), saved, sum(each), answers, prices.of(sum(each), answers))


def tokens_of(text: str) -> int:
    """Estimate the tokens of a message from its bytes."""
    return math.ceil(len(text.encode()) / BYTES_PER_TOKEN) + TOKENS_PER_MESSAGE
