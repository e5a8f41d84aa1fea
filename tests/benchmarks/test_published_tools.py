"""How published figures are chosen, printed, compared, rerun and recorded, on made-up measurements."""

import json
import math

import pytest
from finished import finished
from published import commands, machine, record, rerun
from published.claims import contradictions
from published.compare import compare, deviation
from published.figures import FIELD, figure, filled
from published.measurements import Measurement, Published, load
from published.prose import _unknown, numbers, sections
from published.tables import caption, figures, rendered, table

MADE = {"commit": "abc", "date": "2026-01-02", "machine": {"class": "x86_64 AMD AVX2", "threads": 1}}
ROWS = [
    {"method": "a", "task": "t", "seed": 0, "score": 0.5, "ms": 10.0},
    {"method": "a", "task": "t", "seed": 1, "score": 0.7, "ms": 12.0},
    {"method": "a", "task": "u", "seed": 0, "score": 0.25, "ms": None},
    {"method": "b", "task": "t", "seed": 0, "score": float("nan"), "ms": 0.0},
]
TABLE = {
    "head": "who",
    "rows": {"a": "A", "b": "B"},
    "where": ["t"],
    "columns": {"score": "{score:.2f}", "mean": "{score:mean .1f} in {ms[seed 0]:.0f} ms"},
}


def measurement(**changes) -> Measurement:
    told = {"name": "m", "section": "S", "command": "python benchmarks/wire.py", "rerun": "check"}
    told |= {"rerun_seconds": 1}
    told |= {"key": ("task", "method"), "tables": {"one": TABLE}, "record": {**MADE, "rows": ROWS}}
    return Measurement(**{**told, **changes})


def published(*measurements: Measurement, **told) -> Published:
    return Published({one.name: one for one in measurements}, told.get("tables", {}), told.get("pages", {}))


def test_a_table_has_means_and_standard_deviations():
    text, found = table(published(measurement()), "one")
    head, _, *lines = text.splitlines()[:4]
    assert [head, *lines] == ["| who | score | mean |", "| A | 0.60 ± 0.14 | 0.6 in 10 ms |", "| B |  |  |"]
    assert [one.column for one in found] == ["score", "score", "ms"]
    told = "seeds 0, 1; commit abc; 2026-01-02; x86_64 AMD AVX2; rerun by CI"
    assert text.endswith(f"*`python benchmarks/wire.py`; {told}.*")


def test_a_page_is_written_between_its_marks_alone():
    page = "before\n\n<!-- table: one -->\nold\n<!-- end -->\n\nafter\n"
    new = rendered(page, published(measurement()))
    assert new.startswith("before\n\n<!-- table: one -->\n\n| who |")
    assert new.endswith(".*\n\n<!-- end -->\n\nafter\n")
    assert rendered(new, published(measurement())) == new


def test_a_caption_is_written_once_where_tables_of_one_run_follow_each_other():
    page = "<!-- table: one -->\n<!-- end -->\n" * 2
    new = rendered(page, published(measurement()))
    assert new.count("python benchmarks/wire.py") == 1
    assert new.endswith("*The same run as the table above.*\n\n<!-- end -->\n")
    assert rendered(new, published(measurement())) == new


def test_a_template_takes_figures_of_several_measurements():
    free = {"free": {"template": "| {m.score[u]:.2f} | {other.ms[t; b]:.1f} |"}}
    both = published(measurement(), measurement(name="other"), tables=free)
    assert table(both, "free")[0] == "| 0.25 | 0.0 |"


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("{score[c]:.2f}", r"\[c\] is no row; rows have a, b, seed 0, seed 1, t, u"),
        ("{score[a]:.2f}", r"\[a\] is 3 rows, 2 seeds"),
        ("{scores[u]:.2f}", "no column 'scores'; it has method, ms, score, seed, task"),
        ("{nobody.score:.2f}", "no measurement 'nobody'"),
    ],
)
def test_fields_that_mean_nothing(field, message):
    with pytest.raises(ValueError, match=message):
        figure(FIELD.search(field), {}, measurement())


def test_printed_texts_are_kept():
    """Nothing but what was printed is left of old figures."""
    old = {"transcribed": True, "commit": "abc", "rows": [{"method": "a", "score": "0.60 ± 0.14"}]}
    one = measurement(key=("method",), rerun="no", why="it is lost", record=old)
    assert filled("{score} or {score:mean}", {}, one)[0] == "0.60 ± 0.14 or 0.60"
    assert caption(one).endswith("copied from the page of commit abc; not rerun: it is lost.*")


