import json

from stage_folders import logged
from tiny_world import write_lines

from fedlight.report import page
from fedlight.report.sections.outcomes import comparison
from fedlight.report.sections.outcomes.answer import answer
from fedlight.runs.run import read_runs

SELECTOR = {"class_path": "fedlight.SelectorModule", "init_args": {"model": "toy"}}
SFT = {"class_path": "fedlight.SFTModule", "init_args": {"model": "toy"}}


def fit(home, name, model, metrics, source="toy:votes", federated=True, rounds=2, done=True):
    """A run of ``fit`` with a value of each metric after each round."""
    config = {
        "trainer": {"max_epochs": rounds},
        "model": model,
        "data": {"class_path": "fedlight.PreferenceDataModule", "init_args": {"source": source}},
        "federated": {"class_path": "fedlight.FederatedLoop"} if federated else None,
    }
    folder = home / name
    write_lines(folder / "config.yaml", json.dumps(config))
    entry = {"command": "fit", "state": "done" if done else "running"}
    (folder / "run.json").write_text(json.dumps({"commands": [entry]}))
    steps = enumerate(zip(*metrics.values(), strict=True))
    rows = [",".join(map(str, [place if federated else 0, place, *values])) for place, values in steps]
    return logged(folder, ",".join(metrics), *rows)


def said(*folders):
    return answer(read_runs(folders))


def test_one_run_says_what_it_reached_or_that_nothing_was_measured(tmp_path):
    run = fit(tmp_path, "selector", SELECTOR, {"val/loss": [0.7, 0.4], "val/accuracy": [0.51, 0.83]})
    assert said(run) == "Validation accuracy 0.830 after round 2, 0.510 after round 1."
    run = fit(tmp_path, "x", SFT, {"val/loss": [0.7, 0.4]}, rounds=9, done=False)
    assert said(run).startswith("Not finished, 2 of 9 rounds: validation loss 0.400 after round 2, 0.700 ")
    run = fit(tmp_path, "x", SFT, {"lr-AdamW": [0.1, 0.2]})
    assert said(run) == "Nothing was measured, fit, FedAvg, SFTModule, toy, 2 rounds."


def test_a_logged_win_rate_and_the_loss_of_an_epochs_first_and_last_tenth(tmp_path):
    metrics = {"win_rate/oracle": [0.5, 0.755], "win_rate_low/oracle": [0.5, 0.72]}
    metrics["win_rate_high/oracle"] = [0.5, 0.792]
    run = fit(tmp_path, "dpo", {"class_path": "fedlight.DPOModule"}, metrics)
    assert said(run) == "Tuned answers win 75.5 % [72.0, 79.2] against the raw model, by oracle."
    losses = [2.0, 1.0, *[0.7] * 16, 0.5, 0.3]
    run = fit(tmp_path, "sft", SFT, {"train/loss": losses}, federated=False, rounds=1)
    assert said(run) == "Loss of training batches 0.400 in the last steps, 1.500 in the first."


def test_losses_of_unlike_modules_and_accuracies_on_unlike_rows_are_not_compared(tmp_path):
    metrics = {"val/loss": [0.7, 0.4], "val/accuracy": [0.5, 0.8]}
    runs = [
        fit(tmp_path, "selector", SELECTOR, metrics),
        fit(tmp_path, "sft", SFT, {"val/loss": [0.9, 0.6]}),
        fit(tmp_path, "elsewhere", SELECTOR, metrics, source="others.jsonl"),
    ]
    assert comparison.section(read_runs(runs)) is None
    assert said(*runs) == (
        "selector: validation accuracy 0.800 after round 2, 0.500 after round 1; "
        "sft: validation loss 0.600 after round 2, 0.900 after round 1; "
        "elsewhere: validation accuracy 0.800 after round 2, 0.500 after round 1."
    )
    (curves,) = [section for section in page.sections(read_runs(runs[:2])) if section.name == "curves"]
    charts = [part.title for part in page.sections(read_runs(runs[:2]))[0].parts if part.kind == "chart"]
    titles = ["Validation accuracy", "Validation loss, SelectorModule", "Validation loss, SFTModule"]
    assert [*charts, *(part.title for part in curves.parts)] == titles


def test_the_same_rows_of_other_seeds_are_compared(tmp_path):
    for seed, gain in enumerate((0.1, 0.11, 0.12)):
        for name, accuracy in (("fedavg", 0.5), ("fedprox", 0.5 + gain)):
            source = f"toy:votes?seed={seed}"
            fit(tmp_path / f"seed{seed}", name, SELECTOR, {"val/accuracy": [0.4, accuracy]}, source=source)
    assert said(tmp_path) == "fedprox: validation accuracy 0.610 against 0.500 of fedavg, beyond noise."


def test_a_lower_loss_is_better(tmp_path):
    losses = {"a": 0.5, "b": 0.4, "c": 0.9}
    runs = [fit(tmp_path, name, SFT, {"val/loss": [2.0, last]}) for name, last in losses.items()]
    told = "b: validation loss 0.400 against 0.500 of a, the best of 3 methods, one seed, so chance is not"
    assert said(*runs) == f"{told} ruled out."


def test_means_are_those_of_the_seeds_that_both_methods_have(tmp_path):
    for name, scores in (("a", (0.6, 0.62)), ("b", (0.63, 0.66, 0.2))):
        for seed, score in enumerate(scores):
            fit(tmp_path / f"seed{seed}", name, SELECTOR, {"val/accuracy": [0.4, score]})
    assert said(tmp_path) == "b: validation accuracy 0.645 against 0.610 of a, within noise."
    (table,) = comparison.section(read_runs([tmp_path])).parts
    assert dict(zip(table.header, table.lines[0], strict=True))["mean"] == "0.645"
    assert table.caption == "Against a, whose mean is 0.610; of what both have."


def test_of_a_task_with_loss_in_its_name_more_is_better(tmp_path):
    for name, score in (("a", 0), ("b", 1)):
        run = fit(tmp_path, name, SFT, {"train/x": [1, 1]})
        lines = [json.dumps({"row": row, "prompt": "p", "score": score}) for row in range(9)]
        write_lines(run / "tasks/epoch_2/glossary.jsonl", *lines)
    assert said(tmp_path).startswith("b: task glossary 1.000 against 0.000 of a")


def test_the_page_opens_with_it_then_a_picture_then_tables(tmp_path):
    run = fit(tmp_path, "selector", SELECTOR, {"val/accuracy": [0.51, 0.83], "val/loss": [0.7, 0.4]})
    first, *others = page.sections(read_runs([run]))
    assert "curves" not in [section.name for section in others]  # whose charts are all in the first
    assert [part.kind for part in first.parts] == ["chart", "chart", "table"]
    text = page.write_report([run]).read_text(encoding="utf-8")
    sentence = text.index('<p class="answer">Validation accuracy 0.830 after round 2, 0.510 after round 1')
    assert sentence < text.index("<figure") < text.index("<table")
