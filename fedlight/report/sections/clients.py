"""Spread of results over the clients at the end; the curves have it over the rounds."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedlight.evaluation.by_client import worst_share_mean
from fedlight.report.figures.plots import STAGES, WORST, common_stages, draw_clients, final
from fedlight.report.figures.style import NARROW, Looks, looks_of, method_looks
from fedlight.report.parts import Chart, Part, Section
from fedlight.runs.run import Run

ON_ONE_CHART = 6


def section(runs: Sequence[Run]) -> Section | None:
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
