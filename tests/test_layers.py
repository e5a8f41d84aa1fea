"""Imports point down and never in a circle, files stay short, and nothing is imported under a bare name.

``cli``, ``recipes``, augmentation -> callbacks | modules | datamodules -> evaluation, devices, toy -> federation. The files
are read, not run, so imports inside functions count.
"""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
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
LEVELS = {
    "support": 0,
    "federation": 1,
    "evaluation": 2,
    "devices": 2,
    "toy": 2,
    "callbacks": 3,
    "modules": 3,
    "datamodules": 3,
    "generators": 4,
    "augmentation": 5,
    "report": 6,
    "preflight": 6,
}
TOP = 6  # what stands in fedlight/ itself: cli, recipes, ...
NOT_FOR_AUGMENTATION = {
    *(
        "fedlight.callbacks",
        "fedlight.cli.main",
        "fedlight.lightning_cli.cli",
        "fedlight.recipes.recipe",
        "fedlight.report",
    ),
}
PEERS = {"callbacks", "modules", "datamodules"}
BARE = {"callbacks", "conf", "datamodules", "modules"}
FORBIDDEN_IN_FEDERATION = {"lightning", "pytorch_lightning", "transformers"}


def imported_names(source: str) -> set[str]:
    """Every module or ``module.name`` that the source imports, at the top or inside of functions."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names}
    return names


def part(name: str) -> str:
    """The folder below ``fedlight`` that a dotted name lies in, "" for what stands in ``fedlight`` itself."""
    pieces = name.split(".")
    return pieces[1] if len(pieces) > 1 and pieces[1] in {*LEVELS, "conf"} else ""


def faults(path: Path, source: str) -> list[str]:
    """What is wrong with the imports of ``fedlight/...`` file ``path``."""
    here = path.parts[1] if len(path.parts) > 2 else ""
    level = LEVELS.get(here, TOP)
    found = []
    for name in sorted(imported_names(source)):
        root, there = name.split(".")[0], part(name)
        if root in {"", *BARE}:
            found.append(f"{name}: import it as fedlight.{name.lstrip('.')}")
        if here == "federation" and root in FORBIDDEN_IN_FEDERATION:
            found.append(f"{name}: the federation knows neither Lightning nor transformers")
        if root != "fedlight" or there in {here, "conf"}:
            continue
        if LEVELS.get(there, TOP) > level and name != "fedlight.__version__":
            found.append(f"{name}: points up")
        if here == "augmentation" and ".".join(name.split(".")[:2]) in NOT_FOR_AUGMENTATION:
            found.append(f"{name}: an augmentation knows datamodules and modules alone")
        if {here, there} <= PEERS:
            found.append(f"{name}: callbacks, modules and datamodules do not import each other")
    return found


@pytest.mark.parametrize("path", PACKAGE, ids=str)
def test_imports_point_down(path):
    assert faults(path, (ROOT / path).read_text(encoding="utf-8")) == []


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
    sources = {module_name(path): (ROOT / path).read_text(encoding="utf-8") for path in PACKAGE}
    assert len(sources) == len(PACKAGE) > 250
    assert circle(sources) == []


def test_a_circle_is_found_through_a_lazy_import():
    sources = {
        "fedlight.a": "from fedlight import b",
        "fedlight.b": "from fedlight.c import x",
        "fedlight.c": "",
    }
    assert circle(sources) == []
    sources["fedlight.c"] = "def f():\n    from fedlight.a import y"
    assert sorted(set(circle(sources))) == ["fedlight.a", "fedlight.b", "fedlight.c"]


@pytest.mark.parametrize("path", OTHERS, ids=str)
def test_nothing_is_imported_under_a_bare_name(path):
    roots = {name.split(".")[0] for name in imported_names((ROOT / path).read_text(encoding="utf-8"))}
    assert roots & {"", *BARE} == set()


@pytest.mark.parametrize("path", PACKAGE + OTHERS, ids=str)
def test_files_stay_short(path):
    num_lines = (ROOT / path).read_text(encoding="utf-8").count("\n")
    assert num_lines <= 600


@pytest.mark.parametrize(
    ("path", "source", "complaint"),
    [
        ("fedlight/federation/state.py", "import lightning as L", "lightning: the federation knows"),
        (
            "fedlight/federation/state.py",
            "from fedlight.modules import sft",
            "fedlight.modules.sft: points up",
        ),
        (
            "fedlight/modules/sft.py",
            "def f():\n    from fedlight.callbacks import progress",
            "do not import each",
        ),
        ("fedlight/toy/oracle.py", "import fedlight.cli.main", "fedlight.cli.main: points up"),
        (
            "fedlight/datamodules/text/tokens.py",
            "from fedlight.augmentation import direct",
            "fedlight.augmentation.direct: points up",
        ),
        (
            "fedlight/augmentation/less/less.py",
            "from fedlight.callbacks.progress.progress import x",
            "knows datamodules and modules alone",
        ),
        ("fedlight/modules/sft.py", "import modules.dpo", "import it as fedlight.modules.dpo"),
        ("fedlight/modules/sft.py", "from . import dpo", "import it as fedlight.dpo"),
    ],
)
def test_what_is_wrong_is_found(path, source, complaint):
    assert complaint in " ".join(faults(Path(path), source))


def test_what_is_right_is_not():
    source = "import torch\nfrom fedlight.federation.state import State\nfrom fedlight.callbacks import visit_log\n"
    assert faults(Path("fedlight/callbacks/progress/progress.py"), source) == []
    assert faults(Path("fedlight/cli/main.py"), source + "from fedlight import recipes\n") == []
