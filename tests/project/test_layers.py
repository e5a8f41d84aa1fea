"""Imports point down and never in a circle, files stay short, and nothing is imported under a bare name.

Imports go from the upper floors to the lower ones of the table ``FLOORS``. The files are read, not run, so imports inside
functions and those for type checkers count.
"""

import ast
import functools
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = sorted(path.relative_to(ROOT) for path in (ROOT / "fedlight").rglob("*.py"))
PACKAGE += sorted(
    Path("fedlight") / path.relative_to(ROOT)
    for folder in ("callbacks", "conf", "datamodules", "modules")
    for path in (ROOT / folder).rglob("*.py")
)
PACKAGE = sorted(set(PACKAGE))
OTHERS = sorted(
    path.relative_to(ROOT)
    for folder in ("benchmarks", "examples", "tests")
    for path in (ROOT / folder).rglob("*.py")
)
TEXTS = {path: (ROOT / path).read_text(encoding="utf-8") for path in [*PACKAGE, *OTHERS]}
FLOORS = (
    {"cli"},
    {"preflight"},
    {"plan", "first_config", "export"},
    {"report"},
    {"recipes"},
    {"judges"},
    {"flower"},
    {"lightning_cli"},
    {"augmentation"},
    {"generators", "runs"},
    {"callbacks", "modules", "datamodules"},
    {"evaluation", "toy", "devices", "stacking", "processes"},
    {"federation"},
    {"pretrained"},
    {"support"},
)
"""Rooms of ``fedlight``, top first: a room imports from floors below its own alone."""
FLOOR = {room: number for number, floor in enumerate(FLOORS) for room in floor}
BARE = {"callbacks", "conf", "datamodules", "modules"}
FORBIDDEN_IN_FEDERATION = {"lightning", "pytorch_lightning", "transformers"}
MOST_FILES = 12
"""Of a folder, ``__init__.py`` and sub-folders not counted."""
LARGER = {"fedlight/federation": 13, "fedlight/support": 14}
"""Folders with more files, which may not grow."""