@pytest.mark.parametrize(
    ("tolerance", "old", "new", "part"),
    [
        ("exact", 0.5, 0.5, 0),
        ("exact", 0.5, 0.5004, 0.8),
        ("exact", 0.5, 0.5006, 1.2),
        ("absolute 0.02", 0.5, 0.49, 0.5),
        ("relative 0.1", 2.0, 2.1, 0.5),
        ("absolute 0.02", 0.5, None, math.inf),
        ("absolute 0.02", 0.5, math.nan, math.inf),
        ("absolute 0.02", "x", "x", 0),
        ("absolute 0.02", "x", "y", math.inf),
    ],
)
def test_deviations(tolerance, old, new, part):
    assert deviation(old, new, tolerance, ".3f") == pytest.approx(part)


def rerun_of(one, rows, tolerance="exact"):
    return compare(one, figures(published(one), one), rows, tolerance)


def test_a_rerun_gives_the_same_figure_or_another():
    """0.5 is printed as 0.60 ± 0.14 over the seeds; half a unit of that is 0.005."""
    one = measurement()
    assert rerun_of(one, ROWS) == (2, [])
    rows = [{**row, "score": row["score"] + 0.006} for row in ROWS]
    first, second = rerun_of(one, rows)[1]
    assert first == "t, a, 0: score 0.5, now 0.506 (tolerance: exact)"
    assert second == "t, a, 1: score 0.7, now 0.706 (tolerance: exact)"
    assert rerun_of(one, rows, "absolute 0.02") == (2, [])
    assert rerun_of(one, ROWS[1:])[1] == ["t, a, 0: the rerun has no such row"]
    assert rerun_of(one, [*ROWS, {**ROWS[0], "seed": 9}])[1] == ["t, a, 9: not recorded"]
    assert rerun_of(one, [{**row, "score": None} for row in ROWS])[1]


def test_a_smaller_command_may_give_some_rows_and_columns():
    """One stage of a recipe gives its own score and not those of the others."""
    smaller = measurement(rerun_command="fedlight run feddca --only direct_fedavg")
    assert rerun_of(smaller, ROWS[:1]) == (2, [])
    score = {"method": "a", "task": "t", "seed": 0, "score": 0.5}
    assert rerun_of(smaller, [score]) == (1, [])
    assert rerun_of(smaller, [{**score, "score": None}])[1] == [
        "t, a, 0: score 0.5, now None (tolerance: exact)"
    ]
    assert rerun_of(smaller, ROWS[2:3])[1] == ["the rerun has none of the published figures"]


@pytest.mark.parametrize("formats", [("{score:.1f}", "{score:.3f}"), ("{score:.3f}", "{score:.1f}")])
def test_a_figure_that_is_printed_twice_is_compared_in_its_most_digits(formats):
    coarse, fine = ({"columns": {"score": form}, "rows": {"u": "u"}} for form in formats)
    one = measurement(tables={"one": coarse, "two": fine})
    assert [(figure.column, figure.format) for figure in figures(published(one), one)] == [("score", ".3f")]
    rows = [{**row, "score": row["score"] + 0.01} for row in ROWS]
    assert any("score 0.25, now 0.26" in line for line in rerun_of(one, rows)[1])


def test_rows_that_the_key_does_not_tell_apart_are_refused(tmp_path):
    file = tmp_path / "rows.json"
    rows = [{"method": "a", "seed": 0, "task": "t", "score": 0.5}, {"method": "a", "seed": 0, "score": 0.6}]
    file.write_text(json.dumps(rows))
    with pytest.raises(ValueError, match=r"two rows of a, 0 differ in 'score' \(0.5 and 0.6\): `key` has to"):
        commands.read_rows(measurement(key=("method",)), file)
    rows[1]["score"] = 0.5
    file.write_text(json.dumps(rows))
    assert commands.read_rows(measurement(key=("method",)), file) == [rows[0]]


SCRIPT = """
import argparse, json, pathlib
parser = argparse.ArgumentParser()
parser.add_argument("--json", type=pathlib.Path)
parser.add_argument("--rows", type=pathlib.Path)
options = parser.parse_args()
options.json.write_text(json.dumps({"rows": json.loads(options.rows.read_text())}))
"""


@pytest.fixture
def made_up(tmp_path, monkeypatch):
    """A measurement whose command gives the rows of a file."""
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks/made_up.py").write_text(SCRIPT)
    monkeypatch.setattr(commands, "ROOT", tmp_path)
    rows = tmp_path / "rows.json"
    monkeypatch.setattr(rerun, "machine", lambda: MADE["machine"])
    return measurement(command=f"python benchmarks/made_up.py --rows {rows}"), rows


