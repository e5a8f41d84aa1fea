"""Neutral comparisons of two summaries, in the selector's own format, for the pretraining of the tiny language model.

A large language model comes able to read two answers and say which is the longer one; a tiny one has to be taught that.
Each question is about one trait; none says whether more of it is better.
"""

import random
from collections.abc import Callable

from fedlight.toy.world import NAMES, Traits, facts_of

# question -> the number of which the greater one is the answer
QUESTIONS: dict[str, Callable[[Traits], int]] = {
    "which is longer ?": lambda traits: traits.words,
    "which covers more ?": lambda traits: traits.covered,
    "which invents more ?": lambda traits: traits.invented,
    "which is kinder ?": lambda traits: traits.polite,
    "which rambles more ?": lambda traits: traits.filler,
}


def answers(traits_a: Traits, traits_b: Traits) -> dict[str, str]:
    """Every question that has an answer for these two, with it; a draw has none.

    Example:
        >>> from fedlight.toy.world import Traits
        >>> found = answers(Traits(1, 0, 1, 0, 4, 0), Traits(1, 1, 1, 0, 7, 0))
        >>> found["which is longer ?"], found["which invents more ?"], "which is kinder ?" in found
        ('B', 'B', False)
    """
    scored = {question: (score(traits_a), score(traits_b)) for question, score in QUESTIONS.items()}
    return {question: "A" if a > b else "B" for question, (a, b) in scored.items() if a != b}


def name_questions(summary_a: str, summary_b: str) -> dict[str, str]:
    """``which names anna ?`` for every name that one of the two mentions and the other does not.

    Example:
        >>> name_questions("anna bakes pies .", "anna bakes pies . ben reads maps .")
        {'which names ben ?': 'B'}
    """
    in_a, in_b = ({name for name, _, _ in facts_of(summary)} for summary in (summary_a, summary_b))
    return {f"which names {name} ?": "A" if name in in_a else "B" for name in NAMES if (name in in_a) != (name in in_b)}


def ask(rng: random.Random, found: dict[str, str], count: int) -> list[tuple[str, str]]:
    """Up to ``count`` of the questions in random order, each with its answer."""
    return rng.sample(sorted(found.items()), min(count, len(found)))
