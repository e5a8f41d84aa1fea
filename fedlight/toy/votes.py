"""Voters of the embedded world, and their votes on pairs of summaries, in the shape of real vote data.

A client's utility of a summary is linear in its traits, ``u = <taste, traits>``. Its taste lies near its group's, and a
group's lies between a common taste and an opposed one: ``(1 - opposition) * COMMON + opposition * OPPOSED[group]``.
Votes are noisy (Bradley and Terry, Biometrika 1952): with logistic noise e, "a" wins where ``u_a - u_b + e`` is positive. A
client votes for a tie where that is closer to zero than ``TIE_MARGIN``. All rows are functions of the options.
"""

import math
import random
from typing import Literal, NamedTuple

from fedlight.support.seeding import derive_seed
from fedlight.toy.world import Traits, draw_post, draw_summary, measure, read_options

# weights of Traits: covered, invented, polite, filler, words, junk
COMMON = (1.2, -1.6, 1.2, -0.6, -0.15, -0.8)
OPPOSED = {
    "thorough": (2.2, -2.4, 0.0, 0.0, 0.1, -0.8),
    "warm": (0.6, -0.4, 2.6, 0.6, 0.0, -0.8),
    "terse": (0.6, -1.2, -1.2, -1.8, -0.5, -0.8),
}
GROUPS = tuple(OPPOSED)
# Two groups whose votes are mostly noise, and one that votes the other way with certainty. Junk, which only models write, is
# bad to all.
LOUD = {
    "thorough": (0.1, -0.03, 0.13, 0.1, 0.015, -0.3),
    "warm": (0.07, -0.03, 0.17, 0.1, 0.015, -0.3),
    "terse": (-2.0, 0.8, -3.6, -2.4, -0.4, -0.8),
}
TASTES = {"opposed": OPPOSED, "loud": LOUD}

PERSONAL_SPREAD = 0.1
TIE_MARGIN = 0.15

NAMES_OF_ROWS = ("votes", "heldout", "prompts", "eval_prompts")

Choice = Literal["a", "b", "tie"]


class WorldOptions(NamedTuple):
    """Options of a world."""

    seed: int = 0  # of everything but the language model
    num_clients: int = 40  # number of voters
    votes_per_client: float = 120.0  # median number of training votes of a client
    opposition: float = 0.2  # 0 for one common taste, 1 for groups that contradict each other
    noise: float = 0.8  # scale of the logistic noise in a vote's utility difference
    size: int = 1000  # rows of ``heldout`` (spread evenly over the clients), ``prompts`` or ``eval_prompts``
    tastes: str = "opposed"  # a name of `TASTES`, the tastes of the groups at ``opposition=1``
    # relative sizes of the groups in the order of `GROUPS`, whole numbers: ``3-1-1`` has one group of 60 %
    shares: str = "1-1-1"

    @classmethod
    def parse(cls, **options: float | str) -> "WorldOptions":
        """Return options given by name, as numbers or as their text; raise ValueError for an unknown or wrong one."""
        world = read_options(
            cls,
            options,
            num_clients=(1, math.inf),
            size=(1, math.inf),
            opposition=(0, 1),
            noise=(0, math.inf),
            votes_per_client=(0, math.inf),
            tastes=TASTES,
        )
        parts = world.shares.split("-")
        if len(parts) != len(GROUPS) or not all(part.isdecimal() and int(part) for part in parts):
            raise ValueError(
                f"toy option shares={world.shares!r} must be {len(GROUPS)} positive whole numbers with - between them, "
                "such as 3-1-1"
            )
        if not world.votes_per_client:
            raise ValueError("toy option votes_per_client=0 must be positive")
        return world


class Voter(NamedTuple):
    """Client of the world."""

    client: str  # its id, ``"c007"``
    group: str  # group whose taste its own is close to; a name of `GROUPS`
    taste: tuple[float, ...]  # weights of the six `Traits`
    num_votes: int  # number of its votes in the training rows


def group_taste(group: str, opposition: float, tastes: str = "opposed") -> tuple[float, ...]:
    """Return a group's weights of the six traits: the common taste at ``opposition`` 0, the group's own one at 1."""
    taste = TASTES[tastes][group]
    return tuple((1 - opposition) * c + opposition * o for c, o in zip(COMMON, taste, strict=True))


