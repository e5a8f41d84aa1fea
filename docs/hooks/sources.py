"""Pages of the files that other pages link: a link to ``../fedlight/cli/main.py`` leads to its text, as on GitHub.

CONTRIBUTING.md and CHANGELOG.md become pages of the site as well.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"\]\(([^)#\s:]+)(#[^)\s]*)?\)")
PAGES = ("CONTRIBUTING.md", "CHANGELOG.md")
LANGUAGES = {".py": "python", ".yaml": "yaml", ".json": "json", ".toml": "toml"}


def outside(page: str, target: str) -> str | None:
    """The path from the repository's root of a linked file that is no page of ``docs``, None for one that is.

    Args:
        page: its path in ``docs``.
        target: as it is written in the link.

    Example:
        >>> outside("papers/feddca.md", "../../fedlight/cli/main.py"), outside("papers/feddca.md", "../results.md")
        ('fedlight/cli/main.py', None)
    """
    found = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), target))
    if found.startswith(("docs/", "..")) or not (ROOT / found).exists():
        return None
    return posixpath.relpath((ROOT / found).resolve(), ROOT)


def page_of(path: str) -> str:
    """Where a file's own page lies, by the file's path from the root."""
    return path if path in PAGES else f"source/{path}.md"


def text_of(path: Path) -> str:
    """The page of a file, or of a folder."""
    name = path.relative_to(ROOT)
    hidden = "---\nsearch: {exclude: true}\nhide: [navigation, toc]\n---\n"
    if path.is_dir():
        inside = sorted(
            entry.name + "/" * entry.is_dir() for entry in path.iterdir() if entry.name[0] not in "._"
        )
        return f"{hidden}# {name}/\n\n" + "".join(f"* `{entry}`\n" for entry in inside)
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return hidden + LINK.sub("]()", text).replace("]()", "]")
    fence = "`" * 6
    return f"{hidden}# {name}\n\n{fence} {LANGUAGES.get(path.suffix, 'text')}\n{text}\n{fence}\n"


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages."""
    for name in PAGES:
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, name, content=_from_root(text)))
    linked = set()
    for file in [file for file in files if file.is_documentation_page()]:
        for target, _ in LINK.findall(file.content_string):
            linked.add(outside(file.src_uri, target))
    for path in sorted(linked - {None, *PAGES}):
        files.append(File.generated(config, page_of(path), content=text_of(ROOT / path)))
    return files


def _from_root(text: str) -> str:
    """A page of the root, moved into ``docs``: its links are seen from there."""

    def moved(found: re.Match[str]) -> str:
        target = found[1]
        to = posixpath.relpath(target, "docs") if target.startswith("docs/") else f"../{target}"
        return f"]({to}{found[2] or ''})"

    return LINK.sub(moved, text)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turns links to files into links to their pages."""
    here = page.file.src_uri

    def turned(found: re.Match[str]) -> str:
        path = outside(here, found[1])
        if path is None or here.startswith("source/"):
            return found[0]
        return f"]({posixpath.relpath(page_of(path), posixpath.dirname(here) or '.')})"

    return LINK.sub(turned, markdown)
