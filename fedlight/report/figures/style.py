"""Look of all figures, and of each method in them; an SVG depends on the numbers alone.

The first six colours are those of Okabe and Ito, "Color Universal Design", https://jfly.uni-koeln.de/color/: fit for
colour-blind people. The others were chosen so that all twelve stay apart for them too.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedlight.report.parts import slug
from fedlight.runs.folders import methods
from fedlight.runs.run import Run

COLORS = (
    *("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"),
    *("#661100", "#2E4057", "#332288", "#9E7BFF", "#A0522D", "#004D40"),
)
STYLE: Any = {
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 11,
    "legend.frameon": False,
    "svg.hashsalt": "fedlight",  # else the ids in an SVG are drawn anew each time
    "text.parse_math": False,  # names of clients and metrics are no formulas, whatever stands between two $
}
INCHES = (7.0, 4.0)
HALF_A_PAGE = (5.6, 3.5)
"""Inches of a chart on a report's page: half of a wide screen, and still legible on a phone."""
DASHES: Any = ("-", "--", ":")
MOST_LINES = 18
"""Lines that one chart holds; `looks` tells more apart."""
NARROW = (4.4, 4.0)
"""Inches of a chart on a phone, where texts of a wider one would be too small."""
LEGEND_ROWS, ROW_INCHES = 3, 0.19
"""Rows of a legend for which a chart has room, and by how much each further one makes it taller."""
NEUTRAL = "0.45"
"""Grey of what is no single method, such as ``all runs``."""


def colors(number: int, what: str) -> list[str]:
    """Return a colour for each of ``number`` things; raise ValueError for too many to be told apart."""
    if not 1 <= number <= len(COLORS):
        raise ValueError(
            f"{number} {what}: between 1 and {len(COLORS)} can be told apart in one figure: draw several"
        )
    return [*COLORS[:number]]


def new_figure() -> tuple[Figure, Axes]:
    """Return a figure with one pair of axes."""
    figure, (axes,) = new_panels(1)
    return figure, axes


def new_panels(number: int) -> tuple[Figure, list[Axes]]:
    """Return a figure with several pairs of axes beside each other that share their y axis."""
    return new_grid(number, number, INCHES, sharey=True)


