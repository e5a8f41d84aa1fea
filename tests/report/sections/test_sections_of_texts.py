import json

import numpy as np
import pytest
from charted import charts
from finished import finished
from tiny_world import write_lines

from fedlight.datamodules.instructions.augmentation import Added
from fedlight.datamodules.instructions.augmentation_record import AugmentationRecord
from fedlight.datamodules.vectors.embedding_cache import EmbeddingCache
from fedlight.report.parts import Table
from fedlight.report.sections import coverage, leakage
from fedlight.report.sections.coverage import additions_of, vectors_of
from fedlight.runs.run import read_runs


def tables(section):
    return [part for part in section.parts if isinstance(part, Table)]


def record(folder, name, number, scores=(0.5, 0.6), **settings):
    """Two clients with two rows of their own; each gets ``number`` rows, the first of which both get."""
    own = {client: [{"instruction": f"own {client} {i}", "response": "x"} for i in (0, 1)] for client in "ab"}

    def row(client, i):
        return {"instruction": f"{name} {client if i else ''} {i}", "category": "tea" if i else "jam"}

    scored = [*enumerate(scores)][:number]
    added = {client: [Added(row(client, i), i, score) for i, score in scored] for client in "ab"}
    made = AugmentationRecord(folder)
    made.make_folder()
    made.write({"augmentation": settings}, own, added, ["public"] * number, {})


def run(folder, augmentation_folder):
    folder.mkdir(parents=True, exist_ok=True)
    data = {"init_args": {"augmentation_folder": str(augmentation_folder)}}
    (folder / "config.yaml").write_text(json.dumps({"data": data}))


@pytest.mark.parametrize("module", [coverage, leakage])
def test_nothing_to_say(module, tmp_path):
    run(tmp_path / "run", tmp_path / "none")
    assert module.section(read_runs([tmp_path / "run"])) is None


def test_added_rows_are_counted_drawn_and_never_shown(tmp_path):
    record(tmp_path / "r/seed0/augmentations/dca", "dca", 2, encoder="hashed", alpha=0.7)
    record(tmp_path / "r/seed0/augmentations/none", "none", 0)
    record(tmp_path / "alone/augmentation", "alone", 1, scores=(None,))
    for name in ("dca", "none"):
        run(tmp_path / f"r/seed0/{name}_fedavg", tmp_path / f"r/seed0/augmentations/{name}")
    # the recipe's folder was moved
    run(tmp_path / "r/seed0/dca_fedprox", tmp_path / "moved/augmentations/dca")
    run(tmp_path / "alone", tmp_path / "gone")
    runs = read_runs([tmp_path / "r", tmp_path / "alone"])
    found = coverage.section(runs)
    dca, alone = (line[:5] for line in tables(found)[0].lines)
    assert (dca, alone) == (["r/dca", "2", "4", "3", "0"], ["alone", "2", "2", "1", "0"])
    assert tables(found)[0].lines[0][5] == "tea (67%)"
    drawn = charts(found)
    assert set(drawn) == {"added_map", "added_similarities"}
    assert [row["run"] for row in drawn["added_map"].rows] == [""] * 4 + ["r/dca"] * 3 + ["alone"]
    assert sum(row["rows"] for row in drawn["added_similarities"].rows if row["client"] == "a") == 2
    assert "own a" not in str([drawn[name].rows for name in drawn])


def test_a_map_tells_how_many_runs_it_lacks(tmp_path):
    for number in range(7):
        record(tmp_path / f"r/seed0/m{number}/augmentation", f"m{number}", 1)
        run(tmp_path / f"r/seed0/m{number}", tmp_path / "gone")
    drawn = charts(coverage.section(read_runs([tmp_path / "r"])))["added_map"]
    assert drawn.caption.endswith("1 more runs are not drawn.")


def test_a_damaged_record_is_named_and_left_out(tmp_path):
    record(tmp_path / "one/augmentation", "one", 1)
    record(tmp_path / "two/augmentation", "two", 1)
    for name in ("one", "two"):
        run(tmp_path / name, tmp_path / "gone")
    added = tmp_path / "one/augmentation/added.jsonl"
    added.write_text(added.read_text()[:-9])
    additions, faults = additions_of(read_runs([tmp_path / "one", tmp_path / "two"]))
    assert list(additions) == ["two"]
    assert faults == ["one: the record of added rows is not whole (ValueError) and is left out."]


