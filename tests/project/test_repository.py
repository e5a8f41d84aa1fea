"""What surrounds the code: workflows call what exists, and facts that stand twice are the same."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import fedlight

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOWS = {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / ".github/workflows").iterdir()}
CONDA = yaml.safe_load((ROOT / ".conda/recipe.yaml").read_text())
CONDA_NAMES = {"torch": "pytorch", "matplotlib": "matplotlib-base"}


def commands(workflow: dict) -> list[str]:
    """Shell lines of all jobs."""
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    return [line.strip() for step in steps for line in step.get("run", "").splitlines()]


@pytest.mark.parametrize("name", sorted(WORKFLOWS))
def test_a_workflow_makes_targets_that_exist_and_says_what_it_may(name):
    workflow = WORKFLOWS[name]
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    for line in commands(workflow):
        if match := re.match(r"make ((?:[a-z-]+ ?)+)(?:[A-Z]+=\S+ ?)*$", line):
            assert set(match[1].split()) <= targets
        else:
            assert not line.startswith("make"), line
    assert workflow["permissions"]["contents"] in {"read", "write"}
    running = [job for job in workflow["jobs"].values() if any("run" in step for step in job["steps"])]
    assert all("timeout-minutes" in job for job in running)


@pytest.mark.parametrize("name", sorted(set(WORKFLOWS) - {"docs"}))  # that of the docs pushes a branch
def test_a_checkout_leaves_no_token_behind(name):
    steps = [step for job in WORKFLOWS[name]["jobs"].values() for step in job["steps"]]
    checkouts = [step for step in steps if step.get("uses", "").startswith("actions/checkout")]
    assert checkouts
    assert all(step["with"]["persist-credentials"] is False for step in checkouts)


def test_what_is_published_is_so_without_a_stored_password():
    (step,) = WORKFLOWS["release"]["jobs"]["publish"]["steps"][1:]
    assert step == {"uses": "pypa/gh-action-pypi-publish@release/v1"}
    assert WORKFLOWS["release"]["jobs"]["publish"]["permissions"] == {"id-token": "write"}
    assert not any("secrets." in path.read_text() for path in (ROOT / ".github/workflows").iterdir())


def test_pythons_and_lower_bounds_are_the_same_everywhere():
    named = [line.split(" :: ")[-1] for line in PROJECT["classifiers"] if re.search(r"Python :: 3\.", line)]
    matrix = WORKFLOWS["tests"]["jobs"]["test"]["strategy"]["matrix"]
    assert matrix["python"] == named
    assert PROJECT["requires-python"] == f">={named[0]}"
    assert matrix["machine"] == ["ubuntu-24.04", "ubuntu-24.04-arm"]
    command = [sys.executable, ROOT / ".github/lowest.py"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert all(re.fullmatch(r"[\w-]+==[\d.]+", line) for line in lines)
    bounds = {re.sub(r"\[.*\]", "", line).replace(">=", "==") for line in PROJECT["dependencies"]}
    assert bounds <= set(lines)
    asked = set(CONDA["requirements"]["run"])
    for requirement in PROJECT["dependencies"]:
        name, bound = re.fullmatch(r"([\w-]+)(?:\[.*\])?(>=[\d.]+)", requirement).groups()
        assert f"{CONDA_NAMES.get(name, name)} {bound}" in asked
    scripts = [f"{name} = {target}" for name, target in PROJECT["scripts"].items()]
    assert CONDA["build"]["python"]["entry_points"] == scripts
    assert CONDA["about"]["summary"] == PROJECT["description"]


def test_version_and_papers_are_cited():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == CONDA["context"]["version"] == fedlight.__version__
    urls = [reference["url"] for reference in citation["references"]]
    readme = (ROOT / "README.md").read_text()
    assert len(urls) == 3
    assert all(f"({url})" in readme for url in urls)


@pytest.mark.parametrize("name", ["llms.txt", "SECURITY.md"])
def test_pages_that_are_linked_exist(name):
    links = re.findall(r"\]\(([^)#:]+)\)", (ROOT / name).read_text())
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_the_container_installs_extras_that_exist():
    text = (ROOT / "Dockerfile").read_text()
    (extras,) = re.findall(r'ARG EXTRAS="([\w,]+)"', text)
    assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])
    assert 'ENTRYPOINT ["fedlight"]' in text


def test_initials_of_the_papers_first_authors_are_those_of_the_citation():
    """Where a text gives one, within the lines that name the paper or its address."""
    command = ["git", "ls-files", "*.py", "*.md", "*.yaml"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    files = [name for name in listed if (ROOT / name).is_file()]
    texts = {name: (ROOT / name).read_text(encoding="utf-8") for name in files}
    seen = 0
    for paper in yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))["references"]:
        first = paper["authors"][0]
        names = "|".join(map(re.escape, [paper["url"], *paper["notes"].split(" and ")]))
        pattern = rf"\b([A-Z])\. {first['family-names']} et al\.(?=.{{0,130}}?(?:{names}))"
        for name, text in texts.items():
            initials = set(re.findall(pattern, text, flags=re.DOTALL))
            seen += len(initials)
            assert initials <= {first["given-names"][0]}, name
    assert seen > 9
