"""Toy instruction domains: questions about facts that a model can only answer after seeing them.

Each of the four domains has six things, its *areas*; a *topic* is a thing and a person, 48 in a domain. Every topic's
answer, a word and a number, is drawn with the world's seed, so only training teaches it; with ``rule=1`` most answers follow
from a rule that the topics share, see `fedlight.toy.rules`. The wording of a question (order of
words, padding, an unrelated fact before the topic) varies from row to row. No text of one split is in another, so a fact
is learned in some wordings and asked in others. Beside the domains there is chatter, whose answer is in the row itself.

=============  =========================================================================================================
split          rows
=============  =========================================================================================================
``private``    of one domain, with their ``client``. Popular areas have many clients: a client has two home areas, knows
               three people there, and has many rows of some topics and few of others. Half of the topics have no client.
``public``     every topic of every domain equally often, and chatter
``test``       every topic of one domain equally often
``domain``     the private and the public rows of one domain: all texts to cover
=============  =========================================================================================================

A client's score on the test rows therefore depends on the topics that it has seen beside its own. With ``rule=1`` private
rows are about shared topics and facts, public ones about shared topics, and the test asks the held-out topics. A client then
has rows on seven shared topics and two facts, in two areas; every area has a client. With ``written=6`` a client has six
further rows that ask for another question and have one for an answer, as instruction datasets do (``topic`` is ``writing``).
"""

import random
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from itertools import chain
from typing import NamedTuple

from fedlight.support.seeding import derive_seed
from fedlight.toy.rules import Topic, is_fact, is_held_out, ruled_answer
from fedlight.toy.world import FILLERS, NAMES, PEOPLE, POLITE, RUDE, draw_post, read_options

SPLITS = ("private", "public", "test")
CHATTER = "chatter"
WRITING = "writing"  # topic of a row whose answer is a question
SHOWN_QUESTIONS = 2  # of a client, in such a row: more would not fit into the 64 tokens of the recipes
TEMPLATE = "POST : {instruction} {input}\nCHOICE :"
"""Prompt of the tiny model, which knows few words, and none of Alpaca's template."""


class Domain(NamedTuple):
    """Domain of questions."""

    areas: tuple[str, ...]  # its six things
    words: tuple[str, str]  # two words of its questions that other domains' questions do not have


DOMAINS = {
    name: Domain(PEOPLE[first][1] + PEOPLE[second][1], words)
    for name, first, second, words in (
        ("craft", "anna", "dan", ("longer", "fixes")),
        ("kitchen", "ben", "carla", ("covers", "more")),
        ("market", "eva", "finn", ("sells", "sounds")),
        ("farm", "gina", "hugo", ("keeps", "names")),
    )
}
QUESTIONS = ("which {0} {1} ?", "which is {0} {1} ?", "{0} {1} which ?", "is {0} {1} ?")
PADDING = POLITE + FILLERS + RUDE
JUDGEMENTS = ("rude", "plain", "kind", "right", "wrong", "silent")
NUMBERS = tuple(map(str, range(18)))

MOST_ROWS = 500  # of a topic: there are few more wordings
HOME_AREAS, HOME_NAMES = 2, 3
RULED_TOPICS, FACT_TOPICS = 7, 2  # of a client, with rule=1
KNOWN_NAMES = NAMES[:5]  # the people that clients may know; the others are in no private row

ToyRow = dict[str, str]


class InstructionOptions(NamedTuple):
    """Options of the toy instructions."""

    seed: int = 0  # of the facts, the clients and all rows
    split: str = "private"  # ``private``, ``public``, ``test`` or ``domain``
    # a name of `DOMAINS`, or ``all`` for the rows of one domain after the other; public rows are always of all
    domain: str = "kitchen"
    num_clients: int = 10  # number of clients with private rows
    client_rows: int = 100  # number of private rows of each
    topic_rows: int = 16  # number of rows of each topic in ``public`` and in ``test``
    chatter: int = 1000  # number of rows of chatter in ``public``
    joined: int = 0  # 1: the whole question is in ``instruction``, and ``input`` is empty; 0: in both
    # 1: ``test`` has as many rows of a topic as the clients, whatever ``topic_rows`` is; 0: equally many of all
    held: int = 0
    # 1: answers follow from a rule, but for private facts, see `fedlight.toy.rules`; 0: all answers are facts
    rule: int = 0
    # number of further private rows of each client whose answer is a question; see `writing_request`
    written: int = 0

    @classmethod
    def parse(cls, **options: int | str) -> "InstructionOptions":
        """Return options given by name, as numbers or as their text; raise ValueError for an unknown or wrong one."""
        chosen = read_options(
            cls,
            options,
            split=(*SPLITS, "domain"),
            domain=(*DOMAINS, "all"),
            num_clients=(1, 10_000),
            client_rows=(1, MOST_ROWS),
            topic_rows=(1, MOST_ROWS),
            chatter=(0, 10_000),
            joined=(0, 1),
            held=(0, 1),
            rule=(0, 1),
            written=(0, MOST_ROWS),
        )
        if chosen.written and chosen.split != "private":
            raise ValueError(
                f"toy option written={chosen.written} goes with split=private, not with split={chosen.split}"
            )
        if chosen.held and chosen.split != "test":
            raise ValueError(f"toy option held=1 goes with split=test, not with split={chosen.split}")
        return chosen


