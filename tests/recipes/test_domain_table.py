import numpy as np
import pytest
from finished import finished as stage
from tiny_world import write_rows

from fedlight.datamodules.instructions.augmentation import Added
from fedlight.datamodules.instructions.augmentation_record import AugmentationRecord
from fedlight.datamodules.vectors.encoders import HashedEncoder
from fedlight.recipes.domain_table import by_domain_table, differences, domain_table

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


@pytest.fixture
def source(tmp_path):
    return write_rows(tmp_path / "domain.jsonl", [fields(text) for text in DOMAIN])


def covered(texts):
    """Eq. 5, written out."""
    points, vectors = HashedEncoder().encode(DOMAIN), HashedEncoder().encode(texts)
    return float(np.mean([max(float(point @ vector) for vector in vectors) for point in points]))


def test_scores_coverage_and_share_of_the_domain(tmp_path, source):
    private = {"a": ["red apples"], "b": ["red apples"]}
    none = record(tmp_path / "none", private, {})
    added = {"a": ["green pears", "fast cars"], "b": ["green pears", "+ripe plums"]}
    some = record(tmp_path / "some", private, added)
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


def test_overlap_with_a_reference(tmp_path, source):
    """Rows 0 and 1 are the reference's; the other found row 0 alone."""
    private = {"a": ["red apples"]}
    reference = record(tmp_path / "reference", private, {"a": ["green pears", "blue plums"]})
    found = record(tmp_path / "found", private, {"a": ["green pears"]})
    every = record(tmp_path / "all", {"a": DOMAIN}, {})
    methods = {name: {"augmentation": f, "runs": {}} for name, f in (("found", found), ("all", every))}
    rows = domain_table(methods, source, COLUMNS, reference=reference)["rows"]
    assert rows[0]["overlap"] == 0.5
    assert rows[1] == {"method": "all", "coverage": pytest.approx(1, abs=1e-6)}  # nothing was added


def ask(topic, before=""):
    return f"which covers more ? {before}{topic}"


def test_topics_that_were_added_and_no_client_had(tmp_path):
    """Of five topics of kitchen one client knows ``ben bread`` and the other ``eva corn``."""
    texts = [ask(topic) for topic in ("ben bread", "eva corn", "dan pies", "finn beans", "gina cakes")]
    source = write_rows(tmp_path / "kitchen.jsonl", [fields(text) for text in texts])
    private = {"a": [texts[0]], "b": [texts[1]]}
    other = "which sells sounds ? ben hats"  # of another domain
    added = {"a": [texts[1], texts[2], other], "b": [texts[2], "+" + ask("gina cakes", "ben bakes pies . ")]}
    methods = {
        "none": {"augmentation": record(tmp_path / "none", private, {}), "runs": {}},
        "some": {"augmentation": record(tmp_path / "some", private, added), "runs": {}},
    }
    none, some = domain_table(methods, source, COLUMNS, topics="toy")["rows"]
    assert (none["new_topics"], some["new_topics"]) == (0, 2)  # dan pies, and gina cakes in other words
    assert "new_topics" not in domain_table(methods, source, COLUMNS)["rows"][1]
    with pytest.raises(ValueError, match="topics='toys': did you mean 'toy'"):
        domain_table(methods, source, COLUMNS, topics="toys")


def test_each_of_several_domains_is_covered_by_its_own_texts_alone(tmp_path, source):
    """The client's ``blue cars`` would come nearer to ``blue plums`` than its fruit does."""
    cars = write_rows(tmp_path / "cars.jsonl", [fields(text) for text in ("blue cars", "slow cars")])
    own, added = {"a": ["red apples", "blue cars"]}, {"a": ["green pears", "slow cars"]}
    folder = record(tmp_path / "some", own, added)
    run = stage(tmp_path / "run", **{"score/fruit": 0.25, "score/cars": 0.75})
    sources = {"fruit": source, "cars": cars}
    domains = {name: {"source": file, "metric": f"score/{name}"} for name, file in sources.items()}
    methods = {"mixed": {"augmentation": folder, "runs": {"score": run}}}
    both, fruit, of_cars = by_domain_table(methods, domains, COLUMNS)["rows"]
    of_fruit = covered(["red apples", "green pears"])
    assert of_fruit < covered(["red apples", "green pears", "blue cars"])
    assert fruit == {
        "method": "mixed, fruit",
        "score": 0.25,
        "coverage": pytest.approx(of_fruit, abs=1e-6),
        "in_domain": 0.5,
    }
    assert (of_cars["method"], of_cars["score"], of_cars["in_domain"]) == ("mixed, cars", 0.75, 0.5)
    assert of_cars["coverage"] == pytest.approx(1, abs=1e-6)
    assert both == {
        "method": "mixed",
        "score": 0.5,
        "coverage": pytest.approx((of_fruit + 1) / 2, abs=1e-6),
        "in_domain": 0.5,
    }


