"""Data of the clients: a bubble plot of rows by client (columns) and label (rows), and a table of clients' sizes.

After Figure 3 of FedBiscuit (Wu et al., ICLR 2025, https://arxiv.org/abs/2407.03038) and Figure 4 of FedDCA (Wang et al.,
2024, https://arxiv.org/abs/2409.20135). Areas are in proportion to the number of rows. Only the largest clients and labels
are drawn, the others together: no specks.

And the spread of results over the clients at the end; the curves have it over the rounds.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain, count
from statistics import fmean, median
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fedlight.evaluation.by_client import worst_share_mean
from fedlight.report.figures.plots import STAGES, WORST, common_stages, draw_clients, final
from fedlight.report.figures.style import (
    COLORS,
    HALF_A_PAGE,
    NARROW,
    STYLE,
    Looks,
    add_legend,
    looks_of,
    method_looks,
    new_chart,
)
from fedlight.report.parts import Chart, Part, Section, Table, shortened, table_of
from fedlight.runs.facts import Counts, Distribution, data_of
from fedlight.runs.run import Run

CLIENTS = 40
LABELS = 16
NAMED = 12  # clients whose names have room below the axis
LONGEST = 24  # characters of a label
MOST = 4  # distributions that are drawn; further ones are in the table alone
ON_ONE_CHART = 6


class Bubbles(NamedTuple):
    """Table of the bubbles."""

    clients: list[str]  # the columns; the last is ``other clients`` where there are more
    labels: list[str]  # the rows; the last is ``other labels`` where there are more
    rows: np.ndarray  # of each, ``(labels, clients)``; of the other clients the mean
    other_clients: int  # how many the last column stands for
    other_labels: int  # how many the last row stands for


def bubbles(
    counts: Mapping[str, Mapping[str, float]], clients: int = CLIENTS, labels: int = LABELS
) -> Bubbles:
    """Return at most so many of the largest clients and most frequent labels, clients with the same top label side by side.

    Examples:
        >>> counts = {"a": {"tea": 1, "jam": 5}, "b": {"tea": 3}, "c": {"rice": 1}, "d": {"tea": 2}}
        >>> bubbles(counts, clients=2, labels=1)
        Bubbles(clients=['b', 'a', 'other clients'], labels=['tea', 'other labels'], rows=array([[3. , 1. , 1. ],
               [0. , 5. , 0.5]]), other_clients=2, other_labels=2)
    """
    totals: Counter[str] = Counter()
    for by_label in counts.values():
        totals.update(by_label)
    by_size = sorted(counts, key=lambda client: (-sum(counts[client].values()), client))
    names = sorted(totals, key=lambda label: (-totals[label], label))
    place = {label: min(index, labels) for index, label in enumerate(names)}
    cells = np.zeros((min(len(names), labels + 1), len(by_size)))
    for column, client in enumerate(by_size):
        for label, rows in counts[client].items():
            cells[place[label], column] += rows
    shown, rest = cells[:, :clients], cells[:, clients:]
    # A stable sort: among clients of one label the largest stays first.
    order = np.argsort(shown.argmax(axis=0), kind="stable")
    others = [rest.mean(axis=1)] if rest.size else []
    return Bubbles(
        [*(by_size[index] for index in order), *(["other clients"] if others else [])],
        [*names[:labels], *(["other labels"] if len(names) > labels else [])],
        np.column_stack([shown[:, order], *others]),
        rest.shape[1],
        max(len(names) - labels, 0),
    )


@matplotlib.rc_context(STYLE)
def draw_bubbles(table: Bubbles) -> Figure:
    """Draw the table of `bubbles`; columns and rows that stand for several are grey."""
    tall, wide = table.rows.shape
    figure, axes = new_chart(1.7 + 0.24 * max(tall, 4))
    across, up = 0.75 * HALF_A_PAGE[0] / wide, (figure.get_figheight() - 1.5) / tall
    largest = (0.92 * min(1.6 * across, up, 0.45) * 72) ** 2  # points squared; neighbours may overlap
    most = table.rows.max()
    ys, xs = np.nonzero(table.rows)
    areas = largest * table.rows[ys, xs] / most
    of_rest = ((xs == wide - 1) & bool(table.other_clients)) | ((ys == tall - 1) & bool(table.other_labels))
    for chosen, color in ((~of_rest, COLORS[0]), (of_rest, "0.55")):
        axes.scatter(xs[chosen], ys[chosen], s=areas[chosen], color=color, alpha=0.75, linewidths=0)
    axes.set_xlim(-0.7, wide - 0.3)
    axes.set_ylim(tall - 0.4, -0.6)
    axes.set_yticks(range(tall), [shortened(name, LONGEST) for name in table.labels])
    named = wide <= NAMED
    axes.set_xticks(range(wide), [shortened(name, LONGEST) if named else "" for name in table.clients])
    if named and wide > 6:  # names side by side would touch
        axes.tick_params(axis="x", labelrotation=35)
    axes.tick_params(length=0)
    axes.set_axisbelow(True)
    axes.grid(color="0.9", linewidth=0.6)
    rest = f", at the right the mean of {table.other_clients:,} others" if table.other_clients else ""
    axes.set_xlabel(f"{wide - bool(rest)} clients{rest}")
    style: Any = {"marker": "o", "linestyle": "", "color": COLORS[0], "markeredgewidth": 0, "alpha": 0.75}
    handles = [
        Line2D([], [], markersize=(largest * n / most) ** 0.5, label=f"{n:,} row{'s' * (n != 1)}", **style)
        for n in _steps(most)
    ]
    add_legend(figure, handles)
    return figure


def _steps(most: float) -> list[int]:
    """Return round numbers of rows for the legend, none above the largest bubble.

    Examples:
        >>> _steps(994), _steps(7), _steps(1)
        ([50, 200, 500], [1, 2, 5], [1])
    """
    scale = 10.0 ** np.floor(np.log10(max(most, 1)))
    top = max(step * scale for step in (1, 2, 5) if step * scale <= max(most, 1))
    return sorted({max(1, round(float(f"{top / part:.1g}"))) for part in (1, 2.5, 10)})


def section(runs: Sequence[Run]) -> Section | None:
    """Return bubbles of each distribution, and a table of all; None where no run has two clients."""
    all_data = distributions(runs)
    if not all_data:
        return None
    with_clients = {run.label for data in all_data for run in data.runs}
    named = by_name(all_data, len(with_clients))
    first = all_data[0].runs[0].seed
    of_first_seed = [name for name, data in named.items() if any(run.seed == first for run in data.runs)]
    drawn = {name: named[name] for name in of_first_seed[:MOST]}
    parts: list[Part] = [
        _bubble_chart(number, name, data)
        for number, (name, data) in enumerate(drawn.items())
        if any(label for by_label in data.counts.values() for label in by_label)
    ]
    parts.append(summary(named))
    more = len(all_data) - len(drawn)
    intro = "Who has how many training rows of what; a vote that is read in both orders is two."
    if more:
        intro += f" In the table alone: {more:,} more, of other seeds or methods."
    return Section("client_data", "The clients' data", intro, parts)


def distributions(runs: Sequence[Run]) -> list[Distribution]:
    """Return the clients' data, each distribution once, in the order of the runs.

    Where only visits are known, clients without any are missing, so what fits into another distribution is taken for it.
    """
    all_data: list[Distribution] = []
    for run in runs:
        data = data_of(run)
        if len(data.counts) < 2:
            continue
        for index, other in enumerate(all_data):
            if _fits(data, other):
                other.runs.append(run)
                break
            if _fits(other, data):
                all_data[index] = data._replace(runs=[*other.runs, run])
                break
        else:
            all_data.append(data)
    return all_data


def _fits(data: Distribution, other: Distribution) -> bool:
    """Tell whether ``data`` has nothing that ``other`` does not have."""
    if data.source == "data.csv" or all("" not in by_label for by_label in data.counts.values()):
        return data.counts == other.counts
    sizes = {client: sum(by_label.values()) for client, by_label in other.counts.items()}
    return all(sizes.get(client) == by_label[""] for client, by_label in data.counts.items())


def by_name(all_data: Sequence[Distribution], number_of_runs: int) -> dict[str, Distribution]:
    """Name each distribution by the methods that have it, and by the seed where only that tells them apart."""
    named: dict[str, Distribution] = {}
    for data in all_data:
        methods = list(dict.fromkeys(run.method for run in data.runs))
        seeds = sorted({run.seed for run in data.runs if run.seed is not None})
        name = ", ".join(methods) if len(methods) < 3 else f"{methods[0]} and {len(methods) - 1:,} more"
        if len(data.runs) == number_of_runs and number_of_runs > 1:
            name = "all runs"
        elif len(seeds) == 1 and sum(any(r.method in methods for r in other.runs) for other in all_data) > 1:
            name = f"{name}, seed {seeds[0]}"
        places = chain([name], (f"{name} ({n})" for n in count(2)))
        named[next(each for each in places if each not in named)] = data
    return named


def summary(data: dict[str, Distribution]) -> Table:
    """Return a table of the sizes of each distribution, and of its labels where any has some."""
    labelled = any(label for each in data.values() for by_label in each.counts.values() for label in by_label)
    lines = []
    for name, each in data.items():
        sizes = sorted((sum(by_label.values()) for by_label in each.counts.values()), reverse=True)
        numbers = {"clients": len(sizes), "rows": sum(sizes), "smallest": sizes[-1]}
        numbers |= {"median": round(median(sizes)), "largest": sizes[0]}
        line = {"runs": name, **{column: f"{size:,}" for column, size in numbers.items()}}
        lines.append(line | _labels(each.counts))
    caption = "Training rows of a client."
    more = " Labels a client: the mean number of different labels. Top label: the mean share of a client's rows that have "
    return table_of("Sizes of clients", lines, caption + f"{more}its most frequent label." * labelled)


def _labels(counts: Counts) -> dict[str, str]:
    labels = {label for by_label in counts.values() for label in by_label if label}
    if not labels:
        return {}
    has = fmean(len(by_label) for by_label in counts.values())
    top = fmean(max(by_label.values()) / sum(by_label.values()) for by_label in counts.values())
    return {"labels": f"{len(labels):,}", "labels a client": f"{has:.1f}", "top label": f"{top:.0%}"}


def _bubble_chart(index: int, name: str, data: Distribution) -> Chart:
    named = {c: {label or "no label": n for label, n in rows.items()} for c, rows in data.counts.items()}
    table = bubbles(named)
    clients, labels = len(data.counts), len(table.labels) - bool(table.other_labels) + table.other_labels
    caption = f"Each bubble is one client's training rows of one label; its area is their number ({name})."
    if table.other_clients:
        caption += f" The {len(table.clients) - 1:,} largest of {clients:,} clients; the last column: mean of the rest."
    if table.other_labels:
        shown = f"{len(table.labels) - 1:,} most frequent of {labels:,} labels"
        caption += f" The {shown}; the last line is the others."
    if data.source == "visits.csv":
        caption += " Clients that never took part are missing."
    if data.by_group:
        caption += " A client's label is the group that it is known to belong to."
    return Chart(
        f"client_data_{index}",
        f"Rows by client and label: {name}",
        caption,
        draw_bubbles(table),
        [
            {"client": client, "label": label, "rows": rows}
            for client, by_label in data.counts.items()
            for label, rows in by_label.items()
        ],
    )


def spread_section(runs: Sequence[Run]) -> Section | None:
    """Return clients sorted by accuracy for each method."""
    stages = common_stages(run.csv("clients.csv") for run in runs)
    known = method_looks(runs)
    last: dict[str, list[list[float]]] = {}
    for run in runs:
        if accuracies := final(run.csv("clients.csv"), stages):
            last.setdefault(run.method, []).append(sorted(accuracies.values()))
    if not last:
        return None
    table = {method: _summed_up(of_seeds) for method, of_seeds in last.items()}
    names = list(table)
    parts: list[Part] = []
    for begin in range(0, len(names), ON_ONE_CHART):
        some = {name: table[name] for name in names[begin : begin + ON_ONE_CHART]}
        parts.append(_sorted_chart(some, begin // ON_ONE_CHART, len(names) > ON_ONE_CHART, known))
    note = "Final accuracies are those of validations, as not every run here was tested."
    notes = (note,) if stages != STAGES else ()
    return Section("clients", "Clients", "The mean hides whom a model serves badly.", parts, notes)


def _summed_up(of_seeds: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Average over seeds at each rank; ranks that not all seeds have are left out."""
    clients = min(map(len, of_seeds))  # a seed may have failed to test some
    by_rank = np.mean([accuracies[:clients] for accuracies in of_seeds], axis=0)
    return {
        "accuracy": by_rank.tolist(),
        "mean": float(np.mean([np.mean(accuracies) for accuracies in of_seeds])),
        "worst_tenth": float(np.mean([worst_share_mean(accuracies, WORST) for accuracies in of_seeds])),
        "spread": float(np.mean([np.std(accuracies) for accuracies in of_seeds])),
        "seeds": len(of_seeds),
    }


def _sorted_chart(table: dict[str, dict[str, Any]], place: int, several: bool, known: Looks) -> Chart:
    # Drawn twice, as matplotlib copies no figure.
    figure, narrow = (draw_clients(table, looks_of(table, known)) for _ in range(2))
    narrow.set_size_inches(NARROW)
    narrow.axes[0].set_xlabel("rank of the client")
    rows = [
        {"method": method, "rank": rank, "accuracy": value}
        for method, values in table.items()
        for rank, value in enumerate(values["accuracy"], start=1)
    ]
    title = "Accuracy of each client, worst served first" + (f" ({place + 1})" if several else "")
    spreads = "; ".join(f"{method} {values['spread']:.3f}" for method, values in table.items())
    caption = (
        "A client's accuracy is that of its own selector where it has one. Standard deviation over the "
        f"{max(len(values['accuracy']) for values in table.values()):,} clients: {spreads}."
    )
    if any(values["seeds"] > 1 for values in table.values()):
        caption += " At each rank the mean over seeds."
    return Chart(f"clients_sorted_{place + 1}", title, caption, figure, rows, narrow)