def new_grid(
    number: int, across: int, inches: tuple[float, float], **options: Any
) -> tuple[Figure, list[Axes]]:
    """Return a figure with so many pairs of axes in rows of ``across``; ``options`` are those of `Figure.subplots`."""
    figure = Figure(figsize=inches, layout="constrained")  # not of pyplot: no display, nothing left open
    grid = figure.subplots(-(-number // across), across, squeeze=False, **options).ravel()
    for axes in grid[number:]:
        axes.remove()  # a grid may have places too many
    return figure, [*grid[:number]]


def new_chart(height: float = HALF_A_PAGE[1]) -> tuple[Figure, Axes]:
    """Return a figure of half a report page's width."""
    figure, (axes,) = new_grid(1, 1, (HALF_A_PAGE[0], height))
    axes.tick_params(labelsize=9)
    axes.locator_params(axis="y", nbins=5)  # else other ticks, without room, once there is a legend
    axes.grid(axis="y", color="0.85", linewidth=0.6)
    axes.set_axisbelow(True)
    return figure, axes


Looks = dict[str, dict[str, Any]]
"""Name -> colour and dashes."""


def looks(kinds: Mapping[str, str]) -> Looks:
    """Return a colour for each kind of names, and dashes that tell apart names of one colour.

    The same names in the same order look the same on every chart.

    Examples:
        >>> looks({"first/fedavg": "fedavg", "ditto": "ditto", "second/fedavg": "fedavg"})["second/fedavg"]
        {'color': '#0072B2', 'linestyle': '--'}
    """
    places = {kind: place for place, kind in enumerate(dict.fromkeys(kinds.values()))}
    taken: Counter[str] = Counter()
    styles: Looks = {}
    for name, kind in kinds.items():
        color = COLORS[places[kind] % len(COLORS)]
        styles[name] = {"color": color, "linestyle": DASHES[taken[color] % len(DASHES)]}
        taken[color] += 1
    return styles


def add_legend(figure: Figure, handles: Sequence[Any], columns: int = 3) -> None:
    """Put the legend above the axes."""
    figure.legend(handles=handles, loc="outside upper center", ncols=columns)


def key(figure: Figure, axes: Axes) -> None:
    """Put a legend above the axes, of a single line as well, with as many columns as the names leave room for."""
    handles, labels = axes.get_legend_handles_labels()
    if not handles:
        return
    longest = max(map(len, labels))
    # A row holds about 66 letters, and the handle beside a name takes 9.
    columns = max(1, min(3, 66 // (longest + 9), len(labels)))
    rows = -(-len(labels) // columns)
    figure.set_figheight(figure.get_figheight() + ROW_INCHES * max(0, rows - LEGEND_ROWS))
    add_legend(figure, handles, columns)
    for handle, text in zip(figure.legends[0].legend_handles, figure.legends[0].get_texts(), strict=True):
        if handle is not None:
            handle.set_gid(f"series:{text.get_text()}")
        text.set_fontsize(9)


@matplotlib.rc_context(STYLE)
def save(figure: Figure, output: str) -> str:
    """Write the figure, make its folder, return ``output``; raise ValueError for a file other than .svg or .png."""
    if Path(output).suffix not in (".svg", ".png"):
        raise ValueError(f"output={output} must end with .svg or .png")
    Path(output).parent.mkdir(parents=True, exist_ok=True)
    # The same numbers give the same file at any time.
    metadata = {"Date": None} if Path(output).suffix == ".svg" else {}
    figure.savefig(output, dpi=150, metadata=metadata)
    return output


def method_looks(runs: Sequence[Run]) -> Looks:
    """Return colour and dashes of each method of a page, those that train first.

    A stage of the same name in several recipes is one method in one colour, told apart by dashes.
    """
    kinds: dict[str, str] = {}  # method -> the same without the name of the given folder
    for run in [*(run for run in runs if run.command in ("fit", "")), *runs]:
        is_below = run.folder != run.home and run.folder.is_relative_to(run.home)
        kinds[run.method] = methods([(run.folder, run.home)])[0] if is_below else run.method
    return looks(kinds)


def looks_of(names: Iterable[str], known: Mapping[str, dict[str, Any]]) -> Looks:
    """Return the look of each name; of runs that are drawn as one, such as ``a, b``, that of the first; greys of others.

    Examples:
        >>> known = {"a": {"color": "#0072B2", "linestyle": "-"}}
        >>> looks_of(["a and 3 more", "all runs"], known)
        {'a and 3 more': {'color': '#0072B2', 'linestyle': '-'}, 'all runs': {'color': '0.45', 'linestyle': '-'}}
    """
    styles: Looks = {}
    for name in names:
        runs = [run for run in known if name == run or name.startswith((f"{run}, ", f"{run} and "))]
        if runs:
            styles[name] = known[max(runs, key=len)]  # of "a" and "a, b" the one that is meant
        else:
            greys = sum(look["color"] == NEUTRAL for look in styles.values())
            styles[name] = {"color": NEUTRAL, "linestyle": DASHES[greys % len(DASHES)]}
    return styles


def row_looks(names: Iterable[str], runs: Sequence[Run], known: Looks) -> Looks:
    """Return the looks of the methods of a recipe's table, whose names are the recipe's own.

    The stage that made the table was told the folders of each method; else a name is that of a stage, written otherwise.
    """
    stages = {slug(run.method): run.method for run in runs if run.command in ("fit", "")}
    by_folder = {run.folder.parts[-2:]: run.method for run in runs}
    told: dict[str, str] = {}
    for spec in (run.settings().get("methods") for run in runs):
        for name, folders in spec.items() if isinstance(spec, dict) else ():
            for folder in folders.values() if isinstance(folders, dict) else [folders]:
                if method := by_folder.get(Path(str(folder)).parts[-2:]):
                    told.setdefault(str(name), method)
    grey = {"color": NEUTRAL, "linestyle": "-"}
    return {name: known.get(told.get(name) or stages.get(slug(name), ""), grey) for name in names}
