"""Map of opinions: the people of a conversation by their votes, Polis' own groups, and the selectors that clients found."""

from collections.abc import Sequence

import numpy as np

from fedlight.report.figures.retrieval_map import draw_groups_of_points
from fedlight.report.figures.style import COLORS
from fedlight.report.parts import Chart, Section, slug
from fedlight.runs.run import Run
from fedlight.support.words import number

PEOPLE = "people.csv"
"""What the stage that makes the pairs writes: person, group, votes, x, y."""
MOST = 5
"""Methods whose selectors are drawn."""
OTHERS = "no client"


def section(runs: Sequence[Run]) -> Section | None:
    """Return a map for the first seed of each recipe that has written where people stand; None without any."""
    charts: list[Chart] = []
    notes: list[str] = []
    # Reversed: the first seed stays.
    for run in {run.home: run for run in reversed(runs) if run.csv(PEOPLE)}.values():
        beside = [other for other in runs if other.folder.parent == run.folder.parent]
        chart, left = _chart(run, beside)
        charts.append(chart)
        if left:
            notes.append(f"{run.label}: methods with groups that are not on the map: {left:,}.")
    if not charts:
        return None
    intro = "Who votes alike lies close together. A method that groups clients should give neighbours one selector."
    return Section("opinions", "Map of opinions", intro, list(charts), tuple(notes))


def _chart(run: Run, beside: Sequence[Run]) -> tuple[Chart, int]:
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
    shown = dict(list(of_methods.items())[:MOST])
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
