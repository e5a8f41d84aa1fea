import json

from fedlight.report.page import write_report
from fedlight.report.sections import answers, clients, configuration, curves, overview
from fedlight.report.sections.outcomes import tasks
from fedlight.runs.run import read_runs

FIT = {"stage": "fit selector.yaml"}


def stage(home, name, seed=0, settings=FIT, **files):
    """A folder of a recipe with the given files, ``visits`` for visits.csv and so on."""
    folder = home / f"seed{seed}" / name
    folder.mkdir(parents=True)
    (folder / "settings.json").write_text(json.dumps(settings))
    for file, text in files.items():
        (
            folder / file.replace("_csv", ".csv").replace("_jsonl", ".jsonl").replace("_json", ".json")
        ).write_text(text)
    return folder


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_curves_are_means_over_rounds_and_over_seeds(tmp_path):
    for seed in (0, 1):
        folder = stage(tmp_path, "fedavg", seed) / "metrics" / "version_0"
        folder.mkdir(parents=True)
        text = f"epoch,step,val/accuracy\n0,0,{0.25 + seed}\n0,1,{0.75 + seed}\n1,2,1\n2,3,1\n"
        (folder / "metrics.csv").write_text(text)
    (chart,) = curves.section(read_runs([tmp_path])).parts
    assert chart.name == "curve_val_accuracy_epoch"
    rows = [[row[name] for name in ("epoch", "mean", "low", "high", "seeds")] for row in chart.rows]
    assert rows[0] == [1.0, 1.0, 0.5, 1.5, 2]
    assert rows[-1][:4] == [3.0, 1.0, 1.0, 1.0]


def test_without_a_logger_visits_and_tasks_tell_the_curves(tmp_path):
    visits = "round,client,split,steps,loss\n0,a,train,1,4\n0,b,train,3,8\n0,c,train,0,\n1,a,train,2,1\n"
    folder = stage(tmp_path, "feddca", visits_csv=visits)
    for moment, score in (("start", 0.25), ("epoch_2", 0.5), ("test", 0.9)):
        (folder / "tasks" / moment).mkdir(parents=True)
        (folder / "tasks" / moment / "scores.json").write_text(
            json.dumps({"score/domain": score, "stderr/domain": 0})
        )
    (run,) = read_runs([tmp_path])
    assert curves.curves(run).metrics == {
        "fed/loss": {1.0: 7.0, 2.0: 1.0},
        "score/domain": {0.0: 0.25, 2.0: 0.5},
    }


def test_losses_of_two_kinds_of_rows_are_two_curves(tmp_path):
    visits = "round,client,split,steps,loss\n0,a,train,1,4\n0,a,synthetic,1,8\n"
    stage(tmp_path, "fewfedpit", visits_csv=visits)
    (run,) = read_runs([tmp_path])
    assert curves.visit_losses(run) == {"fed/loss/train": {1.0: 4.0}, "fed/loss/synthetic": {1.0: 8.0}}


def test_clients_are_sorted_and_the_worst_tenth_is_told(tmp_path):
    header = "stage,round,client,examples,group,selector,accuracy,own_accuracy\n"
    old = "".join(f"val,0,c{n},10,,0,0,\n" for n in range(20))
    new = "".join(f"test,,c{n},10,,0,{n / 20},{0.95 if n == 0 else ''}\n" for n in range(20))
    stage(tmp_path, "fit", clients_csv=header + old + new)
    (chart,) = clients.section(read_runs([tmp_path])).parts
    accuracies = [row["accuracy"] for row in chart.rows]
    assert accuracies == sorted([n / 20 for n in range(1, 20)] + [0.95])  # the selector of c0 is at 0.95
    (label,) = [text.get_text() for text in chart.figure.legends[0].get_texts()]
    assert label == "fit: mean 0.522, worst tenth 0.075"
    assert chart.caption.endswith("Standard deviation over the 20 clients: fit 0.284.")


def test_runs_whose_labels_differ_in_odd_characters_have_figures_of_their_own(tmp_path):
    for name, selector in (("\u043c\u0438\u0440", 1), ("\u043b\u0435\u0441", 2)):
        stage(tmp_path, name, groups_csv=f"round,client,selector\n0,a,0\n0,b,{selector}\n")
    write_report([tmp_path], tmp_path / "report.html")
    drawn = [file.read_text() for file in (tmp_path / "report_files").glob("groups_*.csv")]
    assert sorted(text.splitlines()[2].split(",")[-1] for text in drawn) == ["1", "2"]


def test_the_same_prompt_by_two_methods_with_what_a_judge_said(tmp_path):
    for name, text in (("fedavg", "no"), ("fewfedpit", "yes")):
        folder = stage(tmp_path, name) / "tasks" / "epoch_2"
        folder.mkdir(parents=True)
        row = {"row": 7, "prompt": "Really?", "target": "yes", "answers": [text]}
        (folder / "qa.jsonl").write_text(lines([{**row, "score": float(text == "yes")}]))
    duel = {"stage": "call fedlight.judges.duels.duels", "task": "qa"}
    duel["methods"] = {"FewFedPIT": "/moved/seed0/fewfedpit"}
    verdict = {"method": "FewFedPIT", "row": 7, "ours_first": 1.0, "ours_second": 0.5}
    stage(
        tmp_path, "wins", settings={**duel, "against": "/moved/seed0/fedavg"}, verdicts_jsonl=lines([verdict])
    )
    (texts,) = answers.section(read_runs([tmp_path])).parts
    ((prompt, found),) = texts.examples
    assert prompt == "Really?"
    told = {answer.method: (answer.text, answer.note) for answer in found}
    assert told == {
        "reference": ("yes", ""),
        "fedavg": ("no", "score 0"),
        "fewfedpit": ("yes", "score 1, win against fedavg"),
    }
    assert found[0].method == "reference"