def instructions(**options: int | str) -> list[ToyRow]:
    """Return rows of the toy domains, a function of `InstructionOptions` by name.

    Returns:
        Rows with ``instruction``, ``input``, ``output``, ``domain`` and ``topic``; private ones also with ``client``.

    Raises:
        ValueError: an unknown option, or a value out of range.
    """
    return _rows(InstructionOptions.parse(**options))


def _rows(chosen: InstructionOptions) -> list[ToyRow]:
    if chosen.joined:
        apart = _rows(chosen._replace(joined=0))
        return [
            {**row, "instruction": f"{row['instruction']} {row['input']}".strip(), "input": ""}
            for row in apart
        ]
    if chosen.domain == "all" and chosen.split != "public":
        return [row for domain in DOMAINS for row in _rows(chosen._replace(domain=domain))]
    if chosen.split == "domain":
        private, public = (_rows(chosen._replace(split=split)) for split in ("private", "public"))
        return [
            {name: text for name, text in row.items() if name != "client"}
            for row in (*private, *public)
            if row["domain"] == chosen.domain
        ]
    if chosen.split == "private":
        return _draw_private(chosen)
    if chosen.held:
        return _draw_held(chosen)
    rng = _rng(chosen.seed, chosen.split)
    asked = DOMAINS if chosen.split == "public" else (chosen.domain,)
    rows = [
        row
        for domain in asked
        for topic in topics_of_split(chosen.split, domain, chosen.rule)
        for row in draw_questions(
            chosen.split, chosen.topic_rows, rng, chosen.seed, domain, topic, chosen.rule
        )
    ]
    if chosen.split == "public":
        rows += draw_rows("public", chosen.chatter, lambda: small_talk(rng))
        rng.shuffle(rows)  # else chatter would come last
    return rows


def _draw_held(chosen: InstructionOptions) -> list[ToyRow]:
    rng = _rng(chosen.seed, "held", chosen.domain)
    counts = Counter(row["topic"] for row in _draw_private(chosen))
    drawn = (
        draw_questions("test", counts[" ".join(topic)], rng, chosen.seed, chosen.domain, topic, chosen.rule)
        for topic in topics(chosen.domain)
    )
    return [*chain.from_iterable(drawn)]


def topics(domain: str) -> list[Topic]:
    """Return all 48 topics of a domain, such as ``('towers', 'anna')``."""
    return [(area, name) for area in DOMAINS[domain].areas for name in NAMES]


def topics_of_split(split: str, domain: str, rule: int = 0) -> list[Topic]:
    """Return the topics that rows of a split may be about; without a rule, all of the domain."""
    known, areas = topics(domain), DOMAINS[domain].areas
    if not rule:
        return known
    asked = split == "test"
    return [
        topic
        for topic in known
        if (split == "private" or not is_fact(topic)) and is_held_out(areas, topic) == asked
    ]


def answer(seed: int, domain: str, topic: Topic, rule: int = 0) -> str:
    """Return the right answer, two words; equal arguments give equal answers."""
    if rule and not is_fact(topic):
        return ruled_answer(seed, domain, DOMAINS[domain].areas, topic, JUDGEMENTS, NUMBERS)
    rng = random.Random(derive_seed(seed, "toy", "fact", domain, *topic))
    return f"{rng.choice(JUDGEMENTS)} {rng.choice(NUMBERS)}"


def question(rng: random.Random, seed: int, domain: str, topic: Topic, rule: int = 0) -> ToyRow:
    """Return a question about a topic in some wording, with its answer."""
    area, name = topic
    before = ""
    if rng.random() < 0.3:  # an unrelated fact
        other = rng.choice(NAMES)
        verb, things = PEOPLE[other]
        before = f"{other} {verb} {rng.choice(things)} . "
    return {
        "instruction": _pad(rng, rng.choice(QUESTIONS).format(*DOMAINS[domain].words)),
        "input": f"{before}{name} {area}",
        "output": answer(seed, domain, topic, rule),
        "domain": domain,
        "topic": f"{area} {name}",
    }