@pytest.mark.parametrize(("score", "verdict"), [(0.5, "same"), (0.51, "DIFFERS")])
def test_reruns(made_up, tmp_path, capsys, score, verdict):
    one, file = made_up
    file.write_text(json.dumps([{**ROWS[0], "score": score}, *ROWS[1:]]))
    lost = measurement(name="lost", needs=("nothing/there",), tables={"two": TABLE})
    not_rerun = measurement(name="old", rerun="no", why="it takes a day", tables={"three": TABLE})
    code = rerun.rerun(published(one, lost, not_rerun), tmp_path / "reproduce", ("check",))
    assert code == (verdict == "DIFFERS")
    printed = capsys.readouterr().out
    assert f"m: {verdict}: 2 of 2 figures compared" in printed
    assert "lost: skipped: FEDLIGHT_SHARED names no folder with nothing/there" in printed
    assert "6 published figures, 2 compared" in printed


def test_what_can_not_be_rerun_or_compared_here(made_up, tmp_path, monkeypatch, capsys):
    one, _ = made_up  # its file of rows is not there
    assert rerun.rerun(published(one), tmp_path / "reproduce") == 1
    assert "FileNotFoundError" in capsys.readouterr().out
    monkeypatch.setattr(rerun, "machine", lambda: {"class": "aarch64", "threads": 1})
    assert rerun.rerun(published(one), tmp_path / "reproduce") == 0
    assert "skipped: recorded on x86_64" in capsys.readouterr().out


def test_a_record_of_a_finished_run(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "RECORDS", tmp_path / "docs/results")
    monkeypatch.setattr(record, "ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / "run").mkdir()
    rows = [{"method": "a", "seed": 0, "scores": {"x": 0.125}}]
    results = {"rows": rows, "seconds": 7.5, "versions": {"torch": "1"}}
    (tmp_path / "run/results.json").write_text(json.dumps(results))
    file = record.record(published(measurement()), "m", tmp_path / "run", "abc1234")
    found = json.loads(file.read_text())
    assert found["rows"] == [{"method": "a", "seed": 0, "scores/x": 0.125}]
    assert (found["commit"], found["seconds"], found["versions"]) == ("abc1234", 7.5, {"torch": "1"})
    assert set(found["machine"]) == {"class", "threads"}
    assert '\n  {"method": "a", "seed": 0, "scores/x": 0.125}\n' in file.read_text()


def test_numbers_of_the_prose():
    table_of_it = "<!-- table: one -->\n| 0.9 |\n<!-- end -->\n"
    prose = "It is 0.60 ± 0.14, 3 of 12, `0.8`, [it](a0.7.md), 25 % at rate 0.05; v1.2.3.\n"
    page = f"## S\n\n{table_of_it}{prose}"
    assert numbers(sections(page)["S"]) == ["0.60", "0.14", "25 %", "0.05"]
    assert list(_unknown("p", page, ["0.60", "0.14", "25"], ["0.05"])) == ["p: 25 %"]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ('rerun = "daily"', "none of check"),
        ('rerun = "no"', "needs `why`"),
        ('rerun = "check"', "needs `rerun_seconds`"),
        ('rerun = "check"\nrerun_seconds = 1\nrerun_command = "{shared}"', "needs `needs`"),
        ('rerun = "no"\nwhy = "x"\ncolour = "red"', "unexpected keyword argument 'colour'"),
    ],
)
def test_entries_that_contradict_themselves(tmp_path, entry, message):
    file = tmp_path / "results.toml"
    file.write_text(f'[measurements.m]\nsection = "S"\ncommand = "c"\n{entry}\n')
    with pytest.raises(ValueError, match=message):
        load(file, tmp_path)


def test_metrics_of_stages_are_rows_too(tmp_path):
    """Of a run whose table was not made, and beside the rows of one whose table was."""
    one = measurement(key=("method",), stages={"first": {"method": "a", "score": "score/domain"}})
    for seed, score in enumerate([0.25, 0.5]):
        finished(tmp_path / f"seed{seed}/first", **{"score/domain": score, "loss": 1.0})
    (tmp_path / "results.json").write_text('{"rows": []}')
    wanted = [{"method": "a", "seed": 0, "score": 0.25}, {"method": "a", "seed": 1, "score": 0.5}]
    assert commands.read_rows(one, tmp_path) == wanted
    (tmp_path / "results.json").write_text('{"rows": [{"method": "a", "seed": 1, "coverage": 0.75}]}')
    assert {"method": "a", "seed": 1, "coverage": 0.75, "score": 0.5} in commands.read_rows(one, tmp_path)
    with pytest.raises(ValueError, match="no metric 'accuracy'; it has score/domain, loss"):
        commands.read_rows(measurement(key=("method",), stages={"first": {"score": "accuracy"}}), tmp_path)


