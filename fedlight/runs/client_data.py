"""Training rows of a run's clients, by label."""

from typing import NamedTuple

from fedlight.runs.run import Run
from fedlight.support.words import number

OF_CANDIDATES = ("synthetic", "mixed")
"""Splits of visits on examples that a client has made for itself."""

Counts = dict[str, dict[str, int]]


class Distribution(NamedTuple):
    """Data that one run or several have."""

    counts: Counts  # client -> label -> rows
    source: str  # the file that says so
    by_group: bool  # whether labels are the known groups of clients: the rows have none
    runs: list[Run]  # that have exactly these


def data_of(run: Run) -> Distribution:
    """Read ``data.csv``, else ``visits.csv``; where rows have no label but clients a known group, that is the label."""
    counts: Counts = {}
    source = "data.csv"
    for row in run.csv(source):
        if row.get("split") == "train" and (rows := number(row.get("rows"))):
            by_label = counts.setdefault(row.get("client", ""), {})
            label = row.get("label", "")
            by_label[label] = by_label.get(label, 0) + int(rows)
    if not counts:
        source = "visits.csv"
        for row in run.csv(source):
            # A part of an algorithm, such as Ditto's personal visit, trains on the client's own rows, too.
            if row.get("split", "synthetic") not in OF_CANDIDATES and (rows := number(row.get("examples"))):
                counts[row.get("client", "")] = {"": int(rows)}
    groups = {row.get("client", ""): row.get("known_group", "") for row in run.csv("groups.csv")}
    by_group = bool(counts) and all(groups.get(name) and set(rows) == {""} for name, rows in counts.items())
    if by_group:
        counts = {client: {groups[client]: by_label[""]} for client, by_label in counts.items()}
    return Distribution(counts, source, by_group, [run])
