"""Embedded world: posts made of facts, and good and bad summaries of them, from about a hundred words.

A post states four facts, each ``name verb object .``, about four different people. Everybody has one trade, so the verb
follows from the name, and three usual objects; the post names one of them. A summary opens with a style word or none,
repeats some of the facts in the post's order, and may pad them with filler words. An *invented* fact has another of the
person's usual objects. It is as plausible as a true one, so only a comparison with the post shows it. Tastes are in
``votes.py``.

All text consists of lower-case words and full stops separated by blanks, so it survives a tokenizer's round trip.
"""

import math
import random
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

PEOPLE = {
    "anna": ("paints", ("walls", "boats", "doors")),
    "ben": ("bakes", ("bread", "cakes", "pies")),
    "carla": ("grows", ("roses", "beans", "corn")),
    "dan": ("fixes", ("clocks", "bikes", "radios")),
    "eva": ("sells", ("hats", "shoes", "coats")),
    "finn": ("reads", ("poems", "maps", "letters")),
    "gina": ("builds", ("towers", "bridges", "sheds")),
    "hugo": ("keeps", ("goats", "bees", "hens")),
}
NAMES = tuple(PEOPLE)
VERBS = tuple(verb for verb, _ in PEOPLE.values())
OBJECTS = tuple(thing for _, things in PEOPLE.values() for thing in things)
_VERBS, _OBJECTS = frozenset(VERBS), frozenset(OBJECTS)
POLITE = ("kindly", "gladly")
RUDE = ("duh", "ugh")
FILLERS = ("basically", "honestly", "literally")

FACTS_PER_POST = 4

# A prompt of the selector has only about 60 tokens. The language model knows the words around the fields from its
# pretraining, except "better", which has no meaning to it before training.
GENERATION_TEMPLATE = "POST : {prompt}\nSUMMARY :"
CHOICE_TEMPLATE = "POST : {prompt}\nA : {response_a}\nB : {response_b}\nwhich is better ?\nYOUR CHOICE:"

Fact = tuple[str, str, str]
Options = TypeVar("Options", bound=NamedTuple)


class Traits(NamedTuple):
    """Measurable traits of a summary, given its post."""

    covered: int  # number of the post's facts that it states, 0 to 4
    invented: int  # number of different facts in it that are not in the post
    polite: int  # 1 with a polite word, -1 with a rude one, 0 with neither or both
    filler: int  # number of filler words
    words: int  # number of all words, other marks included; full stops do not count
    junk: int  # number of words that belong to no fact, style or filler; 0 in a world's own summaries


def draw_post(rng: random.Random) -> str:
    """Return a post of four facts about different people."""
    names = rng.sample(NAMES, FACTS_PER_POST)
    return " ".join(f"{name} {PEOPLE[name][0]} {rng.choice(PEOPLE[name][1])} ." for name in names)


def draw_summary(rng: random.Random, post: str) -> str:
    """Return a summary of one to four facts in the post's order, with every trait drawn independently.

    The share of distorted facts is drawn for each summary (0, 0.3 or 0.6), so there are careful and careless ones.
    """
    facts = facts_of(post)
    count = rng.choices((1, 2, 3, 4), weights=(3, 3, 3, 1))[0]
    chosen = sorted(rng.sample(range(len(facts)), count))  # in the post's order
    carelessness = rng.choice((0.0, 0.3, 0.6))
    padding = rng.choice((0.0, 0.0, 0.4))
    words = [] if rng.random() < 0.34 else [rng.choice(POLITE + RUDE)]
    for index in chosen:
        name, verb, thing = facts[index]
        if rng.random() < carelessness:
            thing = rng.choice([other for other in PEOPLE[name][1] if other != thing])
        if rng.random() < padding:
            words.append(rng.choice(FILLERS))
        words += [name, verb, thing, "."]
    return " ".join(words)


def facts_of(text: str) -> list[Fact]:
    """Return the facts in a text, in order and with repeats; other words are skipped."""
    words = _words(text)
    triples = zip(words, words[1:], words[2:], strict=False)  # each is one shorter
    return [words for words in triples if words[0] in PEOPLE and words[1] in _VERBS and words[2] in _OBJECTS]


def measure(post: str, summary: str) -> Traits:
    """Return the traits of a summary, or of any other text.

    Examples:
        >>> measure("anna bakes bread . ben reads maps .", "kindly honestly anna bakes pies . ben reads maps .")
        Traits(covered=1, invented=1, polite=1, filler=1, words=8, junk=0)
    """
    words, stated, true = _words(summary), facts_of(summary), set(facts_of(post))
    polite = sum(word in POLITE for word in words)
    rude = sum(word in RUDE for word in words)
    filler = sum(word in FILLERS for word in words)
    return Traits(
        covered=len(true & set(stated)),
        invented=len(set(stated) - true),
        polite=(polite > 0) - (rude > 0),
        filler=filler,
        words=len(words),
        junk=len(words) - polite - rude - filler - 3 * len(stated),  # a fact has three words
    )


def _words(text: str) -> list[str]:
    return text.replace(".", " ").split()


def read_options(kind: type[Options], given: Mapping[str, Any], **allowed: Any) -> Options:
    """Return a named tuple, all of whose fields have defaults, of the given options, each converted to its default's type.

    A value may be a text, as in ``toy:votes?seed=1&opposition=0.5``; ``allowed`` has for an option the lowest and highest
    number, or the names to choose from.

    Raises:
        ValueError: an unknown option, one that is not a number where a number is needed, or one out of range.

    Examples:
        >>> class Size(NamedTuple):
        ...     rows: int = 10
        ...     share: float = 0.5
        >>> read_options(Size, {"share": "0.25"}, share=(0, 1))
        Size(rows=10, share=0.25)
    """
    if unknown := sorted(set(given) - set(kind._fields)):
        raise ValueError(f"toy option {unknown[0]!r} does not exist: choose from {', '.join(kind._fields)}")
    defaults = kind._field_defaults
    values = {name: _convert(name, value, type(defaults[name])) for name, value in given.items()}
    options = kind._make({**defaults, **values}.values())
    for name, limits in allowed.items():
        value = getattr(options, name)
        if isinstance(value, str):
            if value not in limits:
                raise ValueError(
                    f"toy option {name}={value!r} does not exist: choose from {', '.join(limits)}"
                )
        elif not limits[0] <= value <= limits[1] or value == math.inf:
            raise ValueError(f"toy option {name}={value} must lie between {limits[0]} and {limits[1]}")
    return options


def _convert(name: str, value: Any, kind: type) -> Any:
    try:
        return kind(str(value))  # else 2.5 clients would be two
    except ValueError as error:
        raise ValueError(f"toy option {name}={value!r} is not a number ({kind.__name__})") from error
