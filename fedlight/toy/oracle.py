"""Oracle of the embedded world: it knows every client's taste, and so the utility of any text, also a generated one."""

from collections.abc import Iterable, Mapping

import numpy as np

from fedlight.support.checks import check_choice
from fedlight.toy.votes import GROUPS, WorldOptions, population, utility
from fedlight.toy.world import Traits, measure

RULES = ("mean", "pooled", "people", "groups")


def margins(differences: np.ndarray, shares: np.ndarray, rule: str, noise: float) -> np.ndarray:
    """Return how far pairs are labelled for their first answer by perfect selectors of several groups.

    ``mean``: the mean utility is higher. ``pooled``: more votes of everybody are for it, by Bradley and Terry's
    probabilities, so groups that are certain count for more; one selector learns it from all votes. ``people``:
    more people prefer it. ``groups``: more groups prefer it, whatever their sizes; it is the majority of one selector for
    each group. The result, ``(pairs,)``, is positive where the first answer is preferred, 0 where neither is.

    ``differences`` are the utility of the first answer minus that of the second for each group, ``(pairs, groups)``,
    ``shares`` those of the people in each group, ``(groups,)``, sum 1, and ``noise`` the scale of the votes' logistic noise.

    Raises:
        ValueError: an unknown rule.

    Examples:
        >>> loud, thirds = np.array([[0.5, 0.5, -4.0]]), np.full(3, 1 / 3)
        >>> [int(np.sign(margins(loud, thirds, rule, noise=1.0))[0]) for rule in RULES]
        [-1, -1, 1, 1]
    """
    check_choice("rule", rule, RULES)
    if rule == "mean":
        weighted = differences @ shares  # [pairs]
    elif rule == "pooled":
        weighted = np.tanh(differences / max(2 * noise, 1e-300)) @ shares  # 2 P(first) - 1
    else:
        equal = np.full(len(shares), 1 / len(shares))
        weighted = np.sign(differences) @ (shares if rule == "people" else equal)
    return np.where(np.abs(weighted) < 1e-9, 0.0, weighted)  # shares do not add up exactly


class Oracle:
    """Utilities under the clients' true tastes, and the accuracy that their noisy votes leave possible.

    Args:
        seed: of the world; the other options must be those of the rows as well.
        options: `WorldOptions` by name (``num_clients``, ``opposition``, ...).

    Attributes:
        shares: group -> its share of the clients; groups without clients are left out.
    """

    def __init__(self, seed: int | str = 0, **options: float | str) -> None:
        world = WorldOptions.parse(seed=seed, **options)
        voters = population(world)
        self._tastes = {voter.client: voter.taste for voter in voters}
        by_group = {group: [voter.taste for voter in voters if voter.group == group] for group in GROUPS}
        self._means = {group: _mean(tastes) for group, tastes in by_group.items() if tastes}
        self.shares = {group: len(tastes) / len(voters) for group, tastes in by_group.items() if tastes}
        self._mean = _mean([voter.taste for voter in voters])
        self._noise = world.noise

    def utility(self, prompt_text: str, response_text: str, group: str | None = None) -> float:
        """Return the utility of a response to a post under the mean taste of a group; None: of all clients.

        Any text has a utility, also a generated one, and words without meaning lower it.

        Raises:
            ValueError: no client belongs to this group.
        """
        if group is not None and group not in self._means:
            raise ValueError(
                f"group={group!r} has no clients: choose one of {sorted(self._means)} or None for all"
            )
        return utility(self._mean if group is None else self._means[group], _read(prompt_text, response_text))

    def margins(
        self, prompts: list[str], first: list[str], second: list[str], rule: str = "mean"
    ) -> np.ndarray:
        """Return how far each pair of responses is labelled for the first one, see `margins`, ``(pairs,)``.

        ``prompts`` are the posts; the rule may also be a group, whose own taste decides.

        Raises:
            ValueError: an unknown rule, or a group without clients.
        """
        groups = [*self.shares] if rule in RULES else [rule]
        check_choice("rule", rule, [*RULES, *self.shares])
        differences = np.array(
            [
                [self.utility(prompt, a, group) - self.utility(prompt, b, group) for group in groups]
                for prompt, a, b in zip(prompts, first, second, strict=True)
            ]
        )
        if rule not in RULES:
            return differences[:, 0]  # of one group
        return margins(differences, np.array([*self.shares.values()]), rule, self._noise)

    def accuracy(self, rows: Iterable[Mapping[str, str]], personal: bool = False) -> float:
        """Return the share of votes, ties left out, that agree with the true utilities; equal ones count one half.

        It is the accuracy that noise leaves possible: with ``personal=False`` for one model of all clients (their mean
        taste), with ``personal=True`` for a model that knows each voter.

        Raises:
            ValueError: no row has a choice.
        """
        hits = [self._hit(row, personal) for row in rows if row["choice"] != "tie"]
        if not hits:
            raise ValueError("rows have no choice but ties: accuracy needs at least one decided vote")
        return sum(hits) / len(hits)

    def _hit(self, row: Mapping[str, str], personal: bool) -> float:
        taste = self._tastes[row["client"]] if personal else self._mean
        a, b = (utility(taste, _read(row["prompt"], row[column])) for column in ("response_a", "response_b"))
        if a == b:
            return 0.5
        return float((a > b) == (row["choice"] == "a"))


def _read(post: str, summary: str) -> Traits:
    traits = measure(post, summary)
    # Without any fact a text is not a brief summary: it is worth less than an invented fact.
    return traits if traits.covered or traits.invented else traits._replace(junk=traits.junk + 3)


def _mean(tastes: list[tuple[float, ...]]) -> tuple[float, ...]:
    return tuple(sum(weights) / len(tastes) for weights in zip(*tastes, strict=True))
