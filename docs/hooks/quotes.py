"""Quotes the real files: a line that is nothing but such a link becomes the code or the config that it names.

    [code: FedAdam.direction](../fedlight/federation/server.py)     a function, class, method or constant without docstrings
    [config: federated.init_args.algorithm](../conf/selector.yaml)  a key of a config, with its comments
    [recipes: *_table*](../conf/recipes)                            a table of recipes, by the first line of each
    [reference: fedlight.devices](../fedlight/devices)              the public names of a room, by mkdocstrings

On GitHub the line stays a link. A name that is gone ends the build.
"""

import ast
import re
import textwrap
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import yaml

from fedlight.support.lazy import names_in

ROOT = Path(__file__).resolve().parents[2]
QUOTE = re.compile(r"^\[(code|config|recipes|reference): ([^\]]+)\]\(([^)]+)\)$", re.MULTILINE)


class NotThere(LookupError):
    """A page quotes what is not there (any more)."""


def code(source: str, name: str) -> str:
    r"""The lines of a function, class or method without docstrings, moved to the left edge.

    Args:
        source: of a Python file.
        name: with dots for what stands in a class.

    Raises:
        NotThere: the file has no such name.

    Example:
        >>> print(code("class A:\n    def f(self):\n        'Says one.'\n        return 1", "A.f"))
        def f(self):
            return 1
    """
    node: ast.AST = ast.parse(source)
    for piece in name.split("."):
        inside = [child for child in getattr(node, "body", []) if piece in _names(child)]
        if not inside:
            raise NotThere(f"no {piece} of {name}")
        node = inside[0]
    lines = source.splitlines()
    for start, end in reversed([(d.lineno, d.end_lineno) for d in _docstrings(node)]):
        del lines[start - 1 : end]
    first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])
    removed = sum(d.end_lineno - d.lineno + 1 for d in _docstrings(node))
    body = textwrap.dedent("\n".join(lines[first - 1 : node.end_lineno - removed]))
    return re.sub(r"\n\s*\n\s*\n", "\n\n", re.sub(r"(:\n)\n+", r"\1", body))


def _names(node: ast.AST) -> set[str]:
    """What a statement defines."""
    if isinstance(node, ast.Assign):
        return {target.id for target in node.targets if isinstance(target, ast.Name)}
    return {getattr(node, "name", "")}


def _docstrings(node: ast.AST) -> list[Any]:
    """Docstrings in a definition, in their order."""
    kinds = (ast.ClassDef, ast.FunctionDef)
    owners = [child for child in ast.walk(node) if isinstance(child, kinds) and ast.get_docstring(child)]
    return sorted((owner.body[0] for owner in owners), key=lambda found: found.lineno)


def config(source: str, key: str) -> str:
    r"""The lines of a key of a YAML file with its comments, moved to the left edge.

    Args:
        source: of the file.
        key: with dots for keys inside of keys.

    Raises:
        NotThere: the file has no such key.

    Example:
        >>> print(config("a:\n  b:\n    c: 1  # one\n    d: 2\n  e: 3", "a.b"))
        b:
          c: 1  # one
          d: 2
    """
    node = yaml.compose(source)
    first = 0
    for piece in key.split("."):
        found = [(k, v) for k, v in getattr(node, "value", []) if getattr(k, "value", None) == piece]
        if not found:
            raise NotThere(f"no {piece} of {key}")
        first, node = found[0][0].start_mark.line, found[0][1]
    # A block's end mark stands where the next key begins; a plain value's on its own line.
    last = node.end_mark.line if node.end_mark.column == 0 or node.end_mark.line > first else first + 1
    lines = source.splitlines()[first : max(last, first + 1)]
    while len(lines) > 1 and (not lines[-1].strip() or lines[-1].lstrip().startswith("#")):
        lines.pop()
    return textwrap.dedent("\n".join(lines))


def reference(folder: Path, package: str, *names: str) -> str:
    """Return the docstring of a room, those of its public names in full, and a table of its other files.

    Args:
        folder: of the room; its ``__init__.py`` maps names to files in ``_FILES`` that the tables of `fedlight` lack.
        package: dotted name of the room.
        names: public names; where some are given, those alone.

    Raises:
        NotThere: the room does not export a name.
    """
    init = ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))
    listed = [node.value for node in init.body if isinstance(node, ast.Assign) and "_FILES" in _names(node)]
    files = names_in(package, ast.literal_eval(listed[0]) if listed else {})
    if names:
        if missing := [name for name in names if name not in files]:
            raise NotThere(f"{package} does not export {missing[0]}")
        return "\n\n".join(f"::: {package}.{files[name]}.{name}" for name in names)
    parts = [ast.get_docstring(init) or ""]
    # Those of rooms below are on the pages of these.
    parts += [f"::: {package}.{file}.{name}" for name, file in files.items() if "." not in file]
    others = [path for path in sorted(folder.glob("*.py")) if path.stem not in {*files.values(), "__init__"}]
    lines = [f"| `{path.stem}` | {_first_line(path)} |" for path in others if path.stem[0] != "_"]
    parts += ["\n".join(["| file | |", "|---|---|", *lines])] if lines else []
    return "\n\n".join(parts)


def _first_line(path: Path) -> str:
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]


def recipes(folder: Path, pattern: str) -> str:
    """A table of the recipes of a folder whose names match, with the first line of each.

    Raises:
        NotThere: no name matches.
    """
    found = sorted(path for path in folder.glob("*.yaml") if fnmatch(path.stem, pattern))
    if not found:
        raise NotThere(f"no recipe is named {pattern}")
    heads = {path.stem: path.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ") for path in found}
    lines = [f"| `fedlight run {name}` | {head} |" for name, head in heads.items()]
    return "\n".join(["| recipe | what |", "|---|---|", *lines])


def quote(kind: str, name: str, path: Path) -> str:
    """What takes the line's place.

    Raises:
        NotThere: there is no such file or name.
    """
    if not path.exists():
        raise NotThere(f"no {path.name}")
    if kind == "reference":
        return reference(path, *name.split())
    if kind == "recipes":
        return recipes(path, name)
    language, found = (
        ("python", code(path.read_text(encoding="utf-8"), name))
        if kind == "code"
        else ("yaml", config(path.read_text(encoding="utf-8"), name))
    )
    return f'``` {{ .{language} title="{path.relative_to(ROOT)}" }}\n{found}\n```'


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replaces the quoting lines of a page; one with code beside configs has the room of the table of contents."""
    if 'class="beside"' in markdown:
        page.meta["hide"] = ["toc"]
    here = ROOT / "docs" / Path(page.file.src_uri).parent

    def replaced(found: re.Match[str]) -> str:
        try:
            return quote(found[1], found[2], (here / found[3]).resolve())
        except NotThere as error:
            raise NotThere(f"docs/{page.file.src_uri}: {found[0]}: {error}") from error

    return QUOTE.sub(replaced, markdown)
