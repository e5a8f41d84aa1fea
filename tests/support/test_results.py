import json
from types import SimpleNamespace

import pytest
from finished import finished
from stage_folders import stage_folder
from tiny_world import write_rows

from fedlight.callbacks.export.card_facts import CardFacts, scores_of
from fedlight.callbacks.export.model_card import card_text
from fedlight.export import write
from fedlight.judges.finding import finding
from fedlight.recipes import steps
from fedlight.report.sections import overview
from fedlight.runs.run import read_runs
from fedlight.support.results import at_chance, cells, chance_notes, show, summary

ENDS = {"both_orders_low": 0.37, "both_orders_high": 0.53}
RAW = {
    **{"method": "raw", "seed": 0, "selector_accuracy": 0.5, "both_orders": 0.225},
    **{"both_orders_low": 0.15, "both_orders_high": 0.3, "win_rate_by_selector": 0.5},
}
FEDBIS = {
    **{"method": "FedBis", "seed": 0, "selector_accuracy": 0.5, "both_orders": 0.45, **ENDS},
    **{"win_rate_by_selector": 0.812, "win_rate_by_selector_low": 0.75, "win_rate_by_selector_high": 0.87},
    "labelled": 200,
}
LONGER = {"method": "longer wins", "seed": 0, "both_orders": 0.6}
LONGER |= {"both_orders_low": 0.52, "both_orders_high": 0.68}
NOTE = (
    "FedBis: its selector is not shown to beat chance (both orders 0.450 [0.370, 0.530]): its labels, the models tuned "
    "on them and its win rates are worthless."
)


def test_labels_and_win_rates_of_a_selector_at_chance_are_marked_and_of_no_other():
    header, lines = cells([RAW, FEDBIS, LONGER])
    table = {line[0]: dict(zip(header, line, strict=True)) for line in lines}
    assert table["FedBis"] == {
        "method": "FedBis",
        "selector accuracy": "0.500",
        "both orders": "0.450 [0.370, 0.530]",
        "win rate by selector": "0.812 [0.750, 0.870] (worthless)",
        "labelled": "200 (worthless)",
    }
    assert not any("worthless" in cell for name in ("raw", "longer wins") for cell in table[name].values())
    assert chance_notes([RAW, FEDBIS, LONGER]) == [NOTE]
    better = {**FEDBIS, "both_orders_low": 0.501}
    assert not at_chance([better])
    assert chance_notes([RAW, better]) == []
    assert "worthless" not in str(cells([RAW, better]))
    # 0.52 of two seeds
    assert not at_chance([{**FEDBIS, "both_orders_low": 0.49}, {**FEDBIS, "both_orders_low": 0.55}])
    assert at_chance([{"both_orders_low": 0.5}])
    assert not at_chance([{"method": "raw", "both_orders": 0.225}])  # no interval is known


def test_the_sentence_does_not_quote_its_win_rate():
    better = {**FEDBIS, **dict.fromkeys(ENDS, 0.6)}
    assert finding([RAW, better]).startswith("FedBis: tuned answers win 81.2 %")
    text = finding([RAW, FEDBIS, LONGER])
    assert "81.2" not in text
    best = "longer wins has the best accuracy in both orders of 3 methods"
    assert text.startswith(f"{best}: 0.600 against 0.225 of raw")


def test_it_is_printed_and_written_and_values_without_a_spread_are_shown(tmp_path, capsys):
    results = {"recipe": "fedbis", "rows": [RAW, FEDBIS], "seconds": 1.0}
    show(results, tmp_path)
    assert f"warning: {NOTE}" in capsys.readouterr().out
    assert (tmp_path / "results.md").read_text().endswith(f"\n\n{NOTE}\n")
    rows = [{"method": "m", "seed": seed, "epsilon": float("inf")} for seed in (0, 1)]
    assert summary(rows) == {"m": {"epsilon": "inf"}}


def test_the_report_says_it(tmp_path):
    (tmp_path / "results.json").write_text(json.dumps({"recipe": "fedbis", "rows": [RAW, FEDBIS]}))
    stage_folder(tmp_path / "seed0/selector")
    made = overview.section(read_runs([tmp_path]))
    assert any(note.endswith(NOTE) for note in made.notes)
    tables = [part.lines for part in made.parts if hasattr(part, "lines")]
    assert "0.812 [0.750, 0.870] (worthless)" in tables[0][1]
    opened = SimpleNamespace(run=SimpleNamespace(home=tmp_path), algorithm=None)
    assert write._of_run(opened) == [NOTE]  # on the card of its models


@pytest.mark.parametrize(("low", "says"), [(0.5, True), (0.51, False)])
def test_the_card_says_it(low, says):
    name = "val/accuracy_both_orders"
    scores = scores_of({name: 0.6, f"{name}_low": low, f"{name}_high": 0.7})
    facts = CardFacts("SelectorModule", "owner/name", "FedAvg", scores=scores)
    text = card_text(facts, "LoRA adapter", "Load it.")
    assert ("is not shown to beat chance" in text) == says


def test_the_table_of_a_recipe_has_both_orders_and_the_longer_answer(tmp_path):
    def tested(name, **metrics):
        return finished(tmp_path / name, **{f"test/{metric}": value for metric, value in metrics.items()})

    ends = {"accuracy_both_orders_low": 0.37, "accuracy_both_orders_high": 0.53}
    tests = {
        "raw": tested("raw", accuracy=0.5),
        "FedBis": tested("own", accuracy=0.5, accuracy_both_orders=0.45, **ends),
    }
    rules = {"longer wins": tested("longer", accuracy=0.6, accuracy_both_orders=0.6)}
    label = finished(tmp_path / "label", **{"label/pairs": 7, "label/too_long": 2})
    duel = [{"fields": {"prompt": "x"}, "completions": ["u", "v"]}]
    votes = [{"index": 0, "order": order, "logp_a": -1.0 - order, "logp_b": -2.0 + order} for order in (0, 1)]
    files = [write_rows(tmp_path / f"{name}.jsonl", own) for name, own in (("duel", duel), ("votes", votes))]
    table = steps.compare_by_selector(tests, *files, label, rules=rules)["rows"]
    assert [row.get("both_orders") for row in table] == [None, 0.45, 0.6]
    assert (table[1]["both_orders_low"], table[1]["both_orders_high"]) == (0.37, 0.53)
    assert chance_notes(table) == [NOTE]