def small_talk(rng: random.Random) -> ToyRow:
    """Return a row of chatter: two facts of a post; the first is to be repeated."""
    first, second = draw_post(rng).split(" .")[:2]
    asked = _pad(rng, rng.choice(("YOUR SUMMARY ?", "which POST SUMMARY ?")))
    texts = {"instruction": asked, "input": f"{first} .{second} .", "output": first}
    return {**texts, "domain": CHATTER, "topic": CHATTER}


def _draw_private(chosen: InstructionOptions) -> list[ToyRow]:
    rng = _rng(chosen.seed, "private", chosen.domain)
    areas = rng.sample(DOMAINS[chosen.domain].areas, 6)  # the first ones are popular
    popularity = [1 / (rank + 1) ** 1.5 for rank in range(6)]  # some areas have many clients
    width = len(str(chosen.num_clients - 1))
    rows = []
    for index in range(chosen.num_clients):
        if chosen.rule:
            known = _draw_ruled(rng, chosen.domain, areas[index % len(areas)])
        else:
            known = _draw_known(rng, set(rng.choices(areas, popularity, k=HOME_AREAS)))
        rng.shuffle(known)
        shares = [1 / (rank + 1) for rank in range(len(known))]  # many rows of some topics, few of others
        counts = Counter(rng.choices(known, shares, k=chosen.client_rows))
        client_rows: list[ToyRow] = []
        for topic, count in counts.items():
            client_rows += draw_questions(
                "private", count, rng, chosen.seed, chosen.domain, topic, chosen.rule
            )
        client_rows += _draw_written(chosen, index, client_rows)
        rows += [{**row, "client": f"c{index:0{width}d}"} for row in client_rows]
    return rows


def _draw_written(chosen: InstructionOptions, client: int, client_rows: Sequence[ToyRow]) -> list[ToyRow]:
    """Return rows that show questions of a client and ask for another one, about anybody in the area of one of these."""
    # A separate stream: the other rows stay as they are.
    rng = _rng(chosen.seed, "written", chosen.domain, str(client))
    rows = []
    for _ in range(chosen.written):
        shown = rng.choices(client_rows, k=SHOWN_QUESTIONS)
        topic = (rng.choice(shown)["topic"].split()[0], rng.choice(NAMES))
        (asked,) = draw_questions("private", 1, rng, chosen.seed, chosen.domain, topic)
        request = writing_request([f"{row['instruction']} {row['input']}" for row in shown])
        texts = {"instruction": request, "input": "", "output": f"{asked['instruction']} {asked['input']}"}
        rows.append({**texts, "domain": chosen.domain, "topic": WRITING})
    return rows


def writing_request(shown: Sequence[str]) -> str:
    r"""Return an instruction to write another question after those shown.

    Examples:
        >>> writing_request(["which covers more ? ben pies"])
        'which covers more ? ben pies\nPOST : YOUR POST ?'
    """
    return "\nPOST : ".join([*shown, "YOUR POST ?"])


def _draw_known(rng: random.Random, home: Collection[str]) -> list[Topic]:
    # Sorted: the order of a set of texts differs between processes.
    return [(area, name) for area in sorted(home) for name in rng.sample(KNOWN_NAMES, HOME_NAMES)]


def _draw_ruled(rng: random.Random, domain: str, area: str) -> list[Topic]:
    home = (area, rng.choice([other for other in DOMAINS[domain].areas if other != area]))
    known = [topic for topic in topics_of_split("private", domain, rule=1) if topic[0] in home]
    facts = [topic for topic in known if is_fact(topic)]
    ruled = [topic for topic in known if not is_fact(topic)]
    return rng.sample(ruled, RULED_TOPICS) + rng.sample(facts, FACT_TOPICS)


def draw_rows(split: str, number: int, draw: Callable[[], ToyRow]) -> list[ToyRow]:
    """Return different rows of a split; every text belongs to one split, whatever the seed, so none is shared."""
    rows: dict[tuple[str, str], ToyRow] = {}
    while len(rows) < number:
        row = draw()
        text = (row["instruction"], row["input"])
        if SPLITS[derive_seed("toy", "instruction", *text) % len(SPLITS)] == split:
            rows[text] = row  # equal texts once
    return list(rows.values())


def draw_questions(
    split: str, number: int, rng: random.Random, seed: int, domain: str, topic: Topic, rule: int = 0
) -> list[ToyRow]:
    """Return different questions of a split about a topic, see `draw_rows` and `question`."""
    return draw_rows(split, number, lambda: question(rng, seed, domain, topic, rule))


def _pad(rng: random.Random, text: str) -> str:
    return " ".join([*rng.choices(PADDING, k=rng.choice((0, 1, 2))), text])


def _rng(seed: int, *purpose: str) -> random.Random:
    return random.Random(derive_seed(seed, "toy", "instructions", *purpose))
