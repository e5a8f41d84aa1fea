"""The pure parts of benchmarks/real_votes.py, and that conf/ukpconvarg*.yaml hold out what its fold 0 does."""

import doctest
import json
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf

ROOT = Path(__file__).resolve().parents[2]
DEBATES = (
    "christianity-or-atheism-",
    "evolution-vs-creation",
    "firefox-vs-internet-explorer",
    "human-growth-and-development-should-parents-use-spanking-as-an-option-to-discipline-",
    "if-your-spouse-committed-murder-and-he-or-she-confided-in-you-would-you-turn-them-in-",
    "india-has-the-potential-to-lead-the-world-",
    "is-porn-wrong-",
    "is-the-school-uniform-a-good-or-bad-idea-",
    "personal-pursuit-or-advancing-the-common-good-",
    "should-physical-education-be-mandatory-in-schools-",
    "tv-is-better-than-books",
    "william-farquhar-ought-to-be-honoured-as-the-rightful-founder-of-singapore",
)


def test_examples_of_the_docstrings(benchmark):
    found = doctest.testmod(benchmark)
    assert found.attempted >= 6
    assert found.failed == 0


@pytest.mark.parametrize(("number", "sizes"), [(4, [3, 3, 3, 3]), (5, [3, 3, 2, 2, 2])])
def test_folds_hold_out_every_debate_once(benchmark, number, sizes):
    folds = [benchmark.held_out(DEBATES, fold, number) for fold in range(number)]
    assert [len(fold) for fold in folds] == sizes
    assert sorted(debate for fold in folds for debate in fold) == sorted(DEBATES)
    assert folds[0] == benchmark.held_out(DEBATES, 0)  # which the configs hold out
    for fold, folds_asked in ((4, 4), (0, 13)):
        with pytest.raises(ValueError, match=f"12 debates make {folds_asked} folds"):
            benchmark.held_out(DEBATES, fold, folds_asked)


def test_the_config_holds_out_fold_0(benchmark):
    config = OmegaConf.load(ROOT / "conf/ukpconvarg.yaml")
    values = config["data"]["init_args"]["split"]["holdout"]["values"]
    assert {value.removesuffix("_*") for value in values} == benchmark.held_out(DEBATES, 0)


def pair(name, a, b, choice, **more):
    return {"pair_id": name, "prompt": "p", "response_a": a, "response_b": b, "choice": choice, **more}


def test_rules_and_agreement_on_the_tested_pairs(benchmark):
    gold = [pair("one", "a long one", "short", "a"), pair("two", "x", "y", "b")]
    votes = [
        *(
            pair("one", "short", "a long one", choice, worker=w)
            for w, choice in zip("uvw", "bba", strict=True)
        ),
        pair("two", "x", "y", "a", worker="u"),
        pair("two", "x", "y", "tie", worker="v"),
        pair("other", "not", "tested", "a", worker="u"),
    ]
    found = benchmark.baselines(gold, votes)
    assert found == {
        "longer wins, characters": {"one": 1.0, "two": 0.5},
        "longer wins, words": {"one": 1.0, "two": 0.5},
        # u and v each have one against and one with them, w two against; the pair two has one voter
        "majority of the other workers, on votes": {"one": (0.5 + 0.5 + 0) / 3},
        "a worker's vote, which gold contains": {"one": 2 / 3, "two": 0.0},
    }
    assert set(found) >= {benchmark.LONGER, benchmark.OTHERS}


def test_rows_over_folds_and_seeds(benchmark):
    """Two folds of two debates each, two seeds; a pair counts by its mean over the seeds."""
    debates = [{"p0": "a", "p1": "b"}, {"p2": "c", "p3": "d"}]
    fedbis = {(0, 0): [1, 1], (1, 0): [0, 1], (0, 1): [1, 0], (1, 1): [1, 0.5]}
    runs = [
        {
            "seed": seed,
            "rows": [{"method": "FedBis", "seed": seed, "one_order": 0.5 + 0.1 * fold + 0.2 * seed}],
            "debates": debates[fold],
            "right": {
                "FedBis": dict(zip(debates[fold], right, strict=True)),
                benchmark.LONGER: dict(zip(debates[fold], [1.0, 0.0], strict=True)),
                benchmark.OTHERS: {min(debates[fold]): 0.75},
            },
        }
        for (fold, seed), right in fedbis.items()
    ]
    rows = {row["method"]: row for row in benchmark.over_all(runs)}
    row = rows["FedBis"]
    values = {"p0": 1.0, "p1": 0.5, "p2": 0.5, "p3": 0.75}
    assert row["accuracy"] == np.mean([*values.values()])
    assert (row["pairs"], row["debates"], row["runs"]) == (4, 4, "2, 2")
    assert row["one_order"] == pytest.approx((0.5 + 0.6 + 0.7 + 0.8) / 4)
    assert row["sd_over_seeds"] == pytest.approx(np.std([3 / 4, 2.5 / 4], ddof=1))
    differences = [0.0, 0.5, -0.5, 0.75]
    assert row["over_longer"] == np.mean(differences)
    low, high = benchmark.bootstrap_interval(differences, ["a", "b", "c", "d"])
    assert (row["over_longer_low"], row["over_longer_high"]) == (low, high)
    assert row["pairs_low"] <= row["accuracy"] <= row["pairs_high"]
    assert "over_pooled" not in row  # which was not trained
    assert "over_longer" not in rows[benchmark.OTHERS]  # of votes, not of gold labels
    assert not {"runs", "sd_over_seeds"} & rows[benchmark.LONGER].keys()  # nothing is trained


