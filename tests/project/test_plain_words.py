"""A finished page puts the subject first, and at most one of its sentences in a hundred has an idiom below.

A match is only a hint: rewrite the sentence, and add a page to ``DONE`` once it passes.
"""

import ast
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIMIT = 0.01
DONE = (
    "agents",
    "architecture",
    "conformance",
    "deployment",
    "devices",
    "export",
    "from_torch",
    "from_trl",
    "index",
    "judges",
    "map",
    "notebooks",
    "own_algorithm",
    "own_data",
    "own_module",
    "privacy",
    "processes",
    "quickstart",
    "real_votes",
    *("recipes", "reports", "reproduction", "side_by_side", "stability", "threats", "watching"),
    *("papers/coverage", "papers/fedbiscuit", "papers/feddca", "papers/fewfedpit"),
    *("../README", "../CONTRIBUTING", "../SECURITY", "../CHANGELOG"),
    *("algorithms", "results", "results/fedbiscuit", "results/feddca", "results/fewfedpit", "results/system"),
)
ROOMS = (
    *("benchmarks", "callbacks", "datamodules", "examples", "modules"),
    *sorted(f"fedlight/{file.parent.name}" for file in (ROOT / "fedlight").glob("*/__init__.py")),
)
"""Folders of code, whose docstrings, comments and pages are checked."""
IDIOMS = {
    "a preposition before a relative": r"\b(?:at|behind|by|for|from|in|of|on|to|with) (?:which|whom|whose)\b",
    "a clause as a noun": r"\bwhat (?:a|clients?|each|has|is|it|its|of|the|they|was)\b",
    "a person as a clause": r"\b(?:who|whoever) (?:asks|does|gets|has|is|stops|trains|was)\b",
    "an appended comparison": r", as (?:a|each|it|its|no|the|there|these|they|this|those)\b",
    "nobody": r"\bnobody\b|\bnothing of\b",
    "said": r"\b(?:are|is) said\b|\bsaid of\b",
    "of its own": r"\bof (?:its|one's|their) own\b",
    "stands": r"\b(?:stands?|stood) (?:at|behind|beside|in|on|there)\b",
}
FOUND = re.compile("|".join(IDIOMS.values()), re.IGNORECASE)


def prose(path: Path) -> list[str]:
    """The text without code: of a page its paragraphs, of a Python file its docstrings and comments."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        text = re.sub(r"^( *)```.*?^\1```", "", text, flags=re.DOTALL | re.MULTILINE)
        text = re.sub(r"<!-- table:.*?<!-- end -->", "", text, flags=re.DOTALL)
        return [re.sub(r"^ *\|.*$", "", text, flags=re.MULTILINE)]
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [ast.get_docstring(node) or "" for node in ast.walk(ast.parse(text)) if isinstance(node, kinds)]
    with path.open("rb") as file:
        tokens = [*tokenize.tokenize(file.readline)]
        comments = [token.string for token in tokens if token.type == tokenize.COMMENT]
    return found + comments


def sentences(text: str) -> list[str]:
    """Parts that end in a full stop, a colon, a semicolon or an empty line, of three words or more."""
    return [part for part in re.split(r"(?<=[.:;])\s+|\n\s*\n", text) if len(part.split()) > 2]


@pytest.mark.parametrize("idiom", ["the file in which it is", "a key of its own", "What the server learns"])
def test_an_idiom_is_found(idiom):
    assert FOUND.search(idiom)


def test_code_and_tables_are_not_read(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("One plain sentence.\n\n| what it is | b |\n\n```\nwhat it is not\n```\n")
    assert [part.strip() for text in prose(page) for part in sentences(text)] == ["One plain sentence."]
    code = tmp_path / "code.py"
    code.write_text('"""Return the sum of two."""\nwhat_it_is = 1  # the sum, what it is\n')
    assert [bool(FOUND.search(text)) for text in prose(code)] == [False, True]


def check(*paths: Path) -> None:
    """Fail with the matches where their share of all sentences is above the limit."""
    texts = [text for path in paths for text in prose(path)]
    parts = [" ".join(part.split()) for text in texts for part in sentences(text)]
    matches = [part for part in parts if FOUND.search(part)]
    assert len(matches) <= LIMIT * len(parts), "\n".join(matches)


@pytest.mark.parametrize("name", DONE)
def test_a_finished_file_is_in_plain_words(name):
    check(ROOT / (name if name.endswith(".py") else f"docs/{name}.md"))


@pytest.mark.parametrize("room", ROOMS)
def test_a_finished_room_is_in_plain_words(room):
    paths = [path for ending in ("py", "md") for path in sorted((ROOT / room).rglob(f"*.{ending}"))]
    assert paths
    check(*paths)
