"""Groups of visits that are trained side by side, and bundles of groups that belong together; functions of the plan alone.

A group has visits of different clients with equally many batches of the same kind. A bundle has the groups over the same
clients in the order of their visits: a client's second visit may need the result of its first, so a bundle is trained in
one place, and in this order.
"""

from collections.abc import Callable, Hashable, Sequence

from fedlight.federation.client import Group, Visit

Bundle = tuple[Group, ...]
"""Groups that follow each other: the first visits of some clients, then their second visits, and so on."""
Kind = Callable[[Visit], Hashable]
"""Function from a visit to its kind: visits of one kind can be trained side by side; None: only alone."""


def form_bundles(visits: Sequence[Visit], at_once: int, kind: Kind = lambda visit: ()) -> list[Bundle]:
    """Return the bundles of a round, by the first visit of their clients in the plan.

    Args:
        visits: all visits of the round in the order of the plan.
        at_once: most visits in a group, at least 1; with 1 the order of the plan stays.
        kind: see `Kind`.

    Examples:
        >>> visits = [Visit("b", 2), Visit("a", 2), Visit("c", 3), Visit("d", 2)]
        >>> [[[v.client_id for v in group] for group in bundle] for bundle in form_bundles(visits, 2)]
        [[['a', 'b']], [['d']], [['c']]]
    """
    by_client: dict[str, list[Visit]] = {}
    for visit in visits:
        by_client.setdefault(visit.client_id, []).append(visit)
    alike: dict[Hashable, list[str]] = {}
    for name, theirs in by_client.items():
        kinds = [kind(visit) for visit in theirs]
        alone = at_once == 1 or None in kinds
        key = name if alone else tuple((v.num_batches, k) for v, k in zip(theirs, kinds, strict=True))
        alike.setdefault(key, []).append(name)
    bundles: list[Bundle] = []
    for names in alike.values():
        names.sort()  # so that no order of the clients decides who shares a group
        for start in range(0, len(names), at_once):
            own_visits = [by_client[name] for name in names[start : start + at_once]]
            bundles.append(tuple(zip(*own_visits, strict=True)))
    return bundles
