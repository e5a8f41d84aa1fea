"""benchmarks/polis.py on a conversation made here: which rows it has, and what it asks of the recipe."""

import json

from tiny_world import write_lines, write_rows

from fedlight.recipes import recipe


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
    methods = ("FedBis", "data")
    assert keys == [(*side, method, seed) for side in sides for method in methods for seed in (0, 1)]
    assert [row["clients"] for row in rows if row["method"] == "data"] == [7] * 8
    assert "<svg" in (tmp_path / "figure.svg").read_text()
    name, output, overrides = asked[1]
    assert (name, output) == ("polis", tmp_path / "runs/one/all")
    folder = tmp_path / "polis/one"
    told = [f"votes={folder / 'votes.jsonl.gz'}", f"statements={folder / 'statements.jsonl.gz'}", "pairs=all"]
    assert overrides == [*told, "model=M", "rounds=3"]


def test_chosen_methods_beside_the_rules(benchmark, tmp_path, monkeypatch):
    pair = {"client": "p", "group": "", "response_a": "tea", "response_b": "coffee", "choice": "a"}

    def run(name, seeds, output, overrides, only):
        assert only == ["fedbis"]
        for stage in ("opinions", "fedbis"):
            (output / "seed3" / stage).mkdir(parents=True)
        (output / "seed3/opinions/done.json").write_text(json.dumps({"result": {"clients": 1}}))
        for side in ("train", "test"):
            write_rows(output / f"seed3/opinions/{side}.jsonl", [pair | {"jury_a": 0.25, "jury_b": 0.75}])
        head = "stage,client,own_accuracy,selector"
        write_lines(output / "seed3/fedbis/clients.csv", head, "own,p,0.75,")

    monkeypatch.setattr(recipe, "run", run)
    rows = benchmark.run(tmp_path / "one", "contested", [3], tmp_path / "runs", [], ["FedBis"])
    own = {row["method"]: row.get("own") for row in rows}
    assert own == {
        "nothing learned": 0.5,
        "the longer statement": 0.0,
        "what the jury likes more": 0.0,
        "Bradley-Terry": 1.0,
        "Bradley-Terry, a factor by person": 1.0,
        "FedBis": 0.75,
        "data": None,
    }
    assert {row["seed"] for row in rows} == {3}
