"""The table of augmentations, from folders written by hand; every number can be worked out."""

import json

import numpy as np
import pytest

from fedlight.datamodules.instructions.augmentation import Added
from fedlight.datamodules.instructions.augmentation_record import AugmentationRecord
from fedlight.datamodules.vectors.encoders import HashedEncoder
from fedlight.recipes.domain_table import domain_table

COLUMNS = {"instruction": "instruction", "input": "input"}
DOMAIN = ["red apples", "green pears", "blue plums", "yellow quinces"]


def fields(text):
    return {"instruction": text, "input": "", "response": "x"}


def record(folder, private, added):
    """``added``: client -> texts; one that begins with + is generated."""
    rows = {
        client: [
            Added(fields(t.lstrip("+")), None if t[0] == "+" else number) for number, t in enumerate(texts)
        ]
        for client, texts in added.items()
    }
    own = {client: [fields(text) for text in texts] for client, texts in private.items()}
    written = AugmentationRecord(folder)
    written.make_folder()
    written.write({}, own, rows, ["public"] * 9, {})
    return str(folder)


def stage(folder, **metrics):
    folder.mkdir()
    (folder / "done.json").write_text(json.dumps({"result": {"metrics": metrics}, "seconds": 1}))
    return str(folder)


@pytest.fixture
def source(tmp_path):
    file = tmp_path / "domain.jsonl"
    file.write_text("".join(json.dumps(fields(text)) + "\n" for text in DOMAIN))
    return str(file)


def covered(texts):
    """Eq. 5, written out."""
    points, vectors = HashedEncoder().encode(DOMAIN), HashedEncoder().encode(texts)
    return float(np.mean([max(float(point @ vector) for vector in vectors) for point in points]))


def test_scores_coverage_and_share_of_the_domain(tmp_path, source):
    private = {"a": ["red apples"], "b": ["red apples"]}
    none = record(tmp_path / "none", private, {})
    some = record(
        tmp_path / "some", private, {"a": ["green pears", "fast cars"], "b": ["green pears", "+ripe plums"]}
    )
    runs = {
        "FedAvg": stage(tmp_path / "avg", **{"score/domain": 0.5}),
        "FedProx": stage(tmp_path / "prox", **{"score/domain": 0.25}),
    }
    zero = stage(tmp_path / "zero", **{"score/domain": 0.0})
    methods = {"none": {"augmentation": none, "runs": runs}, "some": {"augmentation": some, "runs": runs}}
    first, second, third = domain_table(methods, source, COLUMNS, zero_shot=zero)["rows"]
    assert first == {"method": "zero-shot", "FedAvg": 0.0, "FedProx": 0.0}
    assert second == {
        "method": "none",
        "FedAvg": 0.5,
        "FedProx": 0.25,
        "coverage": pytest.approx(covered(["red apples"]), abs=1e-6),
    }
    assert third["in_domain"] == 0.75  # three of four: a generated row counts
    assert third["coverage"] == pytest.approx(covered(["red apples", "green pears", "ripe plums"]), abs=1e-6)
    assert second["coverage"] < third["coverage"] < 1


def test_all_texts_cover_all(tmp_path, source):
    folder = record(tmp_path / "all", {"a": DOMAIN}, {})
    (row,) = domain_table({"all": {"augmentation": folder, "runs": {}}}, source, COLUMNS)["rows"]
    assert row == {"method": "all", "coverage": pytest.approx(1, abs=1e-6)}


def test_overlap_with_a_reference(tmp_path, source):
    """Rows 0 and 1 are the reference's; the other found row 0 alone."""
    private = {"a": ["red apples"]}
    reference = record(tmp_path / "reference", private, {"a": ["green pears", "blue plums"]})
    found = record(tmp_path / "found", private, {"a": ["green pears"]})
    none = record(tmp_path / "none", private, {})
    methods = {name: {"augmentation": f, "runs": {}} for name, f in (("found", found), ("none", none))}
    rows = domain_table(methods, source, COLUMNS, reference=reference)["rows"]
    assert rows[0]["overlap"] == 0.5
    assert "overlap" not in rows[1]


def test_what_is_missing_is_named(tmp_path, source):
    folder = record(tmp_path / "none", {"a": DOMAIN}, {})
    run = stage(tmp_path / "run", loss=1.0)
    with pytest.raises(ValueError, match="has no metric 'score/domain'; it has loss"):
        domain_table({"none": {"augmentation": folder, "runs": {"s": run}}}, source, COLUMNS)
    undone = {"none": {"augmentation": folder, "runs": {"s": str(tmp_path / "no")}}}
    with pytest.raises(
        ValueError, match=r"done\.json: there is no such file: give the folder of a finished stage"
    ):
        domain_table(undone, source, COLUMNS)
    with pytest.raises(ValueError, match=r"added.jsonl: there is no such file"):
        domain_table({"none": {"augmentation": str(tmp_path / "no"), "runs": {}}}, source, COLUMNS)