def test_an_encoders_vectors_are_taken_from_its_cache_and_only_if_all_are_there(tmp_path):
    record(tmp_path / "run/augmentation", "x", 1, encoder="sentences-1")
    cache = str(tmp_path / "cache")
    augmentation = {"init_args": {"encoder": {"init_args": {"model": "m", "cache": cache}}}}
    config = {"data": {"init_args": {"augmentation": augmentation}}}
    (tmp_path / "run/config.yaml").write_text(json.dumps(config))
    additions, _ = additions_of(read_runs([tmp_path / "run"]))
    EmbeddingCache(cache, "sentences-1").add(["u", "v"], np.array([[1.0, 0.0], [0.0, 1.0]], dtype=np.float32))
    vectors, how = vectors_of(["v", "u"], additions)
    assert vectors.tolist() == [[0, 1], [1, 0]]
    assert how == "vectors of sentences-1"
    vectors, how = vectors_of(["v", "w"], additions)
    assert vectors.shape == (2, 384)
    assert how.startswith("hashed words, as no encoder's")


def attacked(folder, canaries, score, own=None):
    """Attacked before training, after round 2 (with two uploads) and after round 4."""
    lines = ["round,target,discoverable_memorization/canaries,discoverable_memorization/left_out"]
    lines += ["0,global,0.1,3", f"2,global,{canaries / 2},3", "2,a,0.2,3", "2,b,0.6,3"]
    lines.append(f"4,global,{canaries},3")
    write_lines(folder / "attacks/attacks.csv", *lines)
    finished(folder, **{"score/kitchen": score}, **({} if own is None else {"own/kitchen/client_mean": own}))


def test_leakage_over_seeds_of_the_model_and_of_uploads_and_what_it_costs(tmp_path):
    attacked(tmp_path / "r/seed0/fedavg", 0.8, 0.5)
    attacked(tmp_path / "r/seed1/fedavg", 0.4, 0.7)
    attacked(tmp_path / "r/seed0/fewfedpit", 0.2, 0.1, own=0.6)
    found = leakage.section(read_runs([tmp_path / "r"]))
    drawn = charts(found)
    rows = drawn["discoverable_memorization_global"].rows
    trained = {("fedavg", 2): 0.3, ("fedavg", 4): 0.6, ("fewfedpit", 2): 0.1, ("fewfedpit", 4): 0.2}
    means = {(row["run"], row["round"]): row["mean"] for row in rows}
    assert means == pytest.approx({("before training", 0): 0.1, **trained})
    uploads = [row for row in drawn["discoverable_memorization_uploads"].rows if row["run"] == "fedavg"]
    assert [(row["round"], row["mean"]) for row in uploads] == [(2, pytest.approx(0.4))]
    assert drawn["trade_off_discoverable_memorization_canaries"].rows == [
        {"run": "fedavg", "leakage": 0.8, "utility": 0.5},
        {"run": "fedavg", "leakage": 0.4, "utility": 0.7},
        {"run": "fewfedpit", "leakage": 0.2, "utility": 0.6},  # of the clients' own models
    ]
    shares = {"before training": "0.100", "fedavg": "0.600", "fewfedpit": "0.200"}
    assert dict(tables(found)[0].lines) == shares


def test_a_damaged_table_of_attacks_is_named(tmp_path):
    attacked(tmp_path / "one", 0.5, 0.5)
    attacked(tmp_path / "two", 0.5, 0.5)
    file = tmp_path / "one/attacks/attacks.csv"
    file.write_text(file.read_text().replace("0.25", "0.2.5"))
    found = leakage.section(read_runs([tmp_path / "one", tmp_path / "two"]))
    assert found.notes == ("one: attacks/attacks.csv cannot be read (ValueError) and is left out.",)
    drawn = charts(found)["discoverable_memorization_global"].rows
    assert {row["run"] for row in drawn} == {"before training", "two"}