@functools.cache
def imported_names(source: str) -> frozenset[str]:
    """Every module or ``module.name`` that the source imports, at the top or inside of functions."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names}
    return frozenset(names)


def faults(path: Path, source: str) -> list[str]:
    """Return what is wrong with the imports of ``fedlight/...`` file ``path``."""
    here = path.parts[1]
    found = []
    for name in sorted(imported_names(source)):
        root, there, *_ = [*name.split("."), ""]
        if root in {"", *BARE}:
            found.append(f"{name}: import it as fedlight.{name.lstrip('.')}")
        if here == "federation" and root in FORBIDDEN_IN_FEDERATION:
            found.append(f"{name}: the federation knows neither Lightning nor transformers")
        if root != "fedlight" or there == here or there not in FLOOR or here not in FLOOR:
            continue
        if FLOOR[there] < FLOOR[here]:
            found.append(f"{name}: points up")
        elif FLOOR[there] == FLOOR[here]:
            found.append(f"{name}: rooms of one floor do not import each other")
    return found


def test_imports_point_down_under_no_bare_name():
    wrong = {str(path): faults(path, TEXTS[path]) for path in PACKAGE}
    assert {path: complaints for path, complaints in wrong.items() if complaints} == {}
    roots = {str(path): {name.split(".")[0] for name in imported_names(TEXTS[path])} for path in OTHERS}
    assert {path: names for path, names in roots.items() if names & {"", *BARE}} == {}


def test_the_sandbox_imports_nothing_of_the_rest_but_its_folder():
    room = [path for path in PACKAGE if "sandbox" in path.parts]
    imported = {path.name: imported_names(TEXTS[path]) for path in room}
    own = {file: {n for n in names if n.startswith("fedlight")} for file, names in imported.items()}
    assert len(room) > 5
    assert not own["inside.py"] | own["calls.py"]  # what runs inside
    names = {name for each in own.values() for name in each}
    folder = {"fedlight.support.files", "fedlight.support.files.temporary_folder"}
    assert all(name.startswith("fedlight.evaluation.sandbox.") for name in names - folder)


def module_name(path: Path) -> str:
    """Return the dotted name of ``fedlight/...`` file ``path``."""
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def circle(sources: dict[str, str]) -> list[str]:
    """Return the modules of a circle of imports, lazy ones and those for type checkers counted; empty without one.

    Args:
        sources: dotted name of a module -> its text.
    """
    graph: dict[str, set[str]] = {}
    for module, source in sources.items():
        names = {name if name in sources else name.rpartition(".")[0] for name in imported_names(source)}
        graph[module] = {name for name in names if name in sources and name != module}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_no_file_imports_itself_through_others():
    sources = {module_name(path): TEXTS[path] for path in PACKAGE}
    assert len(sources) == len(PACKAGE) > 250
    assert circle(sources) == []


@pytest.mark.parametrize("folder", ["callbacks", "datamodules"])
def test_no_room_imports_itself_through_others(folder):
    """Rooms of a folder: ``fedlight.datamodules.text`` may import ``rows``, or ``rows`` may import ``text``."""
    sources: dict[str, str] = {}
    for path in PACKAGE:
        if len(path.parts) == 4 and path.parts[1] == folder:
            room = ".".join(path.parts[:3])
            rooms = {".".join(name.split(".")[:3]) for name in imported_names(TEXTS[path])} - {room}
            imports = "".join(f"import {name}\n" for name in sorted(rooms) if name)
            sources[room] = sources.get(room, "") + imports
    assert len(sources) >= 6
    assert circle(sources) == []


def test_a_circle_is_found_through_a_lazy_import():
    sources = {"fedlight.a": "from fedlight import b", "fedlight.b": "from fedlight.c import x"}
    sources["fedlight.c"] = ""
    assert circle(sources) == []
    sources["fedlight.c"] = "def f():\n    from fedlight.a import y"
    assert sorted(set(circle(sources))) == ["fedlight.a", "fedlight.b", "fedlight.c"]


def test_files_stay_short_and_every_folder_has_a_place_among_the_floors():
    lines = {path: text.count("\n") for path, text in TEXTS.items()}
    assert {str(path): number for path, number in lines.items() if number > 600} == {}
    assert sorted(lines[path] for path in PACKAGE)[len(PACKAGE) // 2] < 150
    rooms = {path.parts[1] for path in PACKAGE if len(path.parts) > 2}
    assert rooms - {"conf"} == set(FLOOR)


def test_rooms_stay_small_and_say_what_they_are_for():
    for folder in sorted({path.parent for path in PACKAGE}):
        files = {path.name: path for path in PACKAGE if path.parent == folder}
        place = str(folder.relative_to("fedlight") if {*folder.parts[1:2]} & BARE else folder)
        assert len(files) - 1 <= LARGER.get(place, MOST_FILES), folder
        assert ast.get_docstring(ast.parse(TEXTS[files["__init__.py"]])), folder


@pytest.mark.parametrize(
    ("path", "source", "complaint"),
    [
        ("federation/state.py", "import lightning as L", "lightning: the federation knows neither"),
        ("federation/state.py", "from fedlight.modules import sft", "fedlight.modules.sft: points up"),
        ("modules/sft.py", "def f():\n    from fedlight.callbacks import progress", "do not import each"),
        ("toy/oracle.py", "import fedlight.devices.device", "do not import each"),
        ("toy/oracle.py", "import fedlight.cli.main", "fedlight.cli.main: points up"),
        ("judges/duels.py", "from fedlight.recipes.stages import Stage", "recipes.stages.Stage: points up"),
        ("datamodules/text/tokens.py", "from fedlight.augmentation import direct", "direct: points up"),
        ("modules/sft.py", "import modules.dpo", "import it as fedlight.modules.dpo"),
        ("modules/sft.py", "from . import dpo", "import it as fedlight.dpo"),
    ],
)
def test_what_is_wrong_is_found(path, source, complaint):
    assert complaint in " ".join(faults(Path("fedlight") / path, source))


def test_what_is_right_is_not():
    source = "import torch\nfrom fedlight import __version__\nfrom fedlight.federation.client import State\n"
    source += "from fedlight.callbacks.logs import visit_log\nfrom fedlight.conf import path\n"
    assert faults(Path("fedlight/callbacks/progress/round_progress.py"), source) == []
    assert faults(Path("fedlight/cli/main.py"), source + "from fedlight.recipes import recipe\n") == []
