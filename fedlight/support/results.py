"""Table of a recipe's results: one line per method, with mean and standard deviation over seeds."""

import io
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from math import isfinite
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from fedlight.support.console import rich_table, wide_console
from fedlight.support.files import write_whole

WIDTH = 250  # characters, without a terminal
ENDS = ("_low", "_high")
"""Of the columns with the ends of an interval, behind the column's own name."""
BY_SELECTOR = re.compile(r"^labelled$|by_selector$")
"""Columns that are worth what a method's own selector is worth."""
WORTHLESS = "(worthless)"


def versions() -> dict[str, str]:
    """Return the versions of the packages that determine the numbers."""
    from fedlight import __version__

    packages = ("torch", "lightning", "transformers", "peft")
    return {"fedlight": __version__} | {name: version(name) for name in packages}


def _spread(values: list[float]) -> str:
    if not values:
        return "-"
    if all(type(value) is int and value == values[0] for value in values):
        return f"{values[0]:,}"
    spread = len(values) > 1 and all(map(isfinite, values))  # others have none
    return f"{mean(values):.3f}" + (f" ± {stdev(values):.3f}" if spread else "")


def summary(rows: list[dict[str, Any]]) -> dict[str, dict[str, str]]:
    """Return method -> metric -> ``mean ± standard deviation`` over its rows, in order of appearance.

    Examples:
        >>> summary([{"method": "m", "seed": seed, "x": 1.0 + seed, "pairs": 1207} for seed in (0, 1)])
        {'m': {'x': '1.500 ± 0.707', 'pairs': '1,207'}}
    """
    table: dict[str, dict[str, str]] = {}
    for method in dict.fromkeys(row["method"] for row in rows):
        of_method = [row for row in rows if row["method"] == method]
        metrics = dict.fromkeys(key for row in of_method for key in row if key not in ("method", "seed"))
        table[method] = {
            key: _spread([row[key] for row in of_method if row.get(key) is not None]) for key in metrics
        }
    return table


def markdown(results: dict[str, Any]) -> str:
    """Return the table of ``results`` in Markdown.

    Examples:
        >>> print(markdown({"rows": [{"method": "m", "seed": 0, "win_rate": 0.5}]}))
        | method | win rate |
        |---|---|
        | m | 0.500 |
    """
    header, lines = cells(results["rows"])
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join(f"| {' | '.join(row)} |" if row[0] != "---" else "|---" * len(row) + "|" for row in rows)


