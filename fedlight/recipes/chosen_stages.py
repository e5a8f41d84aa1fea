"""Selection of stages for ``fedlight run NAME --only STAGE``: the named ones and those that they read from.

A stage reads from another if one of its arguments names a path in the other's folder, or a path of their run that the other
writes, such as an augmentation that several share; and from all earlier stages if an argument names the run's folder. A
Lightning command that names such a path as its output writes it itself.
"""

import re
from collections.abc import Iterator, Sequence

from fedlight.recipes.stages import Stage
from fedlight.runs.contents import is_output, texts_in
from fedlight.support.words import near

BEHIND_A_PATH = "?&\"',{}[] \t\n"
IN_A_PATH = re.compile(f"[^{re.escape(BEHIND_A_PATH)}]+")


def chosen_stages(
    runs: Sequence[Sequence[Stage]], together: Sequence[Stage], only: Sequence[str]
) -> tuple[list[list[Stage]], list[Stage]]:
    """Return the wanted stages and those that they read from, in order: those of each seed, and those of all seeds.

    ``runs`` are the stages of each seed, ``together`` those that read all seeds. A name that is no stage is a ValueError.
    """
    known = dict.fromkeys(stage.name for stages in (*runs, together) for stage in stages)
    for name in only:
        if name not in known:
            hint = near(name, known) or f"; its stages are {', '.join(known)}"
            raise ValueError(f"--only {name}: the recipe has no stage {name!r}{hint}")
    behind = _with_sources(together, set(only))
    chosen = [
        _with_sources(stages, {*only, *(name for stage in behind for name in _sources(stage, stages))})
        for stages in runs
    ]
    return chosen, behind


def _with_sources(stages: Sequence[Stage], wanted: set[str]) -> list[Stage]:
    """Return the wanted stages of one folder and their sources, found from the last stage to the first."""
    needed = set(wanted)
    for place in reversed(range(len(stages))):  # so that sources of sources are found
        if stages[place].name in needed:
            needed |= _sources(stages[place], stages[:place])
    return [stage for stage in stages if stage.name in needed]


def _sources(stage: Stage, earlier: Sequence[Stage]) -> set[str]:
    """Return the names of the earlier stages of the same folder that a stage reads from."""
    names = {other.name for other in earlier}
    sources: set[str] = set()
    for key, path in _places(stage, earlier[0]) if earlier else ():
        # The longest: one stage's name may begin with another's.
        first = max((name for name in names if _within(path, name)), key=len, default=None)
        is_written = key == "output" if stage.command == "call" else is_output(key)
        if not path:  # the folder of the whole run
            sources |= set() if is_written else names
        elif first is not None:
            sources.add(first)
        elif stage.command == "call" or not is_written:
            sources |= set(_writers(path, earlier)[:1])  # the first that names it writes it
    return sources


def _writers(path: str, stages: Sequence[Stage]) -> list[str]:
    def holds(text: str) -> bool:
        folder = IN_A_PATH.match(text)
        return folder is not None and _within(path, folder[0].rstrip("/"))

    return [stage.name for stage in stages if any(holds(text) for _, text in _places(stage, stage))]


def _within(path: str, folder: str) -> bool:
    """Return whether a path lies in a folder, whose name may have blanks and commas, as names of stages may."""
    return path.startswith(folder) and path[len(folder) : len(folder) + 1] in ("", "/", *BEHIND_A_PATH)


def _places(stage: Stage, other: Stage) -> Iterator[tuple[str, str]]:
    """Yield each path that a stage names in the folder of another one's run, with its key; empty for the folder itself."""
    for key, value in texts_in(stage.arguments):
        for text in value.split(str(other.folder.parent))[1:]:
            if text.strip("/") == "" or text[0] in BEHIND_A_PATH:
                yield key, ""
            elif text[0] == "/":
                yield key, text.lstrip("/")
