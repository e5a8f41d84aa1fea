import json

from stage_folders import logged, stage_folder
from tiny_world import write_lines

from fedlight.report.page import write_report
from fedlight.report.sections import answers, client_data, curves, overview
from fedlight.report.sections.outcomes import tasks
from fedlight.runs.run import read_runs


def test_curves_are_means_over_rounds_and_over_seeds(tmp_path):
    for seed in (0, 1):
        rows = (f"0,0,{0.25 + seed},0", f"0,1,{0.75 + seed},0", "1,2,1,0", "2,3,1,0")
        logged(stage_folder(tmp_path / f"seed{seed}/fedavg"), "val/accuracy,fed/dropped", *rows)
    section = curves.section(read_runs([tmp_path]))
    (chart,) = section.parts
    assert section.intro.endswith("0 in all runs at all times, and not drawn: dropped (fed).")
    assert chart.name == "curve_val_accuracy_epoch"
    # A single line is named as well.
    assert [text.get_text() for text in chart.figure.legends[0].get_texts()] == ["fedavg"]
    rows = [[row[name] for name in ("epoch", "mean", "low", "high", "seeds")] for row in chart.rows]
    assert rows[0] == [1.0, 1.0, 0.5, 1.5, 2]
    assert rows[-1] == [3.0, 1.0, 1.0, 1.0, 2]


def test_a_point_says_how_many_seeds_have_come_so_far(tmp_path):
    for seed, rounds in ((0, 4), (1, 3)):
        rows = (f"{n},{n},{n}" for n in range(rounds))
        logged(stage_folder(tmp_path / f"seed{seed}/fedavg"), "val/accuracy", *rows)
    (chart,) = curves.section(read_runs([tmp_path])).parts
    assert [row["seeds"] for row in chart.rows if row["epoch"] > 2] == [2, 1]


def test_without_a_logger_visits_and_tasks_tell_the_curves(tmp_path):
    visits = "round,client,split,steps,loss\n0,a,train,1,4\n0,b,train,3,8\n0,c,train,0,\n1,a,train,2,1\n"
    folder = stage_folder(tmp_path / "seed0/feddca", visits_csv=visits)
    for moment, score in (("start", 0.25), ("epoch_2", 0.5), ("test", 0.9)):
        scores = json.dumps({"score/domain": score, "low/domain": 0.125, "share/domain/A": 0})
        write_lines(folder / f"tasks/{moment}/scores.json", scores)
    (run,) = read_runs([tmp_path])
    score = {0.0: 0.25, 2.0: 0.5}
    low = {0.0: 0.125, 2.0: 0.125}
    assert curves.curves(run).metrics == {
        "fed/loss": {1.0: 7.0, 2.0: 1.0},
        "score/domain": score,
        "low/domain": low,
    }


def test_losses_of_two_kinds_of_rows_are_two_curves(tmp_path):
    visits = "round,client,split,steps,loss\n0,a,train,1,4\n0,a,synthetic,1,8\n"
    stage_folder(tmp_path / "seed0/fewfedpit", visits_csv=visits)
    (run,) = read_runs([tmp_path])
    assert curves.visit_losses(run) == {"fed/loss/train": {1.0: 4.0}, "fed/loss/synthetic": {1.0: 8.0}}


def test_clients_are_sorted_and_the_worst_tenth_is_told(tmp_path):
    header = "stage,round,client,examples,group,selector,accuracy,own_accuracy\n"
    old = "".join(f"val,0,c{n},10,,0,0,\n" for n in range(20))
    new = "".join(f"test,,c{n},10,,0,{n / 20},{0.95 if n == 0 else ''}\n" for n in range(20))
    stage_folder(tmp_path / "seed0/fit", clients_csv=header + old + new)
    (chart,) = client_data.spread_section(read_runs([tmp_path])).parts
    accuracies = [row["accuracy"] for row in chart.rows]
    assert accuracies == sorted([n / 20 for n in range(1, 20)] + [0.95])  # the selector of c0 is at 0.95
    (label,) = [text.get_text() for text in chart.figure.legends[0].get_texts()]
    assert label == "fit: mean 0.522, worst tenth 0.075"
    assert chart.caption.endswith("Standard deviation over the 20 clients: fit 0.284.")


def test_runs_whose_labels_differ_in_odd_characters_have_figures_of_their_own(tmp_path):
    for name, selector in (("\u043c\u0438\u0440", 1), ("\u043b\u0435\u0441", 2)):
        stage_folder(tmp_path / "seed0" / name, groups_csv=f"round,client,selector\n0,a,0\n0,b,{selector}\n")
    write_report([tmp_path], tmp_path / "report.html")
    drawn = [file.read_text() for file in (tmp_path / "report_files").glob("groups_*.csv")]
    assert sorted(text.splitlines()[2].split(",")[-1] for text in drawn) == ["1", "2"]


def test_the_same_prompt_by_two_methods_with_what_a_judge_said(tmp_path):
    for name, text in (("fedavg", "no"), ("fewfedpit", "yes")):
        row = {"row": 7, "prompt": "Really?", "target": "yes", "answers": [text]}
        row["score"] = float(text == "yes")
        write_lines(stage_folder(tmp_path / "seed0" / name) / "tasks/epoch_2/qa.jsonl", json.dumps(row))
    duel = {"stage": "call fedlight.judges.duels.duels", "task": "qa", "against": "/moved/seed0/fedavg"}
    duel["methods"] = {"FewFedPIT": "/moved/seed0/fewfedpit"}
    verdict = {"method": "FewFedPIT", "row": 7, "ours_first": 1.0, "ours_second": 0.5}
    stage_folder(tmp_path / "seed0/wins", duel, verdicts_jsonl=json.dumps(verdict))
    (texts,) = answers.section(read_runs([tmp_path])).parts
    ((prompt, found),) = texts.examples
    assert prompt == "Really?"
    told = {answer.method: (answer.text, answer.note) for answer in found}
    assert (told["reference"], told["fedavg"]) == (("yes", ""), ("no", "score 0"))
    assert told["fewfedpit"] == ("yes", "score 1, win against fedavg")
    assert found[0].method == "reference"