def test_differences_are_taken_seed_by_seed(tmp_path):
    """Differences of 0.1, 0.2 and 0.3: 0.2 ± 4.303 * 0.1 / sqrt(3), although the scores themselves vary by far more."""
    tables = []
    for seed, (other, ours) in enumerate([(0.1, 0.2), (0.5, 0.7), (0.3, 0.6)]):
        rows = [{"method": "zero-shot", "FedAvg": 0.0}, {"method": "direct", "FedAvg": other}]
        rows.append({"method": "FedDCA", "FedAvg": ours, "new_topics": 3 + seed})
        tables.append(stage(tmp_path / str(seed), rows))
    found = differences(tables, "direct", ["FedAvg", "new_topics"], difference=0.1)
    zero, ours = found["rows"]
    half = 4.302653 * 0.1 / 3**0.5
    assert ours == {
        "method": "FedDCA",
        "FedAvg": pytest.approx(0.2),
        "FedAvg low": pytest.approx(0.2 - half, abs=1e-6),
        "FedAvg high": pytest.approx(0.2 + half, abs=1e-6),
        "FedAvg seeds": 10,  # (2.262 + 0.883) * 0.1 / sqrt(10) is 0.0995; with nine it is 0.1065
    }
    assert zero["method"] == "zero-shot"
    assert zero["FedAvg"] == pytest.approx(-0.3)
    assert "+0.200 [-0.048, +0.448] (10)" in found["report"]
    single = differences(tables[:1], "direct", ["FedAvg"])["rows"][1]
    assert single == {"method": "FedDCA", "FedAvg": pytest.approx(0.1)}
    with pytest.raises(ValueError, match=r"has no method 'directly': give one of zero-shot, direct, FedDCA"):
        differences(tables, "directly", ["FedAvg"])


def test_differences_to_a_column_are_those_of_each_method(tmp_path):
    tables = []
    for seed, (without, noised) in enumerate([(0.5, 0.4), (0.7, 0.6)]):
        rows = [{"method": "SFT", "none": without, "epsilon 1": noised}, {"method": "FedBis", "none": 1.0}]
        tables.append(stage(tmp_path / str(seed), rows))
    [only] = differences(tables, "none", ["epsilon 1"])["rows"]
    assert (only["method"], only["epsilon 1"]) == ("SFT", pytest.approx(-0.1))


def test_what_is_missing_is_named(tmp_path, source):
    folder = record(tmp_path / "none", {"a": DOMAIN}, {})
    run = stage(tmp_path / "run", loss=1.0)
    with pytest.raises(ValueError, match="has no metric 'score/domain'; it has loss"):
        domain_table({"none": {"augmentation": folder, "runs": {"s": run}}}, source, COLUMNS)
    undone = {"none": {"augmentation": folder, "runs": {"s": str(tmp_path / "no")}}}
    with pytest.raises(ValueError, match=r"done\.json: there is no such file: give the folder of a fin"):
        domain_table(undone, source, COLUMNS)
    with pytest.raises(ValueError, match=r"added.jsonl: there is no such file"):
        domain_table({"none": {"augmentation": str(tmp_path / "no"), "runs": {}}}, source, COLUMNS)


def test_several_metrics_of_one_run_are_columns(tmp_path, source):
    none = record(tmp_path / "none", {"a": ["red apples"]}, {})
    tuned = stage(tmp_path / "tuned", **{"score/domain": 0.5, "test/loss": 2.0})
    raw = stage(tmp_path / "raw", **{"score/domain": 0.25, "test/loss": 3.0})
    arguments = {"methods": {"none": {"augmentation": none, "runs": tuned}}, "source": source}
    metric = {"right": "score/domain", "loss": "test/loss"}
    rows = domain_table(**arguments, columns=COLUMNS, zero_shot=raw, metric=metric)["rows"]
    assert rows[0] == {"method": "zero-shot", "right": 0.25, "loss": 3.0}
    assert {name: rows[1][name] for name in metric} == {"right": 0.5, "loss": 2.0}
    with pytest.raises(ValueError, match="give a folder for each column, or metric as column -> name"):
        domain_table(**arguments, columns=COLUMNS)
    arguments["methods"]["none"]["runs"] = {"right": tuned}
    with pytest.raises(ValueError, match="give runs as one folder"):
        domain_table(**arguments, columns=COLUMNS, metric=metric)
