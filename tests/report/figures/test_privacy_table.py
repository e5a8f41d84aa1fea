import re

import pytest
from finished import finished as stage

from fedlight.callbacks.attacks.records import AttackTable
from fedlight.recipes.stages import Stage
from fedlight.report.figures.privacy_table import metric_of, privacy_table, read_attacks


def attacked(folder, attack, found):
    """Writes as the attacks do: by round, then by target."""
    table = AttackTable(folder / "attacks/attacks.csv", attack)
    for number, targets in found.items():
        table.put(number, targets)
    return str(folder)


@pytest.fixture
def runs(tmp_path):
    """Two attacked runs, one of which was attacked before training, and one that keeps its models to its clients."""
    first = tmp_path / "fedavg"
    stage(first, **{"score/domain": 0.5, "loss": 1.0})
    levels = {0: {"global": {"rouge_l": 0.125}}, 2: {"global": {"rouge_l": 0.25}, "c0": {"rouge_l": 0.9}}}
    levels[4] = {"c0": {"rouge_l": 0.5}, "c1": {"rouge_l": 0.75}, "global": {"rouge_l": 0.375}}
    attacked(first, "memory", levels)
    attacked(first, "membership", {0: {"global": {"auc": 0.5}}, 2: {"global": {"auc": 0.75}}})
    second = tmp_path / "fewfedpit"
    stage(second, **{"score/domain": 0.625})
    attacked(second, "memory", {4: {"global": {"rouge_l": 0.25}}})
    third = stage(tmp_path / "locit", **{"score/domain": 0.1, "own/domain/client_mean": 0.3})
    return {"FedAvg": str(first), "FewFedPIT": str(second), "LocIT": third}


def test_each_attack_counts_at_its_last_round(runs, tmp_path):
    arguments = {"methods": runs, "task": "domain", "not_attacked": ["LocIT"]}
    told = {"call": "fedlight.report.figures.privacy_table.privacy_table", "with": arguments}
    done = Stage("table", tmp_path / "table", told).run()["result"]
    assert done["rows"] == [
        {"method": "FedAvg", "utility": 0.5, "memory/rouge_l": 0.375, "membership/auc": 0.75},
        {"method": "FewFedPIT", "utility": 0.625, "memory/rouge_l": 0.25},
        {"method": "LocIT", "utility": 0.3},
    ]
    assert re.search(r"│ LocIT +│ +0\.300 │ +- │ +- │", done["report"])


def test_the_pretrained_model_uploads_and_wins(runs, tmp_path):
    zero = stage(tmp_path / "zero_shot", **{"score/domain": 0.0625})
    shares = {"win": 0.5, "tie": 0.25, "lose": 0.25, "wt": 0.75, "pairs": 8}
    won = [{"method": name, **shares} for name in ("FewFedPIT", "pre-trained")]
    told = {"zero_shot": zero, "wins": stage(tmp_path / "wins", rows=won), "not_attacked": ["LocIT"]}
    told |= {"attacks": {"memory/rouge_l": "leakage"}, "targets": ["global", "uploads"]}
    rows = privacy_table(runs, "domain", **told)["rows"]
    counted = {name: shares[name] for name in ("win", "tie", "lose", "wt")}
    assert rows == [
        {"method": "pre-trained", "utility": 0.0625, **counted, "leakage": 0.125},
        {"method": "FedAvg", "utility": 0.5, "leakage": 0.375, "leakage of uploads": 0.625},
        {"method": "FewFedPIT", "utility": 0.625, **counted, "leakage": 0.25},
        {"method": "LocIT", "utility": 0.3},
    ]


def test_what_is_missing_is_named(runs, tmp_path):
    with pytest.raises(ValueError, match=r"locit/attacks/attacks\.csv: there is no such file"):
        privacy_table(runs, "domain")
    some = {name: runs[name] for name in ("FedAvg", "FewFedPIT")}
    with pytest.raises(ValueError, match="has no metric 'score/other'; it has score/domain, loss: add the"):
        privacy_table(some, "other")
    with pytest.raises(ValueError, match=r"nowhere/done\.json: there is no such file: give the folder of"):
        privacy_table({"x": str(tmp_path / "nowhere")}, "domain")
    with pytest.raises(ValueError, match="no run has 'memory/rouge' for a column 'leakage'; there are none"):
        privacy_table(some, "domain", attacks={"memory/rouge": "leakage"})
    with pytest.raises(ValueError, match=r"targets=\['uploads'\]: no run was attacked on uploads: set"):
        privacy_table({"FewFedPIT": runs["FewFedPIT"]}, "domain", targets=["uploads"])
    with pytest.raises(ValueError, match=r"done\.json: there is no such file"):
        privacy_table(some, "domain", wins=str(tmp_path / "nowhere"))


def test_the_log_of_attacks_is_read_by_target(runs, tmp_path):
    folder = runs["FedAvg"]
    memory = {0: 0.125, 2: 0.25, 4: 0.375}
    assert read_attacks(folder) == {"membership/auc": {0: 0.5, 2: 0.75}, "memory/rouge_l": memory}
    assert read_attacks(folder, "uploads") == {"memory/rouge_l": {2: 0.9, 4: 0.625}}
    assert read_attacks(folder, "c1") == {"memory/rouge_l": {4: 0.75}}
    assert metric_of(read_attacks(folder), "membership/auc", folder) == {0: 0.5, 2: 0.75}
    with pytest.raises(ValueError, match=r"no row of target='c9', but of c0, c1, global: choose one"):
        read_attacks(folder, "c9")
    with pytest.raises(ValueError, match="has no 'memory/exact'; its metrics are membership/auc, memory/r"):
        metric_of(read_attacks(folder), "memory/exact", folder)
    attacked(tmp_path / "one", "membership", {1: {"global": {"auc": float("nan"), "tpr": 0.5}}})
    assert read_attacks(str(tmp_path / "one")) == {"membership/tpr": {1: 0.5}}  # a metric of nothing


def test_a_method_that_the_settings_leave_out_has_no_row(runs, tmp_path):
    methods = {"FedAvg": runs["FedAvg"], "more": str(tmp_path / "nowhere")}
    rows = privacy_table(methods, "domain", if_run=["more", "FedAvg"])["rows"]
    assert [row["method"] for row in rows] == ["FedAvg"]
    with pytest.raises(ValueError, match="nowhere"):
        privacy_table(methods, "domain", if_run=["FedAvg"])
