"""The rows of the embedded world, in the shape of real vote data. All of it is a function of the options."""

import random
from typing import NamedTuple

from fedlight.support.seeding import derive_seed
from fedlight.toy.clients import cast, population
from fedlight.toy.options import read_options
from fedlight.toy.world import draw_post

NAMES_OF_ROWS = ("votes", "heldout", "prompts", "eval_prompts")


class WorldOptions(NamedTuple):
    """What can be chosen about a world.

    Attributes:
        seed: of everything in it; the language model stays the same.
        num_clients: how many people vote.
        votes_per_client: the median number of training votes of a client.
        opposition: 0 for one common taste, 1 for groups that contradict each other.
        noise: scale of the logistic noise in a vote's utility difference.
        size: rows of ``heldout`` (spread evenly over the clients), ``prompts`` or ``eval_prompts``; votes have their own.
    """

    seed: int = 0
    num_clients: int = 40
    votes_per_client: float = 120.0
    opposition: float = 0.2
    noise: float = 0.8
    size: int = 1000

    @classmethod
    def parse(cls, **options: float | str) -> "WorldOptions":
        """Options by name, as numbers or as their text.

        Raises:
            ValueError: an unknown option, one that is no number, or one out of range.

        Example:
            >>> WorldOptions.parse(seed="3", opposition="0.5").opposition
            0.5
        """
        world = read_options(cls, dict(options))
        if world.num_clients < 1 or world.size < 1:
            raise ValueError(
                f"toy options num_clients={world.num_clients} and size={world.size} must be 1 or more"
            )
        if not 0 <= world.opposition <= 1:
            raise ValueError(f"toy option opposition={world.opposition} must lie between 0 and 1")
        if world.noise < 0 or world.votes_per_client <= 0:
            raise ValueError(
                f"toy options noise={world.noise} and votes_per_client={world.votes_per_client} must be positive"
            )
        return world


def rows(name: str, **options: float | str) -> list[dict[str, str]]:
    """Rows of the embedded world.

    Args:
        name: ``"votes"`` (the clients' private training votes), ``"heldout"`` (the same columns, fresh posts and votes
            of the same clients), ``"prompts"`` (unlabelled posts of the server), ``"eval_prompts"`` (others).
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
    voters = population(world.seed, world.num_clients, world.votes_per_client, world.opposition)
    if name == "votes":
        turns = [voter for voter in voters for _ in range(voter.num_votes)]
    else:
        turns = [voters[index % len(voters)] for index in range(world.size)]
    return [cast(rng, voter, _draw_own_post(rng, name), world.noise) for voter in turns]


def _draw_own_post(rng: random.Random, name: str) -> str:
    """A post of these rows; every possible post belongs to one of the four sets, whatever the seed, so none is shared."""
    while True:
        post = draw_post(rng)
        if NAMES_OF_ROWS[derive_seed("toy", "post", post) % len(NAMES_OF_ROWS)] == name:
            return post
