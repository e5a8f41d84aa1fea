"""Figures of FedDCA as stages of a recipe: labels of clients, similarities of retrieved rows, coverage and score.

Z. Wang et al., "Federated Instruction Tuning of LLMs with Domain Coverage Augmentation" (FedDCA), 2024,
https://arxiv.org/abs/2409.20135, Figures 4 and 11 and the paper's explanation of Table 3. Each function reads runs' files,
writes one SVG or PNG (by the ending of ``output``) and returns its path and the drawn numbers.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from textwrap import fill
from typing import Any

import matplotlib
import numpy as np
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure

from fedlight.datamodules.instructions.augmentation import Added
from fedlight.datamodules.instructions.augmentation_record import AugmentationRecord
from fedlight.report.figures.lines import draw_scatter
from fedlight.report.figures.style import COLORS, STYLE, new_panels, save
from fedlight.report.parts import points_of

BINS = 40
LETTERS = 60  # of titles, in all panels together


def label_distribution(records: dict[str, str], output: str) -> dict[str, Any]:
    """Draw how many rows of each category every client has: a panel for each run (Figure 4).

    Args:
        records: label, such as ``alpha = 0.1``, -> ``augmentation_folder`` of a run whose rows have a category.
        output: the figure.

    Returns:
        ``file``; ``table``: label -> client -> category -> rows.

    Raises:
        ValueError: a folder has no record, or its rows have no category.
    """
    table = {label: _categories(Path(folder)) for label, folder in records.items()}
    return {"file": save(draw_labels(table), output), "table": table}


@matplotlib.rc_context(STYLE)
def draw_labels(table: Mapping[str, Mapping[str, Mapping[str, int]]]) -> Figure:
    """Draw the ``table`` of `label_distribution`."""
    figure, panels = new_panels(len(table))
    names = sorted({name for clients in table.values() for counts in clients.values() for name in counts})
    most = max(max(counts.values()) for clients in table.values() for counts in clients.values())
    shades: Any = {"cmap": "Blues", "norm": PowerNorm(0.5, 0, most)}  # a single row can still be seen
    for axes, (label, clients) in zip(panels, table.items(), strict=True):
        cells = np.array([[counts.get(name, 0) for counts in clients.values()] for name in names])
        image = axes.imshow(cells, aspect="auto", interpolation="nearest", origin="lower", **shades)
        axes.set_title(label, fontsize="medium")
        axes.set_xticks([0, len(clients) - 1], ["1", str(len(clients))])
        axes.set_yticks([0, len(names) - 1], ["1", str(len(names))])
        axes.tick_params(length=0)
    panels[0].set_ylabel("category")
    figure.supxlabel("client", fontsize="medium")
    figure.colorbar(image, ax=panels, label="rows", pad=0.02, aspect=30)
    return figure


def similarities(records: dict[str, str], output: str, alpha: float | None = None) -> dict[str, Any]:
    """Draw histograms of the scores of retrieved rows: a line for each client, a panel for each run (Figure 11).

    Args:
        records: label -> ``augmentation_folder`` of a run.
        output: the figure.
        alpha: where a line is drawn: more similar rows were passed over.

    Returns:
        ``file``; ``table``: label -> ``edges`` of the bins, one more than bins, and ``counts``: client -> rows in each bin.

    Raises:
        ValueError: a folder has no record, or its rows have no scores.
    """
    scores = {label: _scores(Path(folder)) for label, folder in records.items()}
    table = similarity_table(scores)
    return {"file": save(draw_similarities(table, alpha), output), "table": table}


def similarity_table(scores: Mapping[str, Mapping[str, np.ndarray]]) -> dict[str, Any]:
    """Return the ``table`` of `similarities` from scores: label -> client -> ``(rows,)``, at least one.

    Examples:
        >>> table = similarity_table({"a": {"u": np.array([0.0, 1.0, 1.0])}})
        >>> table["a"]["counts"]["u"][0], table["a"]["counts"]["u"][-1], len(table["a"]["edges"])
        (1, 2, 41)
    """
    low = min(values.min() for clients in scores.values() for values in clients.values())
    high = max(values.max() for clients in scores.values() for values in clients.values())
    edges = np.linspace(low, high + 1e-6, BINS + 1)  # scores that are all equal need edges apart too
    return {
        label: {
            "edges": edges.tolist(),
            "counts": {client: np.histogram(values, edges)[0].tolist() for client, values in clients.items()},
        }
        for label, clients in scores.items()
    }


@matplotlib.rc_context(STYLE)
def draw_similarities(
    table: Mapping[str, Mapping[str, Any]],
    alpha: float | None = None,
    name: str = "cosine to the client's centre",
) -> Figure:
    """Draw shares of a client's rows by score, called ``name``, from `similarities`' ``table``, with a line at ``alpha``."""
    figure, panels = new_panels(len(table))
    letters = LETTERS // len(table)
    for axes, (label, histograms) in zip(panels, table.items(), strict=True):
        edges = np.array(histograms["edges"])
        shares = [np.array(counts) / max(sum(counts), 1) for counts in histograms["counts"].values()]
        for share in shares:
            axes.stairs(share, edges, color=COLORS[0], alpha=0.35, linewidth=1)
        axes.stairs(np.mean(shares, axis=0), edges, color=COLORS[1], linewidth=2)
        if alpha is not None:
            axes.axvline(alpha, color="0.3", linestyle="--", linewidth=1)
        used = np.flatnonzero(np.sum(shares, axis=0) > 0)
        # Wide enough for the line at alpha, which may lie beyond all scores.
        axes.set_xlim(edges[used[0]], max(edges[used[-1] + 1], alpha or -1) + 0.02)
        axes.set_title(fill(label, letters), fontsize="medium")
    dashed = "" if alpha is None else f", dashed: alpha = {alpha:g}"
    figure.supxlabel(f"{name} (orange: mean of the clients{dashed})", fontsize="medium")
    panels[0].set_ylabel("share of rows")
    return figure


def coverage_against_score(tables: str | list[str], output: str, y: str = "score") -> dict[str, Any]:
    """Draw a named point for each method: coverage against the score of the tuned model.

    Args:
        tables: folders of stages whose result has ``rows``, one or several (one for each seed).
        output: the figure.
        y: column upwards; ``coverage`` is across. Rows of a method are averaged, their standard deviation drawn as a cross.

    Returns:
        ``file``; ``table``: method -> ``x`` and ``y``, lists; ``correlation``: Pearson's, of at least 3 means, else None.

    Raises:
        ValueError: a folder has no result, or no row has these columns.
    """
    table = points_of(tables, "coverage", y)
    means = np.array([[mean(values["x"]), mean(values["y"])] for values in table.values()])
    vary = len(means) > 2 and bool((means.std(axis=0) > 0).all())  # of two points Pearson's is always 1 or -1
    correlation = float(np.corrcoef(means.T)[0, 1]) if vary else None
    figure = draw_scatter(table, "coverage", y.replace("_", " "))
    return {"file": save(figure, output), "table": table, "correlation": correlation}


def scores_of(added: Mapping[str, Sequence[Added]]) -> dict[str, np.ndarray]:
    """Return the scores that rows were chosen by, ``(rows,)`` for each client, by name; rows without one are left out."""
    return {
        client: np.array([row.score for row in rows if row.score is not None], dtype=float)
        for client, rows in sorted(added.items())
    }


def _categories(folder: Path) -> dict[str, dict[str, int]]:
    record = AugmentationRecord(folder)
    record.refuse_damaged()
    counts: dict[str, Counter[str]] = {}
    for client, fields in record.read_own():
        category = fields.get("category")
        if category is None:
            raise ValueError(
                f"{record.private}: a row has no category: map a column to category, or set pseudo_labels"
            )
        counts.setdefault(client, Counter())[category] += 1
    return {client: dict(sorted(counts[client].items())) for client in sorted(counts)}


def _scores(folder: Path) -> dict[str, np.ndarray]:
    scores = scores_of(AugmentationRecord(folder).read())
    if not scores or not all(len(values) for values in scores.values()):
        raise ValueError(
            f"{folder}: a client has no row with a score: give a run that retrieves by similarity"
        )
    return scores
