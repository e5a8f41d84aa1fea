"""Write the page on the coverage of the papers, ``docs/papers/coverage.md``, from ``docs/papers/coverage.toml``.

The record says where each system, table, figure, algorithm and setting is. Values of settings are read from the configs that
it names, so the page cannot say an older one.
"""

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from posixpath import relpath
from typing import Any

import yaml

from published.measurements import ROOT

TOML = ROOT / "docs" / "papers" / "coverage.toml"
PAGE = ROOT / "docs" / "papers" / "coverage.md"
STATES = ("runs here", "written", "left out")
MISSING = object()
KEY = re.compile(r"(?P<file>conf/[\w/.]+\.yaml): (?P<key>[\w.]+)")
HEAD = """# Coverage of the papers

Every system, table, figure and setting of the three papers: the file or command here, the state, and the deviation.
`python benchmarks/reproduce.py render` writes this page from [coverage.toml](coverage.toml), with values of settings
from the configs. States:

* runs here: on small models or the embedded world; [the page of results](../results.md) has the measurements;
* written: code and config are there, and were not run at the paper's size;
* left out.

Settings have three values: the paper's, that of the configs of its size (written, not run at that size), and that of the
method alone, for small models. "-": there is none."""


def load() -> Mapping[str, Mapping[str, Any]]:
    """Read the record of each paper."""
    return tomllib.loads(TOML.read_text(encoding="utf-8"))


def page() -> str:
    """Return the page that the record gives."""
    parts = [HEAD]
    for paper in load().values():
        parts += [f"## {paper['title']}", f"The method, step by step: [{paper['title']}]({paper['page']})."]
        for kind, title in (
            ("system", "Systems"),
            ("table", "Tables"),
            ("figure", "Figures"),
            ("algorithm", "Algorithms"),
        ):
            rows = [
                [str(name), what, _links(where), state, note]
                for name, what, where, state, note in paper[kind]
            ]
            parts += [f"### {title}", _table([kind, "what", "where", "state", "deviation"], rows)]
        rows = [
            [name, _shown(value), _setting(large), _setting(small), note]
            for name, value, large, small, note in paper["setting"]
        ]
        parts += [
            "### Settings",
            _table(["setting", "the paper", "at its size", "method alone", "deviation"], rows),
        ]
    return "\n\n".join(parts) + "\n"


def value(place: str) -> Any:
    """Return the value of a config at ``FILE: KEY``, or the text itself where it names no key.

    Raises:
        ValueError: neither the file nor one that it extends has such a key.

    Example:
        >>> value("conf/methods/fedbis.yaml: model.init_args.lora.rank"), value("805, all")
        (8, '805, all')
    """
    found = KEY.fullmatch(place)
    if found is None:
        return place
    node = _looked_up(ROOT / found["file"], found["key"].split("."))
    if node is MISSING:
        raise ValueError(f"docs/papers/coverage.toml: {place}: there is no such key")
    return node


def _looked_up(file: Path, keys: list[str]) -> Any:
    """Return a value of a config or recipe, or of one that it extends; `MISSING` where none has it."""
    node = config = yaml.safe_load(file.read_text(encoding="utf-8"))
    for key in keys:
        node = node.get(key, MISSING) if isinstance(node, dict) else MISSING
    below = config.get("extends", [])
    for name in reversed([below] if isinstance(below, str) else below):
        if node is MISSING:
            beside = file.parent / name
            node = _looked_up(beside if beside.is_file() else ROOT / "conf" / name, keys)
    return node


def _setting(place: str) -> str:
    found = KEY.fullmatch(place)
    return f"{_shown(value(place))} ({_links(found['file'])})" if found else place


def _links(where: str) -> str:
    """Paths as links, commands as they are typed."""

    def linked(place: str) -> str:
        if place.startswith("fedlight "):
            return f"`{place}`"
        return place if place == "-" else f"[{Path(place).name}]({relpath(place, 'docs/papers')})"

    return ", ".join(map(linked, where.split(", ")))


def _shown(found: Any) -> str:
    if isinstance(found, list):
        return ", ".join(map(_shown, found))
    if found is None:
        return "null"
    return f"`{found}`" if isinstance(found, str) and re.search(r"[*\\$/]", found) else str(found)


def _table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, ["---"] * len(head), *rows])
