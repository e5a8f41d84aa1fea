import json

from finished import finished
from stage_folders import stage_folder
from tiny_world import write_lines

from fedlight.evaluation.bootstrap import bootstrap_interval
from fedlight.report.page import write_report
from fedlight.report.sections.outcomes import tasks
from fedlight.report.sections.outcomes.tasks import FEWEST, FIRST, tables_by_group
from fedlight.runs.run import read_runs


def answered(home, seed, name, scores):
    """A stage that has asked a task, with the scores of each subject."""
    asked = [(subject, score) for subject, own in scores.items() for score in own]
    rows = [
        {"row": row, "prompt": f"q{row}", "group": subject, "answers": ["a"], "score": score}
        for row, (subject, score) in enumerate(asked)
    ]
    folder = stage_folder(home / f"seed{seed}" / name, "test x.yaml")
    write_lines(folder / "tasks/test/mmlu.jsonl", *map(json.dumps, rows))
    finished(folder, **{"score/mmlu": 0.5}, **{f"score/mmlu/{subject}": 0.5 for subject in scores})


def test_subjects_are_lines_the_lowest_first_and_small_ones_are_pooled(tmp_path):
    low, high = [0.0] * 15 + [1.0] * 5, [1.0] * 12
    for seed in (0, 1):
        answered(tmp_path, seed, "fedavg", {"law": high, "anatomy": low, "art": [1.0], "music": [0.0, 0.0]})
    runs = read_runs([tmp_path])
    table = tables_by_group(runs)["mmlu"]
    ends = bootstrap_interval(low * 2, [*map(str, range(12, 32))] * 2)
    assert table.header == ["group", "questions", "fedavg"]
    assert table.lines[0] == ["anatomy", "20", f"0.250 [{ends.low:.3f}, {ends.high:.3f}]"]
    assert table.lines[1] == ["law", "12", "1.000 [1.000, 1.000]"]
    assert table.lines[2][:2] == [f"2 with fewer than {FEWEST} questions", "3"]
    assert table.lines[2][2].startswith("0.333 [")
    shown = {part.title: part for part in tasks.section(runs).parts}
    assert shown["Tests"].header == ["run", "score/mmlu"]  # subjects are no columns as well
    assert shown["mmlu by group"] == table


def test_a_method_that_was_not_asked_about_a_subject_has_none(tmp_path):
    answered(tmp_path, 0, "a", {"law": [1.0] * 10, "art": [0.0] * 10})
    answered(tmp_path, 0, "b", {"law": [0.0] * 10, "tea": [1.0] * 10})
    table = tables_by_group(read_runs([tmp_path]))["mmlu"]
    shares = {line[0]: (line[2][:5], line[3][:5]) for line in table.lines}
    assert shares == {"art": ("0.000", "-"), "law": ("1.000", "0.000"), "tea": ("-", "1.000")}


def test_long_tables_are_there_whole_and_one_subject_makes_none(tmp_path):
    answered(tmp_path, 0, "a", {f"subject {n:02}": [n / 20] * FEWEST for n in range(13)})
    text = write_report([tmp_path]).read_text()
    assert f'<table data-first="{FIRST}">' in text
    assert all(f"subject {n:02}" in text for n in range(13))
    answered(tmp_path / "one", 0, "a", {"": [1.0] * 10})
    assert tables_by_group(read_runs([tmp_path / "one"])) == {}
