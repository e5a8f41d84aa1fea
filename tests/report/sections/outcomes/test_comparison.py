import json

import pytest
from stage_folders import logged, stage_folder
from tiny_world import write_lines

from fedlight.evaluation.bootstrap import bootstrap_interval, student_interval
from fedlight.report.sections import client_data
from fedlight.report.sections.outcomes import comparison
from fedlight.runs.run import read_runs

HEADER = "stage,round,client,examples,group,selector,accuracy,own_accuracy\n"


def fit(home, seed, name, accuracies=None, scores=None, examples=10):
    """A stage that has trained, with accuracies of its clients or scores of its answers."""
    folder = stage_folder(home / f"seed{seed}" / name)
    if accuracies:
        rows = (f"test,,c{n},{examples},,,{value},\n" for n, value in enumerate(accuracies))
        (folder / "clients.csv").write_text(HEADER + "".join(rows))
    if scores:
        rows = [{"row": n, "prompt": f"q{n}", "answers": ["a"], "score": s} for n, s in enumerate(scores)]
        write_lines(folder / "tasks/test/qa.jsonl", *map(json.dumps, rows))
    return folder


def tables(home):
    section = comparison.section(read_runs([home]))
    return section, {table.title: table for table in section.parts}


def test_clients_of_one_seed_are_paired_and_the_seed_is_said_to_be_one(tmp_path):
    first, second = [0.5, 0.6, 0.7, 0.8, 0.6, 0.7], [0.6, 0.75, 0.8, 0.85, 0.75, 0.75]
    fit(tmp_path, 0, "fedavg", first)
    fit(tmp_path, 0, "fedbiscuit", second)
    section, found = tables(tmp_path)
    (line,) = found["Accuracy by client, against fedavg"].lines
    low, high = bootstrap_interval([b - a for a, b in zip(first, second, strict=True)])
    assert line[:4] == ["fedbiscuit", "beyond noise for these models", "0.750", "+0.100"]
    assert line[4:] == [f"[{low:+.3f}, {high:+.3f}]", "6", "-", "1"]
    assert "Several seeds would tell" in section.notes[0]


def test_five_clients_that_all_gain_are_too_few_to_tell_chance(tmp_path):
    fit(tmp_path, 0, "a", [0.5, 0.6, 0.7, 0.8, 0.9])
    fit(tmp_path, 0, "b", [0.6, 0.75, 0.8, 0.85, 0.95])
    _, found = tables(tmp_path)
    table = found["Accuracy by client, against a"]
    assert table.lines == [["b", "cannot be said", "0.790", "+0.090", "-", "5", "-", "1"]]
    assert "An interval over clients takes 6 of them." in table.caption


@pytest.mark.parametrize(
    ("gains", "verdict", "marked"),
    [((0.3, -0.1), "within noise", set()), ((0.1, 0.11, 0.12), "beyond noise", {0})],
)
def test_seeds_that_contradict_each_other_are_noise(tmp_path, gains, verdict, marked):
    for seed, gain in enumerate(gains):
        fit(tmp_path, seed, "a", [0.5, 0.6])
        fit(tmp_path, seed, "b", [0.5 + gain, 0.6 + gain])
    section, found = tables(tmp_path)
    table = found["Accuracy by client, against a"]
    low, high = student_interval(gains)
    assert table.lines[0][1] == verdict
    assert table.lines[0][6:] == [f"[{low:+.3f}, {high:+.3f}]", str(len(gains))]
    assert table.marked == marked
    assert section.notes == ()


def test_questions_are_paired(tmp_path):
    fit(tmp_path, 0, "a", scores=[0, 0, 1, 1, 0, 1])
    fit(tmp_path, 0, "b", scores=[1, 0, 0, 1, 0, 1])
    _, found = tables(tmp_path)
    (line,) = found["Task qa, against a"].lines
    assert line[1:4] == ["within noise", "0.500", "+0.000"]


def test_a_test_of_one_run_is_not_compared_with_a_validation_of_another(tmp_path):
    for name in ("a", "b"):
        file = fit(tmp_path, 0, name, [0.5, 0.7]) / "clients.csv"
        validated = file.read_text().replace("test,", "val,3").replace("0.5", "0.2").replace("0.7", "0.4")
        file.write_text(validated if name == "a" else file.read_text() + validated.removeprefix(HEADER))
    _, found = tables(tmp_path)
    assert found["Accuracy by client, against a"].lines[0][3] == "+0.000"
    of_clients = client_data.spread_section(read_runs([tmp_path]))
    labels = of_clients.parts[0].figure.legends[0].get_texts()
    assert ["mean 0.300" in label.get_text() for label in labels] == [True, True]
    (note,) = of_clients.notes
    assert note == "Final accuracies are those of validations, as not every run here was tested."


def test_clients_with_other_data_are_no_pairs(tmp_path):
    fit(tmp_path, 0, "a", [0.5, 0.5])
    fit(tmp_path, 0, "b", [0.9, 0.9], examples=11)
    assert comparison.section(read_runs([tmp_path])) is None


@pytest.mark.parametrize(("seeds", "expected"), [(1, "cannot be said"), (3, "beyond noise")])
def test_a_single_value_a_run_takes_several_seeds(tmp_path, seeds, expected):
    for seed in range(seeds):
        for name, loss in (("a", 1.0), ("b", 0.5 + seed / 100)):
            logged(fit(tmp_path, seed, name), "val/loss", f"0,0,{loss}")
    _, found = tables(tmp_path)
    assert found["Validation loss, against a"].lines[0][1] == expected