def cells(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return column names, and a line of texts for each method."""
    methods = summary(rows)
    metrics = without_ends(key for row in methods.values() for key in row)
    header = ["method", *(metric.replace("_", " ") for metric in metrics)]
    lines = []
    for method, row in methods.items():
        runs = [each for each in rows if each["method"] == method]
        shown = (row.get(metric, "-") + in_brackets(runs, metric) + mark(runs, metric) for metric in metrics)
        lines.append([method, *shown])
    return header, lines


def at_chance(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a method's selector is not shown to beat chance: its interval in both orders reaches down to one half.

    The method has a row for each seed; the mean of the lower ends counts.

    Examples:
        >>> at_chance([{"both_orders_low": 0.45}]), at_chance([{"both_orders_low": 0.52}]), at_chance([{"win_rate": 0.5}])
        (True, False, False)
    """
    low = [row["both_orders_low"] for row in rows if row.get("both_orders_low") is not None]
    return bool(low) and mean(low) <= 0.5


def mark(rows: Sequence[Mapping[str, Any]], column: str) -> str:
    """Return the mark after a method's value in a column that rests on a selector at chance, else an empty text.

    A win rate without an interval is that of the reference against itself, one half whatever the selector.

    Examples:
        >>> row = {"both_orders_low": 0.45, "win_rate_by_selector": 0.8, "win_rate_by_selector_low": 0.7}
        >>> reference = {"both_orders_low": 0.4, "win_rate_by_selector": 0.5}
        >>> mark([row], "win_rate_by_selector"), mark([reference], "win_rate_by_selector")
        (' (worthless)', '')
    """
    measured = column if column == "labelled" else f"{column}_low"
    known = any(row.get(measured) is not None for row in rows)
    return f" {WORTHLESS}" if known and BY_SELECTOR.search(column) and at_chance(rows) else ""


def chance_notes(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a sentence for each method with labels or win rates by a selector at chance.

    Examples:
        >>> ends = {"both_orders_low": 0.37, "both_orders_high": 0.53}
        >>> print(*chance_notes([{"method": "FedBis", "both_orders": 0.45, **ends, "labelled": 7}]))
        FedBis: its selector is not shown to beat chance (both orders 0.450 [0.370, 0.530]): its labels, the models tuned...
    """
    notes = []
    for method in dict.fromkeys(row["method"] for row in rows):
        runs = [row for row in rows if row["method"] == method]
        if any(mark(runs, column) for row in runs for column in row):
            score = _spread([row["both_orders"] for row in runs]) + in_brackets(runs, "both_orders")
            notes.append(
                f"{method}: its selector is not shown to beat chance (both orders {score}): its labels, the models tuned on "
                "them and its win rates are worthless."
            )
    return notes


def without_ends(columns: Iterable[str]) -> list[str]:
    """Return columns once, in order, without those that are the ends of another one's interval.

    Examples:
        >>> without_ends(["won", "won_low", "won_high", "bytes_low"])
        ['won', 'bytes_low']
    """
    names = dict.fromkeys(columns)
    return [name for name in names if not (name.endswith(ENDS) and name.rpartition("_")[0] in names)]


def in_brackets(rows: Sequence[Mapping[str, Any]], metric: str) -> str:
    """Return the interval of a metric behind a blank, of several rows the means of its ends; empty where none has one.

    Examples:
        >>> in_brackets([{"won": 0.5, "won_low": 0.25, "won_high": 0.75}, {"won": 0.5}], "won"), in_brackets([], "won")
        (' [0.250, 0.750]', '')
    """
    ends = [[row.get(f"{metric}{end}") for end in ENDS] for row in rows]
    whole = [each for each in ends if all(isinstance(end, int | float) for end in each)]
    if not whole:
        return ""
    low, high = (mean(end) for end in zip(*whole, strict=True))
    return f" [{low:.3f}, {high:.3f}]"


def rich_text(title: str, header: list[str], lines: list[list[str]]) -> str:
    """Return a table as text for the ``report`` of a stage, with numbers aligned right.

    Examples:
        >>> print(rich_text("wins", ["method", "win"], [["FedAvg", "0.5"]]))
        wins
        ┏━━━━━━━━┳━━━━━┓
        ┃ method ┃ win ┃
        ┡━━━━━━━━╇━━━━━┩
        │ FedAvg │ 0.5 │
        └────────┴─────┘
    """
    from rich.console import Console

    console = Console(width=WIDTH, file=io.StringIO())
    with console.capture() as captured:
        console.print(rich_table(title, header, lines))
    return "\n".join(line.rstrip() for line in captured.get().rstrip("\n").splitlines())


def show(results: dict[str, Any], folder: Path, answer: str = "") -> None:
    """Print the answer in one sentence, the table and the folder; write both into ``results.md`` as well."""
    seeds = sorted({row["seed"] for row in results["rows"]})
    header, lines = cells(results["rows"])
    console = wide_console(WIDTH)
    if answer:
        console.print(answer, soft_wrap=True, markup=False, highlight=False)
    title = f"{results['recipe']}, seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"
    console.print(rich_table(title, header, lines))
    notes = chance_notes(results["rows"])
    for note in notes:
        console.print(f"warning: {note}", soft_wrap=True, markup=False, highlight=False)
    console.print(
        f"{results['seconds']:.0f} s; results, metrics, visits and adapters are in {folder}", soft_wrap=True
    )
    console.print(f"as a page: fedlight report {folder} --open", soft_wrap=True)
    write_whole(
        folder / "results.md", "\n\n".join([*filter(None, [answer]), markdown(results), *notes]) + "\n"
    )


def show_stages(rows: list[dict[str, Any]], folder: Path) -> None:
    """Print the metrics of single stages, and that there are no results of the whole recipe."""
    for row in rows:
        metrics = (f"{name} {value:.4g}" for name, value in row.items() if name not in ("method", "seed"))
        print(f"seed {row['seed']}, {row['method']}: {', '.join(metrics) or 'done'}")
    print(f"in {folder}; without --only the other stages are done as well, and results.json is written")
