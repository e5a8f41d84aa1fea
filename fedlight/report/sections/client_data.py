"""Data of the clients: rows by client and label, and sizes of clients."""

from collections.abc import Sequence
from statistics import fmean, median

from fedlight.report.figures.bubbles import Bubbles, bubbles, draw_bubbles
from fedlight.report.figures.lines import line_figure, over_seeds, ranked
from fedlight.report.figures.style import Looks, looks_of, method_looks
from fedlight.report.parts import Chart, Part, Section, Table, table_of
from fedlight.runs.client_data import Counts, Distribution, data_of
from fedlight.runs.run import Run

MOST = 4
"""Distributions that are drawn; further ones are in the table alone."""


def section(runs: Sequence[Run]) -> Section | None:
    """Return bubbles and sizes of each distribution, and a table of all; None where no run has two clients."""
    found = distributions(runs)
    if not found:
        return None
    with_clients = {run.label for data in found for run in data.runs}
    named = dict(zip(names_of(found, len(with_clients)), found, strict=True))
    first = found[0].runs[0].seed
    of_first_seed = [name for name, data in named.items() if any(run.seed == first for run in data.runs)]
    drawn = {name: named[name] for name in of_first_seed[:MOST]}
    parts: list[Part] = [
        _bubble_chart(number, name, data)
        for number, (name, data) in enumerate(drawn.items())
        if any(label for own in data.counts.values() for label in own)
    ]
    if any(len(set(_sizes(data.counts))) > 1 for data in drawn.values()):
        parts.append(_size_chart(drawn, method_looks(runs)))
    parts.append(summary(named))
    more = len(found) - len(drawn)
    intro = "Who has how many training rows of what; a vote that is read in both orders is two."
    if more:
        intro += f" In the table alone: {more:,} more, of other seeds or methods."
    return Section("client_data", "The clients' data", intro, parts)


def distributions(runs: Sequence[Run]) -> list[Distribution]:
    """Return the clients' data, each distribution once, in the order of the runs.

    Where only visits are known, clients without any are missing, so what fits into another distribution is taken for it.
    """
    found: list[Distribution] = []
    for run in runs:
        data = data_of(run)
        if len(data.counts) < 2:
            continue
        for index, other in enumerate(found):
            if _fits(data, other):
                other.runs.append(run)
                break
            if _fits(other, data):
                found[index] = data._replace(runs=[*other.runs, run])
                break
        else:
            found.append(data)
    return found


def _fits(data: Distribution, other: Distribution) -> bool:
    """Tell whether ``data`` has nothing that ``other`` does not have."""
    if data.source == "data.csv" or all("" not in own for own in data.counts.values()):
        return data.counts == other.counts
    sizes = {client: sum(own.values()) for client, own in other.counts.items()}
    return all(sizes.get(client) == own[""] for client, own in data.counts.items())


def names_of(found: Sequence[Distribution], number_of_runs: int) -> list[str]:
    """Name each distribution by the methods that have it, and by the seed where only that tells them apart."""
    names: list[str] = []
    for data in found:
        methods = list(dict.fromkeys(run.method for run in data.runs))
        seeds = sorted({run.seed for run in data.runs if run.seed is not None})
        name = ", ".join(methods) if len(methods) < 3 else f"{methods[0]} and {len(methods) - 1:,} more"
        if len(data.runs) == number_of_runs and number_of_runs > 1:
            name = "all runs"
        elif len(seeds) == 1 and sum(_shares(data, other) for other in found) > 1:
            name = f"{name}, seed {seeds[0]}"
        names.append(name if name not in names else f"{name} ({names.count(name) + 1})")
    return names


def _shares(data: Distribution, other: Distribution) -> bool:
    return bool({run.method for run in data.runs} & {run.method for run in other.runs})