def test_clients_own_rows_are_shown_on_demand_alone(tmp_path):
    folder = stage(
        tmp_path, "answers", completions_jsonl=lines([{"fields": {"p": "mine"}, "completions": ["secret"]}])
    )
    (folder / "config.yaml").write_text("data: {init_args: {columns: {client: worker}}}")
    section = answers.section(read_runs([tmp_path]))
    assert section.parts == []
    assert "--private" in section.notes[0]
    (texts,) = answers.section(read_runs([tmp_path], private=True)).parts
    assert texts.examples[0][1][0].text == "secret"


def test_several_completions_for_labelling_are_nobodys_answer(tmp_path):
    stage(
        tmp_path, "completions", completions_jsonl=lines([{"fields": {"p": "x"}, "completions": ["a", "b"]}])
    )
    assert answers.asked(read_runs([tmp_path])) == []


def test_the_configs_are_compared_without_their_folders(tmp_path):
    for name, rate in (("a", 0.1), ("b", 0.2)):
        folder = stage(tmp_path, name)
        (folder / "config.yaml").write_text(
            f"trainer: {{default_root_dir: {folder}, max_epochs: 3}}\nmodel: {{class_path: M, init_args: {{lr: {rate}}}}}\n"
        )
    section = configuration.section(read_runs([tmp_path]))
    table, *configs = section.parts
    assert table.lines == [["model.lr", "0.1", "0.2"]]
    assert all(str(tmp_path) not in config.text for config in configs)
    assert "default_root_dir: RUN" in configs[0].text


def test_the_overview_says_what_is_done_and_what_is_not(tmp_path):
    config = (
        "seed_everything: 0\ntrainer: {max_epochs: 4}\n"
        "model: {class_path: x.SFTModule, init_args: {model: /h/models/tiny}}\n"
        "federated: {class_path: L, init_args: {clients_per_round: 3, algorithm: {class_path: a.FedProx}}}\n"
    )
    done = json.dumps({"result": {}, "seconds": 90})
    visits = "round,client,split,steps,loss\n0,a,train,1,4\n1,a,train,1,4\n"
    for seed, ended in ((0, done), (1, "")):
        folder = stage(tmp_path, "prox", seed, visits_csv=visits, done_json=ended)
        (folder / "config.yaml").write_text(config)
        if not ended:
            (folder / "done.json").unlink()
    section = overview.section(read_runs([tmp_path]))
    (table,) = section.parts
    assert table.lines == [
        ["prox", "FedProx", "SFTModule, tiny", "-", "3", "2 of 4", "0, 1", "1.5 minutes", "1 of 2 done"]
    ]
    assert section.intro == "2 training runs, seeds 0, 1. No record of an end: prox, seed 1."


def test_rows_of_stages_are_summed_up_over_seeds(tmp_path):
    for seed, win in ((0, 0.25), (1, 0.75)):
        result = {"result": {"rows": [{"method": "m", "win": win, "pairs": 40}]}, "seconds": 1}
        stage(tmp_path, "wins", seed, {"stage": "call x.y"}, done_json=json.dumps(result))
    (table,) = tasks.section(read_runs([tmp_path])).parts
    assert table.header == ["method", "win", "pairs"]
    assert table.lines == [["m", "0.500 ± 0.354", "40 ± 0.000"]]


def test_damaged_results_are_told_and_harm_nothing(tmp_path):
    stage(tmp_path, "fit", visits_csv="round,client\n0,a\n")
    (tmp_path / "results.json").write_text('{"rows": [')
    section = overview.section(read_runs([tmp_path]))
    assert section.notes == (f"{tmp_path.name}: results.json is not whole JSON",)
    (tmp_path / "results.json").write_text('{"rows": [1, {"x": 2}, null]}')
    assert overview.section(read_runs([tmp_path])).notes == ()


def test_a_rate_in_the_table_of_results_has_its_interval_in_brackets():
    ends = {"method": "m", "win_rate_low": 0.25, "win_rate_high": 0.875}
    rows = [{**ends, "seed": seed, "win_rate": 0.5 + seed / 4} for seed in (0, 1)]
    table = overview.results_table([*rows, {"method": "raw", "seed": 0, "win_rate": 0.5}], "Results")
    assert table.header == ["method", "win rate"]
    assert table.lines == [["m", "0.625 ± 0.177 [0.250, 0.875]"], ["raw", "0.500"]]
    assert "95 % interval" in table.caption


def test_the_ends_of_an_interval_are_a_band_and_no_lines(tmp_path):
    folder = stage(tmp_path, "dpo") / "metrics" / "version_0"
    folder.mkdir(parents=True)
    header = "epoch,step,win_rate/oracle,win_rate_low/oracle,win_rate_high/oracle\n"
    (folder / "metrics.csv").write_text(header + "".join(f"{n},{n},0.5,0.25,0.75\n" for n in range(3)))
    (chart,) = curves.section(read_runs([tmp_path])).parts
    assert [(row["line"], row["mean"], row["low"], row["high"]) for row in chart.rows] == [
        ("dpo", 0.5, 0.25, 0.75)
    ] * 3
    assert len(chart.figure.axes[0].collections) == 1
    assert "95 % interval" in chart.caption
