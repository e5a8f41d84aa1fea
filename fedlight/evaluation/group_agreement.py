"""Agreement of found groups of clients with known ones. Partitions are compared: the groups' names have no meaning."""

from collections.abc import Hashable, Mapping


def adjusted_rand_index(grouping: Mapping[str, Hashable], known: Mapping[str, Hashable]) -> float:
    """Return the agreement of two groupings on the pairs of clients that belong together, corrected for chance.

    Hubert and Arabie, "Comparing Partitions", Journal of Classification 2, 1985, eq. 5. It is 1 for equal partitions, about
    0 for chance, below 0 for less; 1 where both have one group, or one per client. Clients missing from one are left out.

    Raises:
        ValueError: no client is in both.
    """
    from sklearn.metrics import adjusted_rand_score

    clients = [client for client in grouping if client in known]
    if not clients:
        raise ValueError("no client has both a found and a known group")
    labels = ([str(groups[client]) for client in clients] for groups in (known, grouping))
    return float(adjusted_rand_score(*labels))


def group_metrics(
    groups: Mapping[str, int], before: Mapping[str, int], known: Mapping[str, str]
) -> dict[str, float]:
    """Return the metrics of a grouping (client -> selector) by name; ``before`` is the last one, empty at the first.

    ``known`` groups may lack clients.

    Examples:
        >>> group_metrics({"a": 0, "b": 1, "c": 1, "d": 0}, {"a": 0, "b": 1, "c": 0, "d": 0}, {})
        {'fed/groups_moved': 0.25}
    """
    metrics = {}
    if before:
        metrics["fed/groups_moved"] = sum(before.get(c) != group for c, group in groups.items()) / len(groups)
    if set(groups) & set(known):
        metrics["fed/group_ari"] = adjusted_rand_index(groups, known)
    return metrics