def test_the_class_of_a_machine_names_family_and_model_of_its_processor(tmp_path, monkeypatch):
    (tmp_path / "cpuinfo").write_text(
        "vendor_id\t: AuthenticAMD\ncpu family\t: 26\nmodel\t\t: 2\nmodel name\t: AMD EPYC\n\n" * 2
    )
    monkeypatch.setattr(machine, "CPUINFO", tmp_path / "cpuinfo")
    assert " AMD 26.2 " in machine.machine()["class"]
    monkeypatch.setattr(machine, "CPUINFO", tmp_path / "not_there")
    assert "AMD" not in machine.machine()["class"]


def paired(first, second):
    """Two methods, each with a score for each seed."""
    rows = [
        {"method": method, "seed": seed, "score": score}
        for method, scores in (("a", first), ("b", second))
        for seed, score in enumerate(scores)
    ]
    return measurement(key=("method",), record={**MADE, "rows": rows}, tables={})


def test_a_difference_has_the_interval_of_its_seeds_and_is_rerun_as_its_two_sides():
    """Differences 0.1, 0.2, 0.3: 0.2 ± 4.303 * 0.1 / sqrt(3), Student's t of two degrees of freedom."""
    one = paired([0.5, 0.7, 0.9], [0.4, 0.5, 0.6])
    text, found = filled("{score[a minus b]:+.3f}", {"m": one}, one)
    assert text == "+0.200 [-0.048, +0.448]"
    assert [side.rows for side in found[0].sides] == [(0, 1, 2), (3, 4, 5)]
    one = paired([0.5, 0.7], [0.4, 0.5])
    both = published(one, tables={"claims": {"template": "{m.score[b minus a]:.2f}"}})
    assert [figure.rows for figure in figures(both, one)] == [(2, 3), (0, 1)]
    rows = [{"method": "a", "seed": seed, "one": 0.1 * seed, "two": 0.0} for seed in (1, 2, 3)]
    one = measurement(key=("method",), record={**MADE, "rows": rows})
    assert filled("{one minus two[a]:+.3f}", {}, one)[0] == "+0.200 [-0.048, +0.448]"


@pytest.mark.parametrize(("first", "second"), [([0.5, 0.7], [0.4]), ([0.5], [0.4])])
def test_a_difference_needs_the_same_two_seeds(first, second):
    one = paired(first, second)
    with pytest.raises(ValueError, match="same two seeds or more"):
        filled("{score[a minus b]:.2f}", {"m": one}, one)


def claim(verdict, figures):
    return f"| paper | claim | verdict | what was measured |\n|---|---|---|---|\n| P | A is better | {verdict} | {figures} |"


@pytest.mark.parametrize(
    ("verdict", "figures"),
    [
        ("**holds**", "+0.2 [+0.1, +0.3]"),
        ("**undecided**", "+0.1 [-0.1, +0.3]"),
        ("**holds** here; **undecided** there", "+0.2 [+0.1, +0.3]; +0.1 [-0.1, +0.3]"),
        ("**holds** in every seed", "+0.2 [-0.1, +0.5]"),
        ("**holds**: two worlds of three", "+0.2 [+0.1, +0.3], +0.2 [+0.1, +0.3], +0.0 [-0.1, +0.1]"),
        ("**holds** within the margin", "-0.001 [-0.015, +0.013]"),
        ("**undecided** by the margin", "-0.014 [-0.025, -0.003]"),
        ("**does not**: beyond the margin", "-0.1 [-0.15, -0.05]"),
        ("**holds** for coverage", "coverage 0.8, 0.7; score +0.1 [-0.1, +0.3]"),
    ],
)
def test_verdicts_that_their_intervals_allow(verdict, figures):
    assert list(contradictions(claim(verdict, figures))) == []


@pytest.mark.parametrize(
    ("verdict", "figures", "fault"),
    [
        ("**holds**", "+0.1 [-0.1, +0.3]", "**holds** needs"),
        ("**holds**", "+0.1 [+0.000, +0.3]", "**holds** needs"),
        ("**undecided**", "+0.2 [+0.1, +0.3]", "**undecided** needs"),
        ("**holds**", "+0.2 [+0.1, +0.3]; +0.1 [-0.1, +0.3]", "an interval contains 0"),
        ("**holds** within the margin", "-0.014 [-0.025, -0.003]", "**holds** needs"),
        ("**undecided** by the margin", "-0.001 [-0.015, +0.013]", "**undecided** needs"),
    ],
)
def test_verdicts_that_their_intervals_contradict(verdict, figures, fault):
    assert fault in next(contradictions(claim(verdict, figures)))
