"""The documentation: what it quotes is there, its equations are MathML, its configs parse, every page can be reached."""

import doctest
import importlib
import importlib.util
import re
import sys
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import yaml

from fedlight.lightning_cli.class_names import CLASS_FILES, class_of
from fedlight.support.lazy import names_in

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
SHOWN = [*PAGES, ROOT / "README.md"]
TEXTS = {str(page.relative_to(ROOT)): page.read_text(encoding="utf-8") for page in SHOWN}
YAML_BLOCKS = [
    pytest.param(block, id=f"{page}-{number}")
    for page, text in TEXTS.items()
    for number, block in enumerate(re.findall(r"^```yaml\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
]
COMMAND = re.compile(r"`(fedlight [a-z]+ [^`\n]+)`")
INLINE = sorted({command for text in TEXTS.values() for command in COMMAND.findall(text)})
PROGRAMS = sorted({name for text in TEXTS.values() for name in re.findall(r"benchmarks/\w+\.py", text)})


@cache
def hook(name: str) -> ModuleType:
    """One of the small programs that mkdocs runs, which are not importable by a name."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / "hooks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def page(name: str) -> SimpleNamespace:
    """What the hooks need of mkdocs' pages."""
    return SimpleNamespace(file=SimpleNamespace(src_uri=name), meta={})


@pytest.mark.parametrize("name", ["equations", "quotes", "sources"])
def test_examples_in_the_hooks(name):
    results = doctest.testmod(hook(name))
    assert results.attempted >= 1
    assert results.failed == 0


@pytest.fixture
def docs_hook():
    """The hook that compares pages with records, and the modules that it brings along."""
    before = set(sys.modules), list(sys.path)
    yield hook("published")
    sys.path[:] = before[1]
    for name in set(sys.modules) - before[0]:
        if name.partition(".")[0] == "published":
            del sys.modules[name]


@pytest.mark.slow  # every table from its record
def test_the_build_refuses_pages_and_verdicts_that_records_do_not_give(docs_hook, monkeypatch):
    docs_hook.on_pre_build(None)
    from published import claims, papers

    with monkeypatch.context() as m, pytest.raises(docs_hook.NotAsRecorded, match=r"coverage\.md is not"):
        m.setattr(papers, "page", lambda: "another")
        docs_hook.on_pre_build(None)
    fault = "A is better: **holds** needs an interval"
    monkeypatch.setattr(claims, "contradictions", lambda table: iter([fault]))
    with pytest.raises(docs_hook.NotAsRecorded, match="table claims: A is better"):
        docs_hook.on_pre_build(None)


def test_all_that_a_page_quotes_is_there():
    """The hook raises where a name is gone, with the page; and none of its lines stays a link."""
    quotes = hook("quotes")
    for path in PAGES:
        made = quotes.on_page_markdown(path.read_text(encoding="utf-8"), page(str(path.relative_to(DOCS))))
        assert quotes.QUOTE.search(made) is None, path


def test_a_quoted_function_has_its_lines_and_decorators_and_no_docstrings():
    text = (ROOT / "modules/functional.py").read_text(encoding="utf-8")
    assert hook("quotes").code(text, "choice_loss") == (
        "def choice_loss(logits: Tensor, labels: Tensor) -> Tensor:\n"
        '    return functional.cross_entropy(logits.float(), labels, reduction="none")  # eq. 3'
    )
    head, inner = 'class A:\n    @property\n    def b(self):\n        """Says."""\n', "            'Inner.'\n"
    source = f"{head}        def c():\n{inner}            return 1\n        return c"
    left = "@property\ndef b(self):\n    def c():\n        return 1\n    return c"
    assert hook("quotes").code(source, "A.b") == left


@pytest.mark.parametrize("name", ["choice_losses", "A.b"])
def test_a_name_that_is_gone_ends_the_build(name):
    line = f"[code: {name}](../modules/functional.py)"
    with pytest.raises(LookupError, match=r"docs/index.md: .*: no "):
        hook("quotes").on_page_markdown(line, page("index.md"))


def test_a_quoted_key_ends_where_the_next_begins():
    source = "a:\n  b: 1  # one\n  c: [1, 2]\n\n# of d\nd: 2\n"
    quoted = [hook("quotes").config(source, key) for key in ("a", "a.b", "a.c", "d")]
    assert quoted == ["a:\n  b: 1  # one\n  c: [1, 2]", "b: 1  # one", "c: [1, 2]", "d: 2"]


@pytest.mark.parametrize(
    "path",
    [path for path in PAGES if path.parent.name == "papers" and path.stem != "coverage"],
    ids=lambda path: path.stem,
)
def test_papers_show_equations_configs_and_code(path):
    text = path.read_text(encoding="utf-8")
    kinds = [found[0] for found in hook("quotes").QUOTE.findall(text)]
    assert min(kinds.count("code"), kinds.count("config")) >= 4
    assert text.count("\n$$\n") >= 4


def test_equations_become_mathml_without_leftovers():
    marked = r'<div class="arithmatex">\[\frac{a}{b} &lt; 1\]</div> <span class="arithmatex">\(p_m\)</span>'
    made = hook("equations").on_page_content(marked)
    assert made.count("<math") == 2
    assert "<mfrac><mi>a</mi><mi>b</mi></mfrac>" in made.replace("<mrow>", "").replace("</mrow>", "")
    assert "arithmatex" not in made


def test_every_page_is_in_the_navigation_and_links_lead_to_pages():
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    listed = re.findall(r"([\w/]+\.md)", text)
    pages = [str(path.relative_to(DOCS)) for path in PAGES]
    assert sorted(listed) == sorted([*pages, "CHANGELOG.md", "CONTRIBUTING.md"])
    links = "[a](../../fedlight/cli/main.py) [b](../results.md)"
    turned = hook("sources").on_page_markdown(links, page("papers/feddca.md"))
    assert turned == "[a](../source/fedlight/cli/main.py.md) [b](../results.md)"


def test_every_public_name_is_in_the_reference_once():
    text = "".join(path.read_text(encoding="utf-8") for path in sorted((DOCS / "reference").glob("*.md")))
    shown = []
    for link in re.findall(r"^\[reference: (.*)\]\(.*\)$", text, re.MULTILINE):
        room, *names = link.split()
        files = names_in(room, getattr(importlib.import_module(room), "_FILES", {})).items()
        shown += [f"{room}.{name}" for name in names or [name for name, file in files if "." not in file]]
    listed = [f"fedlight.{file.rpartition('.')[0]}.{name}" for name, file in CLASS_FILES.items()]
    assert len(shown) == len(set(shown))
    assert set(listed) <= set(shown)


def test_every_room_is_in_the_reference():
    text = "".join(path.read_text(encoding="utf-8") for path in (DOCS / "reference").glob("*.md"))
    paths = re.findall(r"^\[reference: .*\]\((.*)\)$", text, re.MULTILINE)
    referred = {(DOCS / "reference" / path).resolve() for path in paths}
    folders = {
        path.parent
        for place in ("fedlight", "modules", "datamodules", "callbacks")
        for path in (ROOT / place).rglob("*.py")
        if path.stem != "__init__"
    }
    assert folders - {ROOT / "fedlight"} == referred


def test_inline_commands_and_programs_name_what_exists():
    """Those of the blocks are parsed in full by tests/project/test_readme.py."""
    from fedlight.cli.main import COMMANDS
    from fedlight.conf import path as conf_path

    for command in INLINE:
        words = command.split()
        if words[1] == "run" and words[2].isidentifier() and words[2].islower():
            assert conf_path(f"recipes/{words[2]}.yaml").is_file(), command
        configs = [word for word in words if word.endswith(".yaml") and word != "mine.yaml"]
        assert all(conf_path(config).is_file() for config in configs), command
        assert words[1] in COMMANDS, command
    assert [program for program in PROGRAMS if not (ROOT / program).is_file()] == []


@pytest.mark.parametrize("block", YAML_BLOCKS)
def test_configs_in_the_pages_parse(block, tmp_path, capsys):
    """One that begins with "on top of X" is read after X; of the others every class takes the arguments given."""
    from fedlight.cli.main import main

    below = re.match(r"# .*on top of (\S+)\n", block)
    if below:
        (tmp_path / "mine.yaml").write_text(block, encoding="utf-8")
        with pytest.raises(SystemExit) as end:
            main(["fit", "--config", below[1], "--config", str(tmp_path / "mine.yaml"), "--print_config"])
        assert end.value.code in (0, None)
        assert capsys.readouterr().out
    else:
        check_classes(yaml.safe_load(block))


def check_classes(node: object) -> None:
    """Every ``class_path`` in it is a class that has its ``init_args``."""
    if isinstance(node, dict):
        if "class_path" in node:
            made = class_of(node["class_path"])
            assert made is not None, node["class_path"]
            assert set(node.get("init_args", {})) <= set(made.__init__.__code__.co_varnames)
        for value in node.values():
            check_classes(value)
    elif isinstance(node, list):
        for value in node:
            check_classes(value)
