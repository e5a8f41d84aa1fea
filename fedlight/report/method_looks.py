"""Look of each method on a page: the same colour in all of its figures, whichever methods a figure shows."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedlight.report.figures.style import DASHES, Looks, looks_by_kind
from fedlight.report.tables import slug
from fedlight.runs.folders import methods
from fedlight.runs.run import Run

NEUTRAL = "0.45"
"""Grey of what is no single method, such as ``all runs``."""


def method_looks(runs: Sequence[Run]) -> Looks:
    """Return colour and dashes of each method of a page, those that train first.

    A stage of the same name in several recipes is one method in one colour, told apart by dashes.
    """
    trained = [run for run in runs if run.command in ("fit", "")]
    return looks_by_kind({run.method: _kind(run) for run in [*trained, *runs]})


def _kind(run: Run) -> str:
    """Return a run's method without the name of the folder in which it was found."""
    if run.folder == run.home or not run.folder.is_relative_to(run.home):
        return run.method
    return methods([(run.folder, run.home)])[0]


def looks_of(names: Iterable[str], known: Mapping[str, dict[str, Any]]) -> Looks:
    """Return the look of each name; of runs that are drawn as one, such as ``a, b``, that of the first; greys of others.

    Examples:
        >>> known = {"a": {"color": "#0072B2", "linestyle": "-"}}
        >>> looks_of(["a and 3 more", "all runs"], known)
        {'a and 3 more': {'color': '#0072B2', 'linestyle': '-'}, 'all runs': {'color': '0.45', 'linestyle': '-'}}
    """
    found: Looks = {}
    for name in names:
        of = [one for one in known if name == one or name.startswith((f"{one}, ", f"{one} and "))]
        if of:
            found[name] = known[max(of, key=len)]
        else:
            greys = sum(look["color"] == NEUTRAL for look in found.values())
            found[name] = {"color": NEUTRAL, "linestyle": DASHES[greys % len(DASHES)]}
    return found


def row_looks(names: Iterable[str], runs: Sequence[Run], known: Looks) -> Looks:
    """Return the looks of the methods of a recipe's table, whose names are the recipe's own.

    The stage that made the table was told the folders of each method; else a name is that of a stage, written otherwise.
    """
    stages = {slug(run.method): run.method for run in runs if run.command in ("fit", "")}
    by_folder = {(run.folder.parent.name, run.folder.name): run.method for run in runs}
    told: dict[str, str] = {}
    for run in runs:
        spec = run.settings().get("methods")
        for name, folders in spec.items() if isinstance(spec, dict) else ():
            for folder in folders.values() if isinstance(folders, dict) else [folders]:
                parts = tuple(str(folder).split("/")[-2:])
                if len(parts) == 2 and parts in by_folder:
                    told.setdefault(str(name), by_folder[parts])
    methods_of = {name: told.get(name) or stages.get(slug(name), "") for name in names}
    return {
        name: known.get(method, {"color": NEUTRAL, "linestyle": "-"}) for name, method in methods_of.items()
    }
