import csv
import math

import pytest
from finished import finished as stage
from tiny_world import write_rows

from fedlight.evaluation.bootstrap import bootstrap_interval
from fedlight.recipes.method_table import liars_in_groups, methods, sent_bytes, settings_table
from fedlight.toy.oracle import Oracle

POST = {"prompt": "anna bakes bread . ben reads maps ."}
RAW = ["anna bakes bread ."] * 4
OURS = [
    "anna bakes bread . ben reads maps .",  # thorough and warm prefer it, terse does not
    "duh anna bakes bread .",  # thorough and terse prefer it, warm does not
    "anna bakes bread .",
    "anna bakes pies .",  # nobody prefers what is not in the post
]
SHARES = {"thorough": 0.35, "warm": 0.325, "terse": 0.325}  # 14, 13 and 13 of 40 clients
BY_ANSWER = [SHARES["thorough"] + SHARES["warm"], SHARES["thorough"] + SHARES["terse"], 0.5, 0]


def answers(folder, texts):
    folder.mkdir()
    write_rows(folder / "completions.jsonl", [{"fields": POST, "completions": [text]} for text in texts])
    return str(folder)


def compared(folder, opposition, **settings):
    """Rows of ours and of the raw answers, judged by an oracle."""
    texts = {"raw": RAW, "ours": OURS}
    table = {name: {"answers": answers(folder / name, text)} for name, text in texts.items()}
    raw, ours = methods(table, oracle={"seed": 0, "opposition": opposition}, **settings)["rows"]
    return ours, raw


def write_csv(file, rows):
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", newline="") as opened:
        writer = csv.DictWriter(opened, list(rows[0]), restval="")
        writer.writeheader()
        writer.writerows(rows)


def visits(folder, sent):
    names = ("round", "client", "bytes_down", "bytes_up")
    rows = [dict(zip(names, (n, "c0", *both), strict=True)) for n, both in enumerate(sent)]
    write_csv(folder / "visits.csv", rows)


def test_win_rates_by_all_of_each_group_and_of_the_worst(tmp_path):
    """Thorough wins twice of four with a tie, warm once, terse once; the interval is the bootstrap's of their mean."""
    assert Oracle(0, opposition=1.0).shares == pytest.approx(SHARES)
    ours, raw = compared(tmp_path, opposition=1.0, by_group=True)
    assert raw.items() >= {"method": "raw", "win_rate": 0.5, "win_rate_by_group": 0.5}.items()
    # The mean taste of all likes the first best and neither the second nor the last.
    assert ours["win_rate"] == (1 + 0 + 0.5 + 0) / 4
    assert ours["win_rate_by_group"] == pytest.approx(sum(BY_ANSWER) / 4)
    by_group = {"thorough": 2.5 / 4, "warm": 1.5 / 4, "terse": 1.5 / 4}
    assert {group: ours[f"win_rate_{group}"] for group in by_group} == by_group
    assert ours["worst_group"] == 1.5 / 4
    assert ours["win_rate_by_group"] == pytest.approx(sum(SHARES[g] * by_group[g] for g in SHARES))
    ends = (ours["win_rate_by_group_low"], ours["win_rate_by_group_high"])
    assert ends == pytest.approx(bootstrap_interval(BY_ANSWER))
    ends = (ours["win_rate_warm_low"], ours["win_rate_warm_high"])
    assert ends == pytest.approx(bootstrap_interval([1, 0, 0.5, 0]))
    assert raw["worst_group"] == 0.5
    assert not any(name.endswith(("_low", "_high")) for name in raw)


def test_a_world_of_one_taste_has_one_win_rate_and_a_test_counts_rather_than_a_log(tmp_path):
    row, _ = compared(tmp_path, opposition=0.0)
    assert row["win_rate"] == row["win_rate_by_group"] == (1 + 0 + 0.5 + 0) / 4
    told = {"train": 0.1, "test": 0.9}
    folders = {name: stage(tmp_path / name, **{"test/accuracy": value}) for name, value in told.items()}
    assert methods({"m": folders})["rows"][0]["accuracy"] == 0.9


def test_only_what_was_measured_is_in_a_row(tmp_path):
    table = {
        "nothing": {},
        "tested": {"test": stage(tmp_path / "tested", **{"test/accuracy": 0.75, "test/loss": 0.3})},
        "trained": {"train": stage(tmp_path / "trained", **{"train/loss": 0.1})},
        "raw": {"answers": answers(tmp_path / "raw", RAW)},
    }
    assert methods(table)["rows"] == [
        {"method": "nothing"},
        {"method": "tested", "accuracy": 0.75},
        {"method": "trained", "sent_mib": 0.0},
        {"method": "raw"},
    ]


