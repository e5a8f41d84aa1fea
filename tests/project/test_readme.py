"""What the pages say is run: Python blocks are executed, commands are parsed by what they would start."""

import importlib
import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", "CONTRIBUTING.md"]
PAGES += [str(page.relative_to(ROOT)) for page in sorted((ROOT / "docs").rglob("*.md"))]


def blocks(language: str) -> list[tuple[str, str]]:
    """(page, block) for every fenced block of a language."""
    texts = ((page, (ROOT / page).read_text(encoding="utf-8")) for page in PAGES)
    fenced = re.compile(rf"^```{language}\n(.*?)^```", re.DOTALL | re.MULTILINE)
    return [(page, block) for page, text in texts for block in fenced.findall(text)]


def commands() -> list[str]:
    """Every command of the bash blocks, without comments, once."""
    written = [line for _, block in blocks("bash") for line in block.splitlines()]
    return sorted({shlex.join(shlex.split(line, comments=True)) for line in written} - {""})


def links() -> list[tuple[str, str]]:
    """(page, target) for every relative link."""
    texts = {page: (ROOT / page).read_text(encoding="utf-8") for page in PAGES}
    link = re.compile(r"\]\(([^)#:]+)\)")
    return sorted({(page, target) for page, text in texts.items() for target in link.findall(text)})


@pytest.mark.parametrize(("page", "block"), blocks("python"), ids=lambda value: value.split("\n")[0][:40])
def test_python_blocks_run(page, block, monkeypatch, tmp_path, tiny_model):
    """Without the checkout on the path, as for somebody who has installed the wheel."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_model").symlink_to(tiny_model)
    exec(compile(block, page, "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("command", commands())
def test_commands_name_what_exists(command, capsys, monkeypatch):
    program, *arguments = shlex.split(command)
    write = "fedlight.report.page.write_report"
    monkeypatch.setattr(write, lambda folders, output, private: Path(folders[0]))
    monkeypatch.setattr("fedlight.runs.run.read_runs", lambda *given: [])
    monkeypatch.setattr("webbrowser.open", lambda url: True)
    if program == "make":
        targets = re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert set(arguments) <= set(targets)
    elif program == "pip":
        assert arguments == ["install", "."]  # in a clone, while there is no release
    elif program == "python":
        assert (ROOT / arguments[0]).is_file()
    elif program in ("fedlight", "torchrun"):
        own = arguments.index("fedlight") + 1 if program == "torchrun" else 0  # behind torchrun's own
        parse_fedlight(arguments[own:])
        assert capsys.readouterr().out
    else:
        assert (program, arguments) == (".venv/bin/pre-commit", ["install"])


def parse_fedlight(arguments: list[str]) -> None:
    """Parses without running: prints the recipe, the help or the complete config, or fails; a plan is really made.

    A report is asked for with what writes it taken out.
    """
    from fedlight.cli.main import main
    from fedlight.recipes.recipe import load

    if arguments[0] == "run" and arguments[1] != "--help":
        print(load(arguments[1], [item for item in arguments[2:] if "=" in item], "--twin" in arguments))
        return
    if arguments[0] in ("plan", "report"):
        main(arguments)
        return
    parsers = {"device": "devices.measure.command", "export": "export.command", "chat": "export.chat"}
    parsers |= {command: f"cli.{command}" for command in ("init", "flower", "client")}
    if arguments[0] in parsers:
        parser = importlib.import_module(f"fedlight.{parsers[arguments[0]]}").make_parser()
        parse = parser.parse_known_args if arguments[0] in ("flower", "client") else parser.parse_args
        print(parse(arguments[1:]))
        return
    if "--help" not in arguments:
        arguments = [*arguments, "--print_config"]
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code in (0, None)


def test_links_and_the_map_lead_somewhere():
    assert len(links()) > 100
    assert [link for link in links() if not ((ROOT / link[0]).parent / link[1]).resolve().exists()] == []
    names = parts_of_the_map()
    assert len(names) >= 10
    places = (ROOT, ROOT / "fedlight")
    assert [name for name in names if not any((place / name).exists() for place in places)] == []


def parts_of_the_map() -> list[str]:
    """Files and folders that the map names in front of their descriptions."""
    text = (ROOT / "docs/map.md").read_text(encoding="utf-8").partition("# Map")[2]
    block = text.partition("```")[2].partition("```")[0]
    lines = re.findall(r"^ *((?:[a-z_]+(?:/|\.py) +)+)", block, re.MULTILINE)
    return [name for line in lines for name in line.split()]


def test_the_readme_is_short_and_says_how_to_install():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 130
    for page in ("README.md", "docs/index.md", "docs/quickstart.md", "docs/own_module.md"):
        assert "\npip install ." in (ROOT / page).read_text(encoding="utf-8"), page
    images = re.findall(r'(?:src|srcset)="([^"]+)"', text)
    assert {Path(image).name for image in images} == {"report.png", "report_dark.png"}
    assert all((ROOT / image).is_file() for image in images)


def test_the_map_has_every_folder_and_no_block_needs_a_checkout():
    named = set(parts_of_the_map())
    inside = [path for place in (ROOT, ROOT / "fedlight") for path in place.iterdir()]
    shown = [path for path in inside if path.is_dir() and not path.is_symlink() and path.name[0] not in "._"]
    folders = [path for path in shown if any(path.rglob("*.py"))]
    generated = {"build/", "dist/", "runs/"}
    assert {f"{path.name}/" for path in folders} - named - generated <= {"docs/"}
    needs = re.compile(r"^\s*(from|import) (examples|benchmarks|tests)\b", re.MULTILINE)
    assert [(page, block) for page, block in blocks("python") if needs.search(block)] == []


def test_every_make_target_of_the_readme_has_help_and_every_benchmark_that_is_made_is_there():
    text = (ROOT / "Makefile").read_text()
    (made,) = re.findall(r"for name in ([\w ]+); do echo", text)
    assert [name for name in made.split() if not (ROOT / f"benchmarks/{name}.py").is_file()] == []
    phony = re.search(r"^\.PHONY: (.*)$", text, re.MULTILINE)
    assert phony
    assert set(phony[1].split()) == set(re.findall(r"^([a-z-]+):.*## ", text, re.MULTILINE))