def test_rows_where_folds_and_seeds_are_missing(benchmark):
    """FedBis has both folds of seed 0 and one of seed 1, pooled training one of seed 0 alone."""
    fold = [{"p0": "a", "p1": "b"}, {"p2": "c"}]
    right = {(0, 0): {"FedBis": [1, 0], "pooled votes": [0, 0]}, (1, 0): {"FedBis": [1]}}
    right |= {(0, 1): {"FedBis": [0, 1]}, (1, 1): {}}
    runs = [
        {
            "seed": seed,
            "rows": [{"method": method, "seed": seed, "one_order": 0.5} for method in of],
            "debates": fold[number],
            "right": {benchmark.LONGER: dict.fromkeys(fold[number], 0.5)}
            | {method: dict(zip(fold[number], map(float, own), strict=True)) for method, own in of.items()},
        }
        for (number, seed), of in right.items()
    ]
    rows = {row["method"]: row for row in benchmark.over_all(runs)}
    assert (rows["FedBis"]["runs"], rows["pooled votes"]["runs"]) == ("2, 1", "1, 0")
    assert rows["FedBis"]["accuracy"] == pytest.approx((0.5 + 0.5 + 1) / 3)
    assert "sd_over_seeds" not in rows["FedBis"]  # the two seeds do not have the same pairs
    # Against pooled training in fold 0 and seed 0 alone, where FedBis has 1 and 0.
    assert (rows["FedBis"]["over_pooled"], rows["FedBis"]["over_pooled_pairs"]) == (0.5, 2)
    assert rows["FedBis"]["over_longer"] == pytest.approx((0 + 0 + 0.5) / 3)
    assert rows["pooled votes"]["over_longer"] == -0.5


def test_finished_methods_are_kept_and_other_settings_refused(benchmark, tmp_path, monkeypatch, capsys):
    gold = [pair(f"{d}{n}", f"{d} {n} more", f"{n}", "a", topic=f"{d}_x") for d in "abcdef" for n in range(3)]
    votes = [{**row, "worker": worker} for row in gold for worker in ("u", "v", "w")]
    for name, rows in (("gold", gold), ("votes", votes)):
        benchmark.write_rows(tmp_path / f"{name}.jsonl", rows)
    trained = []

    def training(options, folder, pairs, *overrides):
        trained.append((options.seed, folder.name))
        return {"accuracy": 0.5, "one_order": 0.5, "steps": 3}, {row["pair_id"]: 0.5 for row in pairs}

    monkeypatch.setattr(benchmark, "train_and_test", training)
    command = ["real_votes", f"--votes={tmp_path / 'votes.jsonl'}", f"--gold={tmp_path / 'gold.jsonl'}"]
    command += [f"--folder={tmp_path / 'runs'}", f"--json={tmp_path / 'rows.json'}"]
    command += ["--workers=2", "--folds=3"]
    for folds, expected in ((["0"], 4), (["0", "1", "2"], 12), (["0", "1", "2"], 12)):
        monkeypatch.setattr("sys.argv", [*command, "--fold", *folds, "--seed=4"])
        benchmark.main()
        assert len(trained) == expected  # FedBis, pooled votes, two workers
    assert {seed for seed, _ in trained} == {4}
    rows = {row["method"]: row for row in json.loads((tmp_path / "rows.json").read_text())}
    assert [*rows][-3:] == ["FedBis", "pooled votes", "a worker alone"]
    assert {rows[name]["pairs"] for name in rows} == {18}
    assert rows["a worker alone"]["accuracy"] == 0.5
    assert rows["FedBis"]["over_longer"] == -0.5
    assert rows[benchmark.OTHERS]["accuracy"] == 1
    assert "| FedBis | 0.500 | [0.500, 0.500] |" in capsys.readouterr().out
    written = json.loads((tmp_path / "rows.json").read_text())
    monkeypatch.setattr("sys.argv", [*command, "--fold", "0", "1", "2", "--seed=4", "--methods"])
    benchmark.main()
    assert (len(trained), json.loads((tmp_path / "rows.json").read_text())) == (12, written)
    monkeypatch.setattr("sys.argv", [*command, "--rounds=3"])
    benchmark.main()  # seed 0 is another folder
    monkeypatch.setattr("sys.argv", [*command, "--rounds=3", "--seed=4"])
    with pytest.raises(ValueError, match=r"fold0_seed4/results\.json was made with other settings: give"):
        benchmark.main()


def test_a_sample_may_have_a_comparison_that_others_leave_out(benchmark):
    debates = {"p0": "a", "p1": "b", "repeated": "b"}
    right = {benchmark.LONGER: {"p0": 1.0, "p1": 0.0}, "a worker alone": {"p0": 0.5, "repeated": 1.0}}
    runs = [{"seed": 0, "rows": [], "debates": debates, "right": right}]
    row = {row["method"]: row for row in benchmark.over_all(runs)}["a worker alone"]
    assert (row["accuracy"], row["pairs"]) == (0.75, 2)
    assert (row["over_longer"], row["over_longer_pairs"]) == (-0.5, 1)
