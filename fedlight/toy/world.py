"""The embedded world: posts made of facts, and good and bad summaries of them, in some hundred words.

A post states four facts, each ``name verb object .``, about four different people. Everybody has one trade, so the
verb follows from the name, and three usual objects, of which the post has one. A summary opens with a style word or
none, repeats some of the facts in the post's order, and may pad them with filler words. An *invented* fact has another
of the person's usual objects: it is as plausible as a true one, so only a reader who compares it with the post can
tell. Nothing here knows what anybody likes: tastes are in ``clients.py``.

Everything is text of lower-case words and full stops separated by blanks, so it survives a tokenizer's round trip.
"""

import random
from typing import NamedTuple

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

# Short on purpose: a prompt of the selector has about 60 tokens. The words around the fields are known to the language
# model from its pretraining, "better" alone has no meaning to it yet.
GENERATION_TEMPLATE = "POST : {prompt}\nSUMMARY :"
CHOICE_TEMPLATE = "POST : {prompt}\nA : {response_a}\nB : {response_b}\nwhich is better ?\nYOUR CHOICE:"

Fact = tuple[str, str, str]


class Traits(NamedTuple):
    """What can be measured in a summary, given its post.

    Attributes:
        covered: facts of the post that it states, 0 to 4.
        invented: different facts it states that are not in the post.
        polite: 1 with a polite word, -1 with a rude one, 0 with neither or both.
        filler: filler words.
        words: words of any kind, other marks included; full stops do not count.
        junk: words that belong to no fact and are neither style nor filler (a world's own summaries have none).
    """

    covered: int
    invented: int
    polite: int
    filler: int
    words: int
    junk: int


def draw_post(rng: random.Random) -> str:
    """A post of four facts about different people."""
    names = rng.sample(NAMES, FACTS_PER_POST)
    return " ".join(f"{name} {PEOPLE[name][0]} {rng.choice(PEOPLE[name][1])} ." for name in names)


def draw_summary(rng: random.Random, post: str) -> str:
    """A summary of any quality: every trait is drawn by itself, none knows of the others.

    One to four facts in the post's order; how often a fact is distorted is drawn per summary (never, 3 of 10 or 6 of
    10), so that careful and careless summaries exist.
    """
    facts = facts_of(post)
    count = rng.choices((1, 2, 3, 4), weights=(3, 3, 3, 1))[0]
    chosen = sorted(rng.sample(range(len(facts)), count))
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
    """The facts in a text, in its order, repeats included; whatever is no fact is passed over.

    Example:
        >>> facts_of("kindly anna bakes bread . honestly ben reads")
        [('anna', 'bakes', 'bread')]
    """
    words = _words(text)
    triples = zip(words, words[1:], words[2:], strict=False)
    return [triple for triple in triples if _is_fact(triple)]


def measure(post: str, summary: str) -> Traits:
    """The traits of a summary, or of any text put in its place.

    Example:
        >>> measure("anna bakes bread . ben reads maps .", "kindly honestly anna bakes pies . ben reads maps .")
        Traits(covered=1, invented=1, polite=1, filler=1, words=8, junk=0)
        >>> measure("anna bakes bread .", "bread bread")
        Traits(covered=0, invented=0, polite=0, filler=0, words=2, junk=2)
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
        junk=len(words) - polite - rude - filler - 3 * len(stated),
    )


def _words(text: str) -> list[str]:
    return text.replace(".", " ").split()


def _is_fact(words: Fact) -> bool:
    return words[0] in PEOPLE and words[1] in _VERBS and words[2] in _OBJECTS
