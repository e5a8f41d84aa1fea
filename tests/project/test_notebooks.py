"""The notebooks: each runs from top to bottom, its last cell has what it says, and none is saved with outputs."""

import ast
import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


def run(name, folder):
    """The value of a notebook's last cell, and the number of its figures."""
    book = nbformat.read(next(path for path in NOTEBOOKS if path.stem == name), as_version=4)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    client = NotebookClient(book, timeout=300, resources={"metadata": {"path": str(folder)}})
    client.execute(env=environment)
    outputs = [output for cell in book.cells for output in cell.get("outputs", [])]
    figures = sum("image/png" in output.get("data", {}) for output in outputs)
    return ast.literal_eval(book.cells[-1].outputs[-1]["data"]["text/plain"]), figures


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_saved_without_outputs(path):
    book = nbformat.read(path, as_version=4)
    nbformat.validate(book)
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in code)
    assert all(len(cell.source.splitlines()) <= 40 for cell in code)


@pytest.mark.slow
def test_fedbiscuit(tmp_path):
    found, figures = run("fedbiscuit", tmp_path)
    assert min(found["fedbis"], found["fedbiscuit"]) > 0.6
    assert (found["clients"], figures) == (40, 1)


@pytest.mark.slow
def test_feddca(tmp_path):
    found, figures = run("feddca", tmp_path)
    assert found["in_domain"]["random"] < 0.5 < found["in_domain"]["FedDCA"]
    assert found["distinct"]["direct retrieval"] < found["distinct"]["FedDCA"]
    assert figures == 1


@pytest.mark.slow
def test_fewfedpit(tmp_path):
    found, figures = run("fewfedpit", tmp_path)
    assert found["survived"] == 64
    assert found["clients"] == 2
    assert max(found["losses"]["synthetic"]) < min(found["losses"]["train"])
    assert figures == 1


@pytest.mark.slow
@pytest.mark.parametrize("is_real", [False, True])
def test_polis(is_real, monkeypatch, tmp_path):
    """One selector cannot serve two camps; of a real conversation the camps are less clear."""
    monkeypatch.delenv("FEDLIGHT_POLIS", raising=False)
    if is_real:
        folder = Path(os.environ.get("FEDLIGHT_SHARED", "none")) / "data/polis/san_juan_farmland"
        if not folder.is_dir():
            pytest.skip("there is no conversation here")
        monkeypatch.setenv("FEDLIGHT_POLIS", str(folder))
    found, figures = run("polis", tmp_path)
    assert found["FedBiscuit"] > found["FedBis"] + (0.05 if is_real else 0.15)
    assert (found["clients"], figures) == (120 if is_real else 79, 2)