def population(world: WorldOptions) -> list[Voter]:
    """Return the clients of a world: shuffled groups of sizes by ``shares``, with log-normal numbers of votes from 4."""
    rng = random.Random(derive_seed(world.seed, "toy", "population"))
    sizes = map(int, world.shares.split("-"))
    turns = [group for group, size in zip(GROUPS, sizes, strict=True) for _ in range(size)]
    groups = [turns[index % len(turns)] for index in range(world.num_clients)]
    rng.shuffle(groups)  # else a client's number would tell its group
    voters = []
    for index, group in enumerate(groups):
        taste = tuple(
            weight * (1 + rng.gauss(0, PERSONAL_SPREAD))
            for weight in group_taste(group, world.opposition, world.tastes)
        )
        num_votes = max(4, round(world.votes_per_client * math.exp(rng.gauss(0, 0.7))))
        voters.append(Voter(f"c{index:03d}", group, taste, num_votes))
    return voters


def utility(taste: tuple[float, ...], traits: Traits) -> float:
    """Return a client's utility of a summary, in units of its votes' noise scale at ``noise=1``.

    Examples:
        >>> round(utility(COMMON, Traits(covered=2, invented=0, polite=1, filler=0, words=7, junk=0)), 2)
        2.55
    """
    return sum(weight * value for weight, value in zip(taste, traits, strict=True))


def vote(rng: random.Random, taste: tuple[float, ...], a: Traits, b: Traits, noise: float) -> Choice:
    """Return a client's choice between two summaries with logistic noise of scale ``noise``; ``a`` is shown first."""
    uniform = rng.random() or 0.5  # 0 has no logarithm
    difference = utility(taste, a) - utility(taste, b) + noise * math.log(uniform / (1 - uniform))
    if abs(difference) < TIE_MARGIN:
        return "tie"
    return "a" if difference > 0 else "b"


def cast_vote(rng: random.Random, voter: Voter, post: str, noise: float) -> dict[str, str]:
    """Return one row of votes: a post, two different summaries in the order of drawing, and the choice."""
    a = draw_summary(rng, post)
    b = draw_summary(rng, post)
    while b == a:  # equal summaries cannot be compared
        b = draw_summary(rng, post)
    choice = vote(rng, voter.taste, measure(post, a), measure(post, b), noise)
    columns = {"prompt": post, "response_a": a, "response_b": b, "choice": choice}
    return columns | {"client": voter.client, "group": voter.group}


def rows(name: str, **options: float | str) -> list[dict[str, str]]:
    """Return rows of the embedded world.

    Args:
        name: ``"votes"`` (the clients' private training votes), ``"heldout"`` (the same columns, new posts and votes of
            the same clients), ``"prompts"`` (unlabelled posts of the server) or ``"eval_prompts"`` (others).
        options: see `WorldOptions`.

    Returns:
        Votes have ``prompt, response_a, response_b, choice ("a", "b" or "tie"), client, group``; prompts ``prompt``.

    Raises:
        ValueError: an unknown name or option, or a value out of range.
    """
    world = WorldOptions.parse(**options)
    if name not in NAMES_OF_ROWS:
        raise ValueError(f"toy rows {name!r} do not exist: choose from {', '.join(NAMES_OF_ROWS)}")
    rng = random.Random(derive_seed(world.seed, "toy", name))
    if name in ("prompts", "eval_prompts"):
        return [{"prompt": _draw_own_post(rng, name)} for _ in range(world.size)]
    voters = population(world)
    if name == "votes":
        turns = [voter for voter in voters for _ in range(voter.num_votes)]
    else:
        turns = [voters[index % len(voters)] for index in range(world.size)]
    return [cast_vote(rng, voter, _draw_own_post(rng, name), world.noise) for voter in turns]


def _draw_own_post(rng: random.Random, name: str) -> str:
    """Return a post of these rows; every post belongs to one of the four sets, whatever the seed, so none is shared."""
    while True:
        post = draw_post(rng)
        if NAMES_OF_ROWS[derive_seed("toy", "post", post) % len(NAMES_OF_ROWS)] == name:
            return post