def summary(data: dict[str, Distribution]) -> Table:
    """Return a table of the sizes of each distribution, and of its labels where any has some."""
    labelled = any(label for each in data.values() for own in each.counts.values() for label in own)
    lines = []
    for name, each in data.items():
        sizes = _sizes(each.counts)
        of_sizes = {
            "clients": len(sizes),
            "rows": sum(sizes),
            "smallest": sizes[-1],
            "median": round(median(sizes)),
            "largest": sizes[0],
        }
        line = {"runs": name, **{column: f"{size:,}" for column, size in of_sizes.items()}}
        lines.append(line | _labels(each.counts))
    caption = "Training rows of a client."
    if labelled:
        caption += (
            " Labels a client: the mean number of different labels. Top label: the mean share of a client's rows that have "
            "its most frequent label."
        )
    return table_of("Sizes of clients", lines, caption)


def _labels(counts: Counts) -> dict[str, str]:
    labels = {label for own in counts.values() for label in own if label}
    if not labels:
        return {}
    has = fmean(len(own) for own in counts.values())
    top = fmean(max(own.values()) / sum(own.values()) for own in counts.values())
    return {"labels": f"{len(labels):,}", "labels a client": f"{has:.1f}", "top label": f"{top:.0%}"}


def _sizes(counts: Counts) -> list[int]:
    return sorted((sum(own.values()) for own in counts.values()), reverse=True)


def _bubble_chart(index: int, name: str, data: Distribution) -> Chart:
    table = bubbles(
        {
            client: {label or "no label": rows for label, rows in own.items()}
            for client, own in data.counts.items()
        }
    )
    clients, labels = len(data.counts), len(table.labels) - bool(table.other_labels) + table.other_labels
    caption = f"Each bubble is one client's training rows of one label; its area is their number ({name})."
    if table.other_clients:
        caption += f" The {len(table.clients) - 1:,} largest of {clients:,} clients; the last column: mean of the rest."
    if table.other_labels:
        caption += (
            f" The {len(table.labels) - 1:,} most frequent of {labels:,} labels; the last line is the others."
        )
    if data.source == "visits.csv":
        caption += " Clients that never took part are missing."
    if data.by_group:
        caption += " A client's label is the group that it is known to belong to."
    return Chart(
        f"client_data_{index}",
        f"Rows by client and label: {name}",
        caption,
        f"Bubble plot of {clients:,} clients and {labels:,} labels; {_in_words(table)}",
        draw_bubbles(table),
        [
            {"client": client, "label": label, "rows": rows}
            for client, own in data.counts.items()
            for label, rows in own.items()
        ],
    )


def _in_words(table: Bubbles) -> str:
    row, column = divmod(int(table.rows.argmax()), table.rows.shape[1])
    rows = table.rows[row, column]
    return f"the largest is {rows:,.0f} rows of {table.labels[row]} of client {table.clients[column]}."


def _size_chart(data: dict[str, Distribution], known: Looks) -> Chart:
    """Return a line for each distribution; the axis is logarithmic where sizes differ by more than a factor of 30."""
    sizes = {name: _sizes(each.counts) for name, each in data.items()}
    lines = {name: over_seeds([ranked(own)]) for name, own in sizes.items()}
    rank = "rank of the client, the largest first"
    figure = line_figure(lines, looks_of(sizes, known), rank, "training rows", 3.0)
    (axes,) = figure.axes
    if max(own[0] for own in sizes.values()) > 30 * min(own[-1] for own in sizes.values()):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:,.0f}")
    else:
        axes.set_ylim(bottom=0)
    spread = "; ".join(f"{name}: from {own[-1]:,} to {own[0]:,} rows" for name, own in sizes.items())
    return Chart(
        "client_sizes",
        "Sizes of clients",
        "Training rows of each client, the largest first.",
        f"Lines that fall from the largest client to the smallest; {spread}.",
        figure,
        [
            {"runs": name, "rank": rank, "rows": rows}
            for name, own in sizes.items()
            for rank, rows in enumerate(own, start=1)
        ],
    )
