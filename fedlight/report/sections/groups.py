"""Groups over the rounds: selector of each client, clients that change, agreement with known groups.

And the map of opinions: people of a conversation by their votes, Polis' own groups, and the selectors that clients chose.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedlight.evaluation.agreement import group_metrics
from fedlight.report.figures.lines import line_chart, over_seeds
from fedlight.report.figures.plots import draw_groups, groups_of
from fedlight.report.figures.retrieval_map import draw_groups_of_points
from fedlight.report.figures.style import COLORS, Looks, method_looks
from fedlight.report.parts import Chart, Part, Section, Table, capitalized, slug, table_of
from fedlight.report.sections.curves import Curve, by_metric
from fedlight.runs.run import Run
from fedlight.support.words import number

MOST = 4
"""Runs whose clients are drawn one by one."""
SAID = {"fed/groups_moved": "clients that changed their selector", "fed/group_ari": "adjusted Rand index"}
COUNTS = ("round", "selector")
"""Columns that have to be numbers."""
Table_ = Mapping[str, Sequence[Any]]
PEOPLE = "people.csv"
"""What the stage that makes the pairs writes: person, group, votes, x, y."""
MOST_METHODS = 5
"""Methods whose selectors are drawn."""
OTHERS = "no client"


def section(runs: Sequence[Run]) -> Section | None:
    """Return a map of the clients of each run, and how groups change; None without groups."""
    tables = {}
    for run in runs:
        rows = [row for row in run.csv("groups.csv") if None not in map(number, map(row.get, COUNTS))]
        if rows:
            tables[run] = groups_of(rows)
    if not tables:
        return None
    changes = {run: changes_of(table) for run, table in tables.items()}
    first: dict[str, Run] = {}  # of each method the first seed whose selectors can be told apart
    for run, table in tables.items():
        if most_selector(table) < len(COLORS):
            first.setdefault(run.method, run)
    drawn = list(first.values())[:MOST]
    metrics, known = by_metric((run.method, curves) for run, curves in changes.items()), method_looks(runs)
    parts: list[Part] = [_map(run.label, tables[run]) for run in drawn]
    parts += [_change_chart(metric, metrics[metric], known) for metric in SAID if metric in metrics]
    parts.append(_table(tables, changes))
    left = len(tables) - len(drawn)
    intro = "Which selector each client trains after each grouping."
    if left:
        intro += f" Maps of {left:,} more runs, of other seeds or methods, are left out."
    return Section("groups", "Groups of clients", intro, parts)


def most_selector(table: Table_) -> int:
    """Return the largest number of a selector."""
    return max(selector for selectors in table["selector"] for selector in selectors if selector is not None)


def changes_of(table: Table_) -> dict[str, Curve]:
    """Return the group log's metrics of each grouping: metric -> round -> value.

    Examples:
        >>> table = {"round": [0, 5], "client": ["a", "b"], "known_group": ["x", "x"], "selector": [[0, 0], [0, 1]]}
        >>> changes_of(table)["fed/groups_moved"]
        {5.0: 0.5}
    """
    known = {
        client: group for client, group in zip(table["client"], table["known_group"], strict=True) if group
    }
    changes: dict[str, Curve] = {}
    before: dict[str, int] = {}
    for round_idx, selectors in zip(table["round"], zip(*table["selector"], strict=True), strict=True):
        groups = {c: each for c, each in zip(table["client"], selectors, strict=True) if each is not None}
        for metric, value in group_metrics(groups, before, known).items():
            changes.setdefault(metric, {})[float(round_idx)] = value
        before = groups
    return changes


def _map(label: str, table: Table_) -> Chart:
    return Chart(
        f"groups_{slug(label)}",
        f"Selector of each client: {label}",
        "A line for each client, sorted by known group where there is one, a column for each grouping.",
        draw_groups(table),
        [
            {"client": client, "known_group": group, "round": round_idx, "selector": selector}
            for client, group, selectors in zip(
                table["client"], table["known_group"], table["selector"], strict=True
            )
            for round_idx, selector in zip(table["round"], selectors, strict=True)
        ],
    )


def _change_chart(metric: str, of_methods: Mapping[str, Sequence[Curve]], known: Looks) -> Chart:
    lines = {method: over_seeds(seeds) for method, seeds in of_methods.items()}
    is_share = metric != "fed/group_ari"
    meaning = "Share of all clients, " if is_share else "1: the known groups; 0: as good as chance; "
    lowest = min(0.0, *(float(line.low.min()) for line in lines.values()))
    name, title = "share of clients" if is_share else SAID[metric], capitalized(SAID[metric])
    x, caption = "communication round, counted from 0", f"{meaning}at each grouping."
    chart = line_chart(slug(metric), title, caption, lines, known, x, name, lowest=lowest - 0.02)
    chart.figure.axes[0].set_ylim(top=1.02)
    return chart


def _table(tables: Mapping[Run, Table_], changes: Mapping[Run, Mapping[str, Curve]]) -> Table:
    lines = []
    for run, table in tables.items():
        sizes = Counter(selectors[-1] for selectors in table["selector"] if selectors[-1] is not None)
        last = [changes[run].get(metric, {}).get(float(table["round"][-1])) for metric in SAID]
        changed, index = ("-" if value is None else f"{value:.2f}" for value in last)
        lines.append(
            {
                "run": run.label,
                "clients": f"{len(table['client']):,}",
                "groupings": f"{len(table['round']):,}",
                "clients of each selector": " / ".join(
                    str(sizes[at]) for at in range(most_selector(table) + 1)
                ),
                "changed": changed,
                "adjusted Rand index": index,
            }
        )
    return table_of("The last grouping", lines, "Changed: share of clients that changed their selector.")


def opinions_section(runs: Sequence[Run]) -> Section | None:
    """Return a map for the first seed of each recipe that has written where people stand; None without any."""
    charts: list[Chart] = []
    notes: list[str] = []
    # Reversed: the first seed stays.
    for run in {run.home: run for run in reversed(runs) if run.csv(PEOPLE)}.values():
        beside = [other for other in runs if other.folder.parent == run.folder.parent]
        chart, left = _people_chart(run, beside)
        charts.append(chart)
        if left:
            notes.append(f"{run.label}: methods with groups that are not on the map: {left:,}.")
    if not charts:
        return None
    intro = "Who votes alike lies close together. A method that groups clients should give neighbours one selector."
    return Section("opinions", "Map of opinions", intro, list(charts), tuple(notes))


def _people_chart(run: Run, beside: Sequence[Run]) -> tuple[Chart, int]:
    people = {
        row.get("person", ""): (row.get("group", ""), (x, y))
        for row in run.csv(PEOPLE)
        if (x := number(row.get("x"))) is not None and (y := number(row.get("y"))) is not None
    }
    place = {person: at for person, (_, at) in people.items()}
    of_methods: dict[str, dict[str, str]] = {}
    for other in beside:
        selectors = {
            row["client"]: f"selector {row['selector']}"
            for row in other.csv("clients.csv")
            if row.get("selector") and row.get("client") in place
        }
        if len({*selectors.values()}) > 1:  # one selector for all is no grouping
            of_methods[other.method] = selectors
    shown = dict(list(of_methods.items())[:MOST_METHODS])
    known = {person: f"group {group}" for person, (group, _) in people.items() if group}
    panels = {"Polis' own groups": known} if known else {}
    panels |= shown
    # Too many to tell apart.
    if len({name for named in panels.values() for name in named.values()}) > len(COLORS):
        panels = {title: dict.fromkeys(named, "in a group") for title, named in panels.items()}
    if not panels:
        panels = {"all people": dict.fromkeys(place, "person")}
    groups = {
        title: {
            name: np.array([place[person] for person, label in named.items() if label == name])
            for name in sorted({*named.values()})
        }
        for title, named in panels.items()
    }
    rows = [
        {"person": person, "x": at[0], "y": at[1]}
        | {title: named.get(person, "") for title, named in panels.items()}
        for person, at in place.items()
    ]
    ground = np.array([*place.values()]).reshape(-1, 2)
    return Chart(
        f"opinions_{slug(run.label)}",
        "People by their votes",
        f"The two directions in which the votes of {len(place):,} people differ most (principal components; a missing vote "
        "counts as the mean of its statement). Grey: people who are no clients of the method, or in no group.",
        draw_groups_of_points(ground, groups, OTHERS),
        rows,
        draw_groups_of_points(ground, groups, OTHERS, across=2) if len(groups) > 1 else None,
    ), len(of_methods) - len(shown)