def test_clients_own_rows_are_shown_on_demand_alone(tmp_path):
    written = json.dumps({"fields": {"p": "mine"}, "completions": ["secret"]})
    config = "data: {init_args: {columns: {client: worker}}}"
    stage_folder(tmp_path / "seed0/answers", completions_jsonl=written, config_yaml=config)
    section = answers.section(read_runs([tmp_path]))
    assert section.parts == []
    assert "--private" in section.notes[0]
    (texts,) = answers.section(read_runs([tmp_path], private=True)).parts
    assert texts.examples[0][1][0].text == "secret"


def test_several_completions_for_labelling_are_nobodys_answer(tmp_path):
    written = json.dumps({"fields": {"p": "x"}, "completions": ["a", "b"]})
    stage_folder(tmp_path / "seed0/completions", completions_jsonl=written)
    assert answers.asked(read_runs([tmp_path])) == []


def test_the_configs_are_compared_without_their_folders(tmp_path):
    for name, rate in (("a", 0.1), ("b", 0.2)):
        folder = stage_folder(tmp_path / "seed0" / name)
        model = f"model: {{class_path: M, init_args: {{lr: {rate}}}}}"
        trainer = f"trainer: {{default_root_dir: {folder}, max_epochs: 3}}"
        write_lines(folder / "config.yaml", trainer, model, f"ckpt_path: {name}.ckpt")  # resumed
    section = overview.configuration_section(read_runs([tmp_path]))
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
    done = {"done_json": json.dumps({"result": {}, "seconds": 90})}
    visits = "round,client,split,steps,loss\n0,a,train,1,4\n1,a,train,1,4\n"
    for seed, ended in ((0, done), (1, {})):
        folder = tmp_path / f"seed{seed}/prox"
        stage_folder(folder, visits_csv=visits, config_yaml=config, **ended)
    section = overview.section(read_runs([tmp_path]))
    (table,) = section.parts
    (line,) = table.lines
    assert line[:5] == ["prox", "FedProx", "SFTModule, tiny", "-", "3"]
    assert line[5:] == ["2 of 4", "0, 1", "1.5 minutes", "1 of 2 done"]
    assert section.intro == "2 training runs, seeds 0, 1. No record of an end: prox, seed 1."


def test_rows_of_stages_are_summed_up_over_seeds(tmp_path):
    for seed, win in ((0, 0.25), (1, 0.75)):
        result = {"result": {"rows": [{"method": "m", "win": win, "pairs": 40}]}, "seconds": 1}
        stage_folder(tmp_path / f"seed{seed}/wins", "call x.y", done_json=json.dumps(result))
    (table,) = tasks.section(read_runs([tmp_path])).parts
    assert table.header == ["method", "win", "pairs"]
    assert table.lines == [["m", "0.500 ± 0.354", "40 ± 0.000"]]
    assert table.folded


def test_damaged_results_are_told_and_harm_nothing(tmp_path):
    stage_folder(tmp_path / "seed0/fit", visits_csv="round,client\n0,a\n")
    (tmp_path / "results.json").write_text('{"rows": [')
    section = overview.section(read_runs([tmp_path]))
    assert section.notes == (f"{tmp_path.name}: results.json is not whole JSON",)
    (tmp_path / "results.json").write_text('{"rows": [1, {"x": 2}, null]}')
    assert overview.section(read_runs([tmp_path])).notes == ()


def test_an_interval_is_in_brackets_in_a_table_and_a_band_in_a_curve(tmp_path):
    ends = {"method": "m", "win_rate_low": 0.25, "win_rate_high": 0.875}
    rows = [{**ends, "seed": seed, "win_rate": 0.5 + seed / 4} for seed in (0, 1)]
    table = overview.results_table([*rows, {"method": "raw", "seed": 0, "win_rate": 0.5}], "Results")
    assert table.header == ["method", "win rate"]
    assert table.lines == [["m", "0.625 ± 0.177 [0.250, 0.875]"], ["raw", "0.500"]]
    assert "95 % interval" in table.caption
    columns = "train/loss,win_rate/oracle,win_rate_low/oracle,win_rate_high/oracle,win_rate/words"
    # Win rates are logged with a step alone, before training and after each epoch.
    rows = [row for n in range(3) for row in (f",{4 * n},,0.5,0.25,0.75,1.5", f"{n},{4 * n + 3},{n},,,,")]
    logged(stage_folder(tmp_path / "seed0/dpo"), columns, *rows)
    chart, words, _ = curves.section(read_runs([tmp_path])).parts
    assert words.title == "Words of all answers, relative to the raw model's"
    assert [row["epoch"] for row in chart.rows] == [0.0, 1.0, 2.0]
    drawn = [(row["line"], row["mean"], row["low"], row["high"]) for row in chart.rows]
    assert drawn == [("dpo", 0.5, 0.25, 0.75)] * 3
    assert len(chart.figure.axes[0].collections) == 1
    assert "95 % interval" in chart.caption
