"""Texts of the tiny language model's pretraining: summaries to write, and neutral exercises in reading them.

A large language model can read two answers and say which is longer; a tiny one has to be taught that. There are
comparisons in the selector's own format ("which is longer ?", the answer is a letter), tallies of one of two summaries ("A
covers 2"), and checked summaries, with "right" or "wrong" behind every fact. Each exercise is about one trait; none says
whether more of it is better.
"""

import random
from collections.abc import Callable

from fedlight.toy.world import (
    CHOICE_TEMPLATE,
    GENERATION_TEMPLATE,
    NAMES,
    OBJECTS,
    Traits,
    draw_post,
    draw_summary,
    facts_of,
    measure,
)

BETTER = "which is better ?"
END = "</s>"
MARKERS = ("POST", "SUMMARY", "CHECK", "A", "B", "which")
ASKED = ("is", "better", "YOUR", "CHOICE", "longer", "covers", "more", "invents", "kinder", "rambles")
SPOKEN = (*ASKED, "names", "words", "sounds")
JUDGEMENTS = (*map(str, range(18)), "rude", "plain", "kind", "right", "wrong", "silent")

QUESTIONS_PER_PAIR = 3
TALLIES_PER_PAIR = 10

# question -> trait; the summary with the greater value is the answer
QUESTIONS: dict[str, Callable[[Traits], int]] = {
    "which is longer ?": lambda traits: traits.words,
    "which covers more ?": lambda traits: traits.covered,
    "which invents more ?": lambda traits: traits.invented,
    "which is kinder ?": lambda traits: traits.polite,
    "which rambles more ?": lambda traits: traits.filler,
}


def answers(traits_a: Traits, traits_b: Traits) -> dict[str, str]:
    """Return question -> answer for two summaries; equal traits have no answer.

    Examples:
        >>> from fedlight.toy.world import Traits
        >>> said = answers(Traits(1, 0, 1, 0, 4, 0), Traits(1, 1, 1, 0, 7, 0))
        >>> said["which is longer ?"], said["which invents more ?"], "which is kinder ?" in said
        ('B', 'B', False)
    """
    scored = {question: (score(traits_a), score(traits_b)) for question, score in QUESTIONS.items()}
    return {question: "A" if a > b else "B" for question, (a, b) in scored.items() if a != b}


def name_questions(summary_a: str, summary_b: str) -> dict[str, str]:
    """Return ``which names anna ?`` -> answer, for every name that only one of the two mentions.

    Examples:
        >>> name_questions("anna bakes pies .", "anna bakes pies . ben reads maps .")
        {'which names ben ?': 'B'}
    """
    in_a, in_b = ({name for name, _, _ in facts_of(summary)} for summary in (summary_a, summary_b))
    return {
        f"which names {name} ?": "A" if name in in_a else "B"
        for name in NAMES
        if (name in in_a) != (name in in_b)
    }


def tallies(letter: str, post: str, summary: str) -> list[tuple[str, str]]:
    """Return statements on one of two summaries: pairs of an opening and the one word that completes it.

    Examples:
        >>> said = dict(tallies("B", "anna paints walls . ben bakes pies .", "kindly anna paints doors ."))
        >>> said["B covers"], said["B anna"], said["B ben"]
        ('0', 'wrong', 'silent')
    """
    traits, stated, true = measure(post, summary), facts_of(summary), set(facts_of(post))
    counts = {
        "words": traits.words,
        "covers": traits.covered,
        "invents": traits.invented,
        "rambles": traits.filler,
    }
    statements = [(f"{letter} {what}", str(count)) for what, count in counts.items()]
    statements.append((f"{letter} sounds", ("rude", "plain", "kind")[traits.polite + 1]))
    judged = {fact[0]: "right" if fact in true else "wrong" for fact in stated}
    return statements + [(f"{letter} {name}", judged.get(name, "silent")) for name, _, _ in facts_of(post)]


def ask(rng: random.Random, answers: dict[str, str], count: int) -> list[tuple[str, str]]:
    """Return up to ``count`` of the questions in random order, each with its answer."""
    return rng.sample(sorted(answers.items()), min(count, len(answers)))


def summary_text(rng: random.Random) -> str:
    """Return `GENERATION_TEMPLATE` with a post, and the summary that the model is to write after it."""
    post = draw_post(rng)
    return f"{GENERATION_TEMPLATE.format(prompt=post)} {draw_summary(rng, post)} {END}"


def check_text(rng: random.Random) -> str:
    """Return a post and a checked summary; another opening keeps the model from writing marks into summaries."""
    post = draw_post(rng)
    opening = GENERATION_TEMPLATE.format(prompt=post).replace("SUMMARY", "CHECK")
    return f"{opening} {checked(post, draw_summary(rng, post))} {END}"


def checked(post: str, summary: str) -> str:
    """Return a summary with "right" or "wrong" after the object of every fact.

    Examples:
        >>> checked("anna paints walls . ben bakes pies .", "duh anna paints walls . ben bakes bread .")
        'duh anna paints walls right . ben bakes bread wrong .'
    """
    true = {thing for _, _, thing in facts_of(post)}
    marks = {thing: f"{thing} {'right' if thing in true else 'wrong'}" for thing in OBJECTS}
    return " ".join(marks.get(word, word) for word in summary.split())


def pair_text(rng: random.Random, mark: bool = False) -> str:
    """Return a post, two summaries (checked ones with ``mark``), questions on them in the selector's format, and tallies."""
    post = draw_post(rng)
    a, b = draw_summary(rng, post), draw_summary(rng, post)
    asked = ask(rng, answers(measure(post, a), measure(post, b)), QUESTIONS_PER_PAIR - 1)
    asked += ask(rng, name_questions(a, b), 1)
    rng.shuffle(asked)  # else the question of names would be last
    statements = rng.sample([*tallies("A", post, a), *tallies("B", post, b)], TALLIES_PER_PAIR)
    shown_a, shown_b = (checked(post, summary) if mark else summary for summary in (a, b))
    text, slot = CHOICE_TEMPLATE.format(prompt=post, response_a=shown_a, response_b=shown_b).split(BETTER)
    lines = [f"{question}{slot} {answer}" for question, answer in asked]
    return text + "\n".join([*lines, *(f"{opening} {value}" for opening, value in statements)])