def test_own_is_what_a_client_itself_would_use(tmp_path):
    everybody = {"test/accuracy": 0.6, "test/client_mean": 0.61, "test/client_worst_tenth": 0.3}
    grouped = {**everybody, "test/own_client_mean": 0.71, "test/own_client_worst_tenth": 0.4}
    alone = {"own/client_mean": 0.55, "own/client_worst_tenth": 0.2, "own/client_std": 0.12}
    table = {
        "global": {"test": stage(tmp_path / "global", **everybody, **{"test/client_std": 0.1})},
        "grouped": {
            "train": stage(tmp_path / "grouped", **{"fed/group_ari": 0.9}),
            "test": stage(tmp_path / "grouped_test", **grouped, **{"test/own_client_std": 0.05}),
        },
        "alone": {"train": stage(tmp_path / "alone", **alone)},
        "reward": {"test": stage(tmp_path / "reward", **{"test/reward_accuracy": 0.66})},
    }
    rows = {row.pop("method"): row for row in methods(table)["rows"]}
    common = {"accuracy": 0.6, "clients": 0.61, "worst_tenth": 0.3}
    assert rows["global"] == {**common, "own": 0.61, "own_worst_tenth": 0.3, "own_spread": 0.1}
    of_own = {"own": 0.71, "own_worst_tenth": 0.4, "own_spread": 0.05}
    assert rows["grouped"] == {**common, **of_own, "groups_ari": 0.9, "sent_mib": 0.0}
    assert rows["alone"] == {"own": 0.55, "own_worst_tenth": 0.2, "own_spread": 0.12, "sent_mib": 0.0}
    assert rows["reward"] == {"accuracy": 0.66}


def test_sent_bytes_are_visits_and_groupings(tmp_path):
    folder = tmp_path / "run"
    stage(folder)
    visits(folder, [(1000, 900), (1000, 900), (500, 476)])
    down, up = "fed/grouping_bytes_down", "fed/grouping_bytes_up"
    write_csv(
        folder / "metrics/version_0/metrics.csv",
        [
            {"epoch": 0, "train/loss": 0.7, down: "", up: ""},
            {"epoch": 0, "train/loss": "", down: 0.0, up: 0.0},
            {"epoch": 1, "train/loss": "", down: 3000.0, up: 30.0},
            {"epoch": 2, "train/loss": "", down: 99999.0, up: 99.0},  # was trained again
        ],
    )
    # The run was resumed after round 1; tenth before second, were versions read as words.
    for version, value in ((2, 12345.0), (10, 6000.0)):
        write_csv(
            folder / f"metrics/version_{version}/metrics.csv",
            [{"epoch": 2, down: value, up: 60.0}, {"epoch": 3, down: 0.0, up: 0.0}],
        )
    expected = (1000 + 900) * 2 + 976 + 3030 + 6060
    assert sent_bytes(folder) == expected
    assert methods({"m": {"train": str(folder)}})["rows"][0]["sent_mib"] == expected / 1024**2


def test_nothing_is_sent_without_visits_and_a_stage_that_was_not_done_is_an_error(tmp_path):
    visits(tmp_path / "fedavg", [(10, 20)])
    assert sent_bytes(tmp_path / "fedavg") == 30
    assert sent_bytes(tmp_path / "pooled") == 0
    with pytest.raises(ValueError, match=r"gone.done\.json"):
        methods({"m": {"test": str(tmp_path / "gone")}})


def test_a_selector_judges_by_its_votes(tmp_path, tiny_model):
    """In both orders a pair and its mirror image sum to one, and equal answers are a tie."""
    from fedlight.modules.selector import SelectorModule

    module = SelectorModule(tiny_model)
    module.configure_model()
    module.save_adapter(tmp_path / "adapter")
    folders = {"a": answers(tmp_path / "a", OURS), "b": answers(tmp_path / "b", RAW)}

    def compared_rows(raw, ours, **options):
        table = {"raw": {"answers": folders[raw]}, "ours": {"answers": folders[ours]}}
        return methods(table, judge=str(tmp_path / "adapter"), model=tiny_model, **options)["rows"]

    def win_rates(raw, ours):
        return [row["win_rate"] for row in compared_rows(raw, ours)]

    there, back = win_rates("b", "a"), win_rates("a", "b")
    assert there[0] == back[0] == 0.5
    assert there[1] + back[1] == pytest.approx(1)
    assert there[1] in [eighth / 8 for eighth in range(9)]
    _, too_long = compared_rows("b", "a", max_tokens=9)
    # Only the pair of equal answers counts, and one pair has no interval.
    assert too_long == {"method": "ours", "win_rate": 0.5, "unread": 3}


