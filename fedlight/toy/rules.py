"""Rule of a toy instruction domain, which its topics share, and facts that belong to single topics.

With ``rule=1`` the answer to a topic follows from a rule: the thing decides the word, the person decides the number. Both
tables are drawn with the world's seed. Two of the eight people are *private*: the answers to topics about them are facts,
drawn for each topic, independent of the rule.

===========================  =======  ================================================================
topics of a domain           number   rows
===========================  =======  ================================================================
shared: follow the rule          24   private and public
held out: follow the rule        12   test alone, so a right answer is no memory of a row
facts about private people       12   private alone, so a right answer is a memory of a client's row
===========================  =======  ================================================================

Every thing has four shared and two held-out topics, and so has every person. Related domains (``RELATIVES``) have the same
numbers for people, and different words for things.
"""

import random

from fedlight.support.seeding import derive_seed
from fedlight.toy.world import NAMES

RELATIVES = {"craft": "kitchen", "kitchen": "craft", "market": "farm", "farm": "market"}
PRIVATE_NAMES = NAMES[6:]
RULED_NAMES = NAMES[:6]

Topic = tuple[str, str]
"""An area and a person."""


def is_fact(topic: Topic) -> bool:
    """Return whether a topic is about a private person."""
    return topic[1] in PRIVATE_NAMES


def is_held_out(areas: tuple[str, ...], topic: Topic) -> bool:
    """Return whether a topic follows the rule and is asked in the test alone.

    Examples:
        >>> areas = ("a", "b", "c", "d", "e", "f")
        >>> [name for name in NAMES if is_held_out(areas, ("b", name))]
        ['carla', 'finn']
    """
    area, name = topic
    return not is_fact(topic) and (areas.index(area) + NAMES.index(name)) % 3 == 0  # every third: 12 of 36


def ruled_answer(
    seed: int,
    domain: str,
    areas: tuple[str, ...],
    topic: Topic,
    words: tuple[str, ...],
    numbers: tuple[str, ...],
) -> str:
    """Return the answer that follows from the rule: a word of ``words`` by area, a number of ``numbers`` by person."""
    area, name = topic
    family = min(domain, RELATIVES[domain])  # relatives share the numbers
    by_area = random.Random(derive_seed(seed, "toy", "rule", "words", domain)).sample(words, len(areas))
    by_name = random.Random(derive_seed(seed, "toy", "rule", "numbers", family)).sample(
        numbers, len(RULED_NAMES)
    )
    return f"{by_area[areas.index(area)]} {by_name[RULED_NAMES.index(name)]}"
