import json

import pytest
from stage_folders import logged

from fedlight.report import page, write_report
from fedlight.report.sections import answers, curves, groups, overview
from fedlight.report.sections.outcomes import tasks
from fedlight.runs.run import read_runs

NAMES = ("$x^{$", "</script><b>", "{{ 7 * 7 }}", "_under", "../../up", "\u65e5\u672c")


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps({"commands": [{"command": "fit"}]}))
    return folder


@pytest.fixture
def few(monkeypatch):
    monkeypatch.delenv("FEDLIGHT_TRACEBACK", raising=False)
    modules = (overview, curves, groups, answers, tasks)
    monkeypatch.setattr(page, "SECTIONS", {module.__name__: module.section for module in modules})


def metrics(folder, name, *values):
    logged(folder, name, *(f"{i},{i},{value}" for i, value in enumerate(values)))


def test_names_are_neither_formulas_nor_html_nor_paths(run, few):
    rows = [{"method": name, "seed": 0, f"score {name}": 0.5} for name in NAMES]
    (run / "results.json").write_text(json.dumps({"rows": rows}))
    metrics(run, "val/$x^{$", 1, 2, 3)
    made = write_report([run])
    text = made.read_text()
    assert "could not be made" not in text
    assert "$x^{$ (val)" in text
    assert "<b>" not in text
    assert "{{ 7 * 7 }}" in text
    assert {file.name for file in run.parent.iterdir()} == {"run"}
    assert {file.suffix for file in (run / "report_files").iterdir()} == {".png", ".csv", ".json"}


def test_a_figure_that_cannot_be_drawn_is_left_out_and_the_page_is_there(run, few, monkeypatch):
    def refuse(chart, files):
        raise OverflowError("cannot convert float infinity to integer")

    metrics(run, "val/loss", 1, 2, 3)
    monkeypatch.setattr(page, "draw", refuse)
    text = write_report([run]).read_text()
    assert "could not be made: OverflowError: cannot convert float infinity to integer" in text
    assert "What was trained" in text


def test_answers_with_halves_of_characters_and_odd_ends_of_lines_are_shown(run, few):
    answer = "one\u2028two\x85three"
    lines = [json.dumps({"prompt": f"p{n}", "completions": [answer]}, ensure_ascii=False) for n in range(2)]
    half = '{"prompt": "\\ud800 cut", "completions": ["x"]}'
    (run / "completions.jsonl").write_text("\n".join([*lines, half]) + "\n", encoding="utf-8")
    text = write_report([run]).read_text(encoding="utf-8")
    assert "could not be read whole" not in text
    assert "one\u2028two" in text
    assert "? cut" in text


@pytest.mark.parametrize(
    "value", ["[" * 99_999, "7", '{"rows": 5, "commands": 7, "result": [1], "seed": {}}']
)
def test_json_of_another_kind_is_no_error(run, few, value):
    for name in ("run.json", "done.json", "settings.json", "results.json"):
        (run / name).write_text(value)
    (run / "completions.jsonl").write_text(value)
    assert "could not be made" not in write_report([run]).read_text()


def test_rows_with_lists_for_texts_are_no_error_and_missing_selectors_not_counted(run, few):
    rows = [{"method": "a", "seed": [1], "x": 1}, {"method": "b", "seed": {}, "x": 2}]
    (run / "results.json").write_text(json.dumps({"rows": rows}))
    (run / "done.json").write_text(json.dumps({"result": {"rows": [{}, 3, {"method": ["a"], "x": 1}]}}))
    assert "could not be made" not in write_report([run]).read_text()
    (run / "groups.csv").write_text("round,client,selector\n0,a,0\n1,a,1\n0,b,0\n")
    (section,) = [found for found in page.sections(read_runs([run])) if found.name == "groups"]
    assert section.notes == ()
    assert "a: round 1, selector 1; b: round 1, selector -" in section.parts[0].alt


def test_a_page_that_cannot_be_written_leaves_the_one_before(run, few, monkeypatch):
    before = write_report([run]).read_bytes()

    def stop(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", stop)
    with pytest.raises(KeyboardInterrupt):
        write_report([run])
    assert (run / "report.html").read_bytes() == before
    assert not list(run.glob("*.tmp"))


def test_what_is_in_the_way_is_named(run):
    (run / "report_files").touch()
    with pytest.raises(ValueError, match="where a file is: give another name"):
        write_report([run])
    with pytest.raises(ValueError, match="is a file: give the folder of a run"):
        write_report([run / "run.json"])