def run(folder, sent, errors, **metrics):
    stage(folder, **metrics)
    visits(folder, sent)
    rows = [{"epoch": index, "fed/product_error": error} for index, error in enumerate(errors)]
    write_csv(folder / "metrics/version_0/metrics.csv", rows or [{"epoch": 0}])
    return str(folder)


@pytest.fixture
def runs(tmp_path):
    own = {"score/domain": 0.0, "own/domain/client_mean": 0.25}
    clipped = {"score/domain": 0.875, "fed/epsilon": float("inf")}  # alone, without noise
    noised = {"score/domain": 0.5, "fed/epsilon_local": 5.0, "fed/epsilon_example": 7.0}
    return {
        "FedAvg": {
            "iid": run(tmp_path / "a", [(1024, 2048), (1024, 0)], [0.25, 0.75], **clipped),
            "noise": run(tmp_path / "b", [(1024, 1024)], [], **noised),
        },
        "FedSALoRA": {"iid": run(tmp_path / "c", [(512, 512)], [0.0], **own)},
    }


def test_scores_in_several_settings_or_none(runs):
    score, errors = ["own/domain/client_mean", "score/domain"], {"error": "fed/product_error"}
    assert settings_table(runs, score, errors)["rows"] == [
        {
            "method": "FedAvg",
            **{"iid": 0.875, "noise": 0.5, "error, iid": 0.5},
            **{"kib_up": 1.0, "kib_down": 1.0, "epsilon": 7.0},
        },
        {"method": "FedSALoRA", "iid": 0.25, "error, iid": 0.0, "kib_up": 0.5, "kib_down": 0.5},
    ]
    _, fedsa = settings_table(runs, ["score/domain"], unscored=["FedSALoRA"])["rows"]
    assert fedsa == {"method": "FedSALoRA", "kib_up": 0.5, "kib_down": 0.5}
    with pytest.raises(ValueError, match=r"a has no metric 'own/domain/client_mean'; it has score/domain"):
        settings_table(runs, ["own/domain/client_mean"])
    with pytest.raises(ValueError, match="unscored has 'FedBis', which is no method: FedAvg, FedSALoRA"):
        settings_table(runs, ["score/domain"], unscored=["FedBis"])


def grouped(folder, selectors, **metrics):
    """Folder of a run with FedBiscuit; the first grouping put everybody at selector 0."""
    rows = [{"round": 2, "client": client, "selector": 0} for client in selectors]
    rows += [{"round": 10, "client": client, "selector": u} for client, u in selectors.items()]
    stage(folder, **{f"val/{name}": value for name, value in metrics.items()})
    write_csv(folder / "groups.csv", rows)
    return str(folder)


ACCURACIES = {"accuracy": 0.62} | {f"accuracy_adapter{u}": x for u, x in enumerate((0.66, 0.4, 0.64))}


def test_liars_are_counted_at_the_selector_with_most_of_them(tmp_path):
    selectors = {"a": 1, "b": 1, "c": 1, "d": 0, "e": 2, "f": 2, "g": 0}
    runs = {"lies": grouped(tmp_path / "lies", selectors, **ACCURACIES)}
    table = liars_in_groups(runs, {"lies": {"clients": ["a", "c", "e"]}})
    assert table["rows"] == [
        {
            **{"method": "lies", "liars": 3, "together": pytest.approx(2 / 3)},
            **{"of_group": pytest.approx(2 / 3), "accuracy": 0.62, "accuracy_there": 0.4},
            "accuracy_elsewhere": pytest.approx(0.65),
        }
    ]
    assert "0.667" in table["report"]


def test_the_first_of_selectors_with_as_many_liars_counts_and_without_liars_none(tmp_path):
    runs = {"lies": grouped(tmp_path / "lies", {"a": 2, "b": 0, "c": 1}, **ACCURACIES)}
    (row,) = liars_in_groups(runs, {"lies": {"clients": ["a", "b"]}})["rows"]
    assert (row["together"], row["of_group"], row["accuracy_there"]) == (0.5, 1.0, 0.66)
    metrics = {"accuracy": 0.5, "accuracy_adapter0": 0.5}
    runs = {"lies": grouped(tmp_path / "lies", {"a": 0, "b": 0}, **metrics)}
    (row,) = liars_in_groups(runs, {"lies": {"clients": ["a"]}})["rows"]
    assert (row["together"], row["of_group"]) == (1.0, 0.5)
    assert math.isnan(row["accuracy_elsewhere"])
    folder = grouped(tmp_path / "lies", {"a": 0, "b": 1}, **ACCURACIES)
    with pytest.raises(ValueError, match="no 'lies'"):
        liars_in_groups({"lies": folder}, {})
    with pytest.raises(ValueError, match="no liars"):
        liars_in_groups({"lies": folder}, {"lies": {"share": 0.0}})
