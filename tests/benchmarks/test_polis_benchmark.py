"""benchmarks/polis.py on a conversation made here: which rows it has, and what it asks of the recipe."""

import importlib.util
import json
from pathlib import Path

import pytest

from fedlight.recipes import recipe

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("polis_benchmark", ROOT / "benchmarks" / "polis.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_rows_of_all_conversations_and_pairs(benchmark, tmp_path, monkeypatch):
    for name in ("one", "other"):
        (tmp_path / "polis" / name).mkdir(parents=True)
        (tmp_path / "polis" / name / "votes.jsonl.gz").touch()
    (tmp_path / "polis" / "README").touch()
    asked = []

    def run(name, seeds, output, overrides):
        asked.append((name, output, overrides))
        for seed in seeds:
            folder = output / f"seed{seed}" / "opinions"
            folder.mkdir(parents=True)
            (folder / "done.json").write_text(json.dumps({"result": {"clients": 7}}))
        row = {"method": "FedBis", "own": 0.5, "own_low": 0.25, "own_high": 0.75}
        return {"rows": [{**row, "seed": seed} for seed in seeds]}

    monkeypatch.setattr(recipe, "run", run)
    file = tmp_path / "rows.json"
    places = ["--polis", str(tmp_path / "polis"), "--output", str(tmp_path / "runs"), "--json", str(file)]
    what = ["--seeds", "0", "1", "--pairs", "contested", "all", "--", "rounds=3"]
    benchmark.main([*places, "--model", "M", "--figure", str(tmp_path / "figure.svg"), *what])
    rows = json.loads(file.read_text())["rows"]
    keys = [(row["conversation"], row["pairs"], row["method"], row["seed"]) for row in rows]
    sides = [(name, pairs) for name in ("one", "other") for pairs in ("contested", "all")]
    assert keys == [
        (*side, method, seed) for side in sides for method in ("FedBis", "data") for seed in (0, 1)
    ]
    assert [row["clients"] for row in rows if row["method"] == "data"] == [7] * 8
    assert "<svg" in (tmp_path / "figure.svg").read_text()
    name, output, overrides = asked[1]
    assert (name, output) == ("polis", tmp_path / "runs/one/all")
    folder = tmp_path / "polis/one"
    told = [f"votes={folder / 'votes.jsonl.gz'}", f"statements={folder / 'statements.jsonl.gz'}", "pairs=all"]
    assert overrides == [*told, "model=M", "rounds=3"]
