"""Exercises by which the tiny model comes able to make data for itself: writing questions by examples, and common knowledge.

A large language model that is shown some questions can write another of their kind, and it can answer some of those without
having seen anybody's private rows. The tiny one has to be taught both before a federation begins. An exercise shows none to
eight questions about what somebody knows, in any of the four domains, ``POST : ... POST : ... POST :``, to be followed by
another question, mostly about one of the same areas. Those say how questions are put and nothing of how they are answered.
With ``known`` above 0 every other exercise is a question about one of so many topics of one domain, with its answer.

All of these are texts of the public rows, so none of them is asked in the test.
"""

import random
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from fedlight.support.seeding import derive_seed
from fedlight.toy.instructions import DOMAINS, TEMPLATE, Topic, ToyRow, draw_rows, question, topics
from fedlight.toy.options import read_options
from fedlight.toy.world import NAMES

KNOWN_AREAS, KNOWN_NAMES = (1, 2, 2, 3), 3
SAME_AREA = 0.8


class WritingOptions(NamedTuple):
    """What can be chosen about the exercises.

    Attributes:
        seed: of all of them, and of the world whose facts are known.
        size: their number.
        questions: most questions that are shown.
        domain: of which topics are known.
        known: how many of its 48 topics.
    """

    seed: int = 0
    size: int = 12_000
    questions: int = 8
    domain: str = "kitchen"
    known: int = 0


class Somebody(NamedTuple):
    """Whose questions an exercise shows.

    Attributes:
        domain: of all of them.
        topics: what they may be about.
    """

    domain: str
    topics: Sequence[Topic]

    @classmethod
    def drawn(cls, rng: random.Random) -> "Somebody":
        """Knows some people in some areas of one domain."""
        domain = rng.choice(list(DOMAINS))
        areas = rng.sample(DOMAINS[domain].areas, rng.choice(KNOWN_AREAS))
        return cls(domain, [(area, name) for area in areas for name in rng.sample(NAMES, KNOWN_NAMES)])

    def ask(self, rng: random.Random, topic: Topic) -> str:
        """A question about a topic, in some wording."""
        (row,) = draw_rows("public", 1, partial(question, rng, 0, self.domain, topic))
        return f"{row['instruction']} {row['input']}"


def writing(**options: int | str) -> list[ToyRow]:
    """Exercises, a function of the options.

    Args:
        options: see `WritingOptions`.

    Returns:
        Rows with ``instruction``, all that stands before the question that is to be written, and ``output``, that.

    Raises:
        ValueError: an unknown option, or a value out of range.

    Example:
        >>> len(writing(size=3))
        3
    """
    chosen = read_options(WritingOptions, dict(options))
    if chosen.domain not in DOMAINS:
        raise ValueError(
            f"toy option domain={chosen.domain!r} does not exist: choose from {', '.join(DOMAINS)}"
        )
    for name, low, high in (("size", 1, 1_000_000), ("questions", 0, 100), ("known", 0, 48)):
        if not low <= getattr(chosen, name) <= high:
            raise ValueError(f"toy option {name}={getattr(chosen, name)} must lie between {low} and {high}")
    rng = random.Random(derive_seed(chosen.seed, "toy", "writing"))
    known = known_topics(chosen.seed, chosen.domain, chosen.known)
    return [
        common_knowledge(rng, chosen.seed, chosen.domain, known)
        if known and number % 2
        else exercise(rng, chosen.questions)
        for number in range(chosen.size)
    ]


def known_topics(seed: int, domain: str, number: int) -> list[Topic]:
    """The topics whose answers everybody may know, drawn without regard to who has private rows of them.

    Example:
        >>> len(known_topics(0, "kitchen", 24)), known_topics(0, "kitchen", 0)
        (24, [])
    """
    return random.Random(derive_seed(seed, "toy", "known", domain)).sample(topics(domain), number)


def common_knowledge(rng: random.Random, seed: int, domain: str, known: Sequence[Topic]) -> ToyRow:
    """A question about a known topic, with its answer."""
    (row,) = draw_rows("public", 1, partial(question, rng, seed, domain, rng.choice(known)))
    return {"instruction": TEMPLATE.format(**row), "output": row["output"]}


def exercise(rng: random.Random, most: int) -> ToyRow:
    """Some questions, at most ``most``, to be followed by another."""
    whose = Somebody.drawn(rng)
    shown = [whose.ask(rng, rng.choice(whose.topics)) for _ in range(rng.randint(0, most))]
    near = shown and rng.random() < SAME_AREA
    area = rng.choice(whose.topics)[0] if near else rng.choice(DOMAINS[whose.domain].areas)
    before = "".join(f"POST : {text}\n" for text in shown)
    return {"instruction": f"{before}POST :", "output": whose.ask(rng, (area, rng.choice(NAMES)))}
