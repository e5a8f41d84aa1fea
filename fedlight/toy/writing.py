"""Exercises that teach the tiny model to make data for itself: to write questions from examples, and common knowledge.

A large language model that is shown some questions can write another of their kind, and can answer some of those without
having seen private rows. The tiny one has to learn both before a federation begins. An exercise shows none to eight
questions of one of the four domains, ``POST : ... POST : ... POST :``, to be followed by another question, mostly about
one of the same areas; with ``instructed=1`` it asks for it in words, in the form of the clients' rows. The exercises
show how questions are phrased, but not their answers. With ``known`` above 0 every
other exercise is a question about one of so many topics of one domain, with its answer. All questions are texts of the
public rows, so none of them is asked in the test.
"""

import random
from collections.abc import Sequence
from typing import NamedTuple

from fedlight.support.seeding import derive_seed
from fedlight.toy.instructions import (
    DOMAINS,
    TEMPLATE,
    ToyRow,
    draw_questions,
    topics_of_split,
    writing_request,
)
from fedlight.toy.rules import Topic
from fedlight.toy.world import NAMES, read_options

KNOWN_AREAS, KNOWN_NAMES = (1, 2, 2, 3), 3
SAME_AREA = 0.8


class WritingOptions(NamedTuple):
    """Options of the exercises."""

    seed: int = 0  # of all exercises, and of the world whose facts are known
    size: int = 12_000  # number of exercises
    questions: int = 8  # largest number of questions that are shown
    domain: str = "kitchen"  # domain of the known topics
    known: int = 0  # number of its 48 topics that are known; with ``rule=1``, of its 24 shared topics
    rule: int = 0  # 1: answers follow from a rule, see `fedlight.toy.rules`
    # 1: a question is asked for by an instruction, see `fedlight.toy.instructions.writing_request`
    instructed: int = 0


def writing(**options: int | str) -> list[ToyRow]:
    """Return exercises, a function of `WritingOptions` by name.

    Returns:
        Rows with ``instruction``, all text before the question to be written, and ``output``, the question.

    Raises:
        ValueError: an unknown option, or a value out of range.
    """
    chosen = read_options(
        WritingOptions,
        options,
        domain=DOMAINS,
        size=(1, 1_000_000),
        questions=(0, 100),
        known=(0, 48),
        rule=(0, 1),
        instructed=(0, 1),
    )
    rng = random.Random(derive_seed(chosen.seed, "toy", "writing"))
    known = known_topics(chosen.seed, chosen.domain, chosen.known, chosen.rule)
    return [
        common_knowledge(rng, chosen.seed, chosen.domain, known, chosen.rule)
        if known and number % 2
        else exercise(rng, chosen.questions, chosen.instructed)
        for number in range(chosen.size)
    ]


def known_topics(seed: int, domain: str, number: int, rule: int = 0) -> list[Topic]:
    """Return topics with answers that everybody may know, drawn independently of the private rows.

    Raises:
        ValueError: there are fewer topics that may be known.
    """
    may_be_known = topics_of_split("public", domain, rule)
    if number > len(may_be_known):
        raise ValueError(
            f"toy option known={number} with rule={rule} must be at most {len(may_be_known)}: the topics of public rows"
        )
    return random.Random(derive_seed(seed, "toy", "known", domain)).sample(may_be_known, number)


def common_knowledge(
    rng: random.Random, seed: int, domain: str, known: Sequence[Topic], rule: int = 0
) -> ToyRow:
    """Return a question about a known topic, with its answer."""
    (row,) = draw_questions("public", 1, rng, seed, domain, rng.choice(known), rule)
    return {"instruction": TEMPLATE.format(**row), "output": row["output"]}


def exercise(rng: random.Random, most: int, instructed: int = 0) -> ToyRow:
    """Return a row with at most ``most`` questions, to be followed by another."""
    domain = rng.choice(list(DOMAINS))
    areas = rng.sample(DOMAINS[domain].areas, rng.choice(KNOWN_AREAS))
    topics = [(area, name) for area in areas for name in rng.sample(NAMES, KNOWN_NAMES)]  # of one person

    def ask(topic: Topic) -> str:
        (row,) = draw_questions("public", 1, rng, 0, domain, topic)  # seed 0: the answer is not used
        return f"{row['instruction']} {row['input']}"

    shown = [ask(rng.choice(topics)) for _ in range(rng.randint(0, most))]
    near = shown and rng.random() < SAME_AREA
    area = rng.choice(topics)[0] if near else rng.choice(DOMAINS[domain].areas)
    asked = ask((area, rng.choice(NAMES)))
    if instructed:
        return {"instruction": f"POST : {writing_request(shown)}\nCHOICE :", "output": asked}
    before = "".join(f"POST : {text}\n" for text in shown)
    return {"instruction": f"{before}POST :", "output": asked}
