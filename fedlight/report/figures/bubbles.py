"""Bubble plot of rows by client (columns) and label (rows), with areas in proportion to the number of rows.

After Figure 3 of FedBiscuit (Wu et al., ICLR 2025, https://arxiv.org/abs/2407.03038) and Figure 4 of FedDCA (Wang et al.,
2024, https://arxiv.org/abs/2409.20135). Only the largest clients and labels are drawn, the others together: no specks.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fedlight.report.figures.style import COLORS, HALF_A_PAGE, STYLE, add_legend, new_chart
from fedlight.report.tables import shortened

Counts = Mapping[str, Mapping[str, float]]
"""Client -> label -> rows."""

CLIENTS = 40
LABELS = 16
NAMED = 12  # clients whose names have room below the axis
LONGEST = 24  # characters of a label


class Bubbles(NamedTuple):
    """Table of the bubbles."""

    clients: list[str]  # the columns; the last is ``other clients`` where there are more
    labels: list[str]  # the rows; the last is ``other labels`` where there are more
    rows: np.ndarray  # of each, ``(labels, clients)``; of the other clients the mean
    other_clients: int  # how many the last column stands for
    other_labels: int  # how many the last row stands for


def bubbles(counts: Counts, clients: int = CLIENTS, labels: int = LABELS) -> Bubbles:
    """Return at most so many of the largest clients and most frequent labels, clients with the same top label side by side.

    Examples:
        >>> counts = {"a": {"tea": 1, "jam": 5}, "b": {"tea": 3}, "c": {"rice": 1}, "d": {"tea": 2}}
        >>> bubbles(counts, clients=2, labels=1)
        Bubbles(clients=['b', 'a', 'other clients'], labels=['tea', 'other labels'], rows=array([[3. , 1. , 1. ],
               [0. , 5. , 0.5]]), other_clients=2, other_labels=2)
    """
    totals: Counter[str] = Counter()
    for own in counts.values():
        totals.update(own)
    by_size = sorted(counts, key=lambda client: (-sum(counts[client].values()), client))
    shown, rest = by_size[:clients], by_size[clients:]
    names = sorted(totals, key=lambda label: (-totals[label], label))
    place = {label: min(index, labels) for index, label in enumerate(names)}
    column = {client: index for index, client in enumerate(shown)}
    cells = np.zeros((min(len(names), labels + 1), len(shown) + bool(rest)))
    for client, own in counts.items():
        share = 1 if client in column else 1 / len(rest)
        for label, rows in own.items():
            cells[place[label], column.get(client, len(shown))] += share * rows
    # A stable sort: among clients of one label the largest stays first.
    order = np.argsort(cells[:, : len(shown)].argmax(axis=0), kind="stable")
    return Bubbles(
        [*(shown[index] for index in order), *(["other clients"] if rest else [])],
        [*names[:labels], *(["other labels"] if len(names) > labels else [])],
        np.concatenate([cells[:, order], cells[:, len(shown) :]], axis=1),
        len(rest),
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
    axes.set_xticks(
        range(wide), [shortened(name, LONGEST) for name in table.clients] if named else [""] * wide
    )
    if named and wide > 6:
        axes.tick_params(axis="x", labelrotation=35)
    axes.tick_params(length=0)
    axes.set_axisbelow(True)
    axes.grid(color="0.9", linewidth=0.6)
    rest = f", at the right the mean of {table.other_clients:,} others" if table.other_clients else ""
    axes.set_xlabel(f"{wide - bool(rest)} clients{rest}")
    add_legend(figure, [_bubble(rows, largest * rows / most) for rows in _steps(most)])
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


def _bubble(rows: int, area: float) -> Line2D:
    label = f"{rows:,} row{'s' * (rows != 1)}"
    style: Any = {"marker": "o", "linestyle": "", "markeredgewidth": 0, "alpha": 0.75}
    return Line2D([], [], color=COLORS[0], markersize=area**0.5, label=label, **style)
