"""The people of the embedded world: who they are, what they like, how they vote.

A client's utility of a summary is linear in its traits, ``u = <taste, traits>``. Its taste lies near its group's, and a
group's lies between a common taste and an opposed one: ``(1 - opposition) * COMMON + opposition * OPPOSED[group]``.
Votes are noisy (Bradley and Terry, Biometrika 1952): with logistic noise e, "a" wins when ``u_a - u_b + e`` is
positive, and a client calls it a tie when that is closer to zero than it can tell.
"""

import math
import random
from typing import Literal, NamedTuple

from fedlight.support.seeding import derive_seed
from fedlight.toy.world import Traits, draw_summary, measure

# weights of Traits: covered, invented, polite, filler, words, junk
COMMON = (1.2, -1.6, 1.2, -0.6, -0.15, -0.8)
OPPOSED = {
    "thorough": (2.2, -2.4, 0.0, 0.0, 0.1, -0.8),
    "warm": (0.6, -0.4, 2.6, 0.6, 0.0, -0.8),
    "terse": (0.6, -1.2, -1.2, -1.8, -0.5, -0.8),
}
GROUPS = tuple(OPPOSED)

PERSONAL_SPREAD = 0.1
TIE_MARGIN = 0.15

Choice = Literal["a", "b", "tie"]


class Voter(NamedTuple):
    """One client of the world.

    Attributes:
        client: its id, ``"c007"``.
        group: the group whose taste it nearly shares; a name of `GROUPS`.
        taste: weights of the six `Traits`.
        num_votes: how many votes it casts in the training rows.
    """

    client: str
    group: str
    taste: tuple[float, ...]
    num_votes: int


def group_taste(group: str, opposition: float) -> tuple[float, ...]:
    """A group's weights of the six traits.

    Args:
        group: a name of `GROUPS`.
        opposition: 0 gives every group the common taste, 1 tastes that contradict each other.

    Example:
        >>> group_taste("warm", 0.0) == COMMON, group_taste("warm", 1.0) == OPPOSED["warm"]
        (True, True)
    """
    return tuple((1 - opposition) * c + opposition * o for c, o in zip(COMMON, OPPOSED[group], strict=True))


def population(seed: int, num_clients: int, votes_per_client: float, opposition: float) -> list[Voter]:
    """The clients of a world: groups of equal size (up to one), shuffled, with unequal numbers of votes.

    Args:
        seed: of the world.
        num_clients: how many.
        votes_per_client: the median number of votes; the numbers are log-normal and 4 at least.
        opposition: how far the groups contradict each other, 0 to 1.
    """
    rng = random.Random(derive_seed(seed, "toy", "population"))
    groups = [GROUPS[index % len(GROUPS)] for index in range(num_clients)]
    rng.shuffle(groups)
    voters = []
    for index, group in enumerate(groups):
        taste = tuple(
            weight * (1 + rng.gauss(0, PERSONAL_SPREAD)) for weight in group_taste(group, opposition)
        )
        num_votes = max(4, round(votes_per_client * math.exp(rng.gauss(0, 0.7))))
        voters.append(Voter(f"c{index:03d}", group, taste, num_votes))
    return voters


def utility(taste: tuple[float, ...], traits: Traits) -> float:
    """How much a client likes a summary with these traits, in units of its votes' noise scale at ``noise=1``.

    Example:
        >>> round(utility(COMMON, Traits(covered=2, invented=0, polite=1, filler=0, words=7, junk=0)), 2)
        2.55
    """
    return sum(weight * value for weight, value in zip(taste, traits, strict=True))


def vote(rng: random.Random, taste: tuple[float, ...], a: Traits, b: Traits, noise: float) -> Choice:
    """A client's noisy choice between two summaries.

    Args:
        rng: the source of the noise.
        taste: the client's.
        a: traits of the summary shown first.
        b: traits of the other.
        noise: scale of the logistic noise, 0 for none.
    """
    uniform = rng.random() or 0.5
    difference = utility(taste, a) - utility(taste, b) + noise * math.log(uniform / (1 - uniform))
    if abs(difference) < TIE_MARGIN:
        return "tie"
    return "a" if difference > 0 else "b"


def cast(rng: random.Random, voter: Voter, post: str, noise: float) -> dict[str, str]:
    """One row of votes: a post, two different summaries in the order in which they were drawn, and the choice."""
    a = draw_summary(rng, post)
    b = draw_summary(rng, post)
    while b == a:
        b = draw_summary(rng, post)
    choice = vote(rng, voter.taste, measure(post, a), measure(post, b), noise)
    columns = {"prompt": post, "response_a": a, "response_b": b, "choice": choice}
    return columns | {"client": voter.client, "group": voter.group}
