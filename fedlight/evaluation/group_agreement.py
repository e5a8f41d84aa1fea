"""Agreement of found groups of clients with known ones. Partitions are compared: the groups' names have no meaning."""

from collections.abc import Hashable, Mapping

import numpy as np


def adjusted_rand_index(grouping: Mapping[str, Hashable], known: Mapping[str, Hashable]) -> float:
    """Return the agreement of two groupings on the pairs of clients that belong together, corrected for chance.

    Hubert and Arabie, "Comparing Partitions", Journal of Classification 2, 1985, eq. 5.

    Args:
        grouping: client -> its group.
        known: client -> its true group; clients that are missing from one of the two are left out.

    Returns:
        1 for equal partitions, about 0 for chance, below 0 for less; 1 where both have one group, or one per client.

    Raises:
        ValueError: no client is in both.
    """
    table = _contingency(grouping, known)
    together = _pairs(table).sum()
    in_found, in_known = _pairs(table.sum(axis=1)).sum(), _pairs(table.sum(axis=0)).sum()
    # Expected for random groups of the same sizes; a single client has no pair.
    by_chance = in_found * in_known / max(_pairs(table.sum()), 1)
    most = (in_found + in_known) / 2
    # Equal where both have one group, or one for each client: then they agree.
    return float((together - by_chance) / (most - by_chance)) if most != by_chance else 1.0


def share_with_their_group(grouping: Mapping[str, Hashable], known: Mapping[str, Hashable]) -> float:
    """Return the share of clients in their known group, in (0, 1], under the best one-to-one matching of groups.

    Arguments and errors are those of `adjusted_rand_index`.
    """
    from scipy.optimize import linear_sum_assignment

    table = _contingency(grouping, known)
    return float(table[linear_sum_assignment(table, maximize=True)].sum() / table.sum())


def group_metrics(
    groups: Mapping[str, int], before: Mapping[str, int], known: Mapping[str, str]
) -> dict[str, float]:
    """Return the metrics of a grouping by the names under which they are logged.

    Args:
        groups: client id -> its selector.
        before: client id -> its selector at the last grouping; empty at the first.
        known: client id -> its known group; may lack clients.

    Examples:
        >>> group_metrics({"a": 0, "b": 1, "c": 1, "d": 0}, {"a": 0, "b": 1, "c": 0, "d": 0}, {})
        {'fed/groups_moved': 0.25}
    """
    metrics = {}
    if before:
        metrics["fed/groups_moved"] = sum(before.get(c) != group for c, group in groups.items()) / len(groups)
    if set(groups) & set(known):
        metrics["fed/group_ari"] = adjusted_rand_index(groups, known)
        metrics["fed/groups_found"] = share_with_their_group(groups, known)
    return metrics


def _contingency(grouping: Mapping[str, Hashable], known: Mapping[str, Hashable]) -> np.ndarray:
    """Return the number of clients in each found and each known group, ``(found groups, known groups)``."""
    clients = [client for client in grouping if client in known]
    if not clients:
        raise ValueError("no client has both a found and a known group")
    rows, columns = (
        {group: index for index, group in enumerate(dict.fromkeys(groups[client] for client in clients))}
        for groups in (grouping, known)
    )
    table = np.zeros((len(rows), len(columns)), dtype=np.int64)
    for client in clients:
        table[rows[grouping[client]], columns[known[client]]] += 1
    return table


def _pairs(counts: np.ndarray) -> np.ndarray:
    return counts * (counts - 1) // 2
