"""``fedlight report --watch``: the page follows the files of runs, and the last one does not load itself again."""

import json
from types import SimpleNamespace

import pytest
from tiny_world import fedlight, refused

from fedlight.report.command import watch
from fedlight.report.page import write_report

RELOAD = '<meta http-equiv="refresh" content="5">'


@pytest.fixture
def going(monkeypatch):
    """``going(steps)``: each pause of a watch does the next of these steps; there are no more pauses."""

    def set_steps(*steps):
        left = iter(steps)
        pauses = SimpleNamespace(
            sleep=lambda seconds: next(left)()
        )  # not time.sleep itself, which other threads call
        monkeypatch.setattr("fedlight.report.command.time", pauses)

    return set_steps


def test_it_is_written_after_each_change_and_at_the_end(tmp_path, going):
    run, pages = tmp_path / "run", []
    run.mkdir()
    visits = run / "visits.csv"
    visits.write_text("round,client,loss\n0,a,0.5\n")

    def add(line):
        return lambda: visits.write_text(visits.read_text() + line)

    done = {"commands": [{"command": "fit", "state": "done"}]}
    going(
        lambda: None,
        add("1,a,0.4\n2,"),  # half a row
        lambda: None,
        add("a,0.3\n"),
        lambda: (run / "run.json").write_text("{"),  # half a file
        lambda: (run / "run.json").write_text(json.dumps(done)),
    )
    page = watch([run], written=lambda page: pages.append(page.read_text()))
    assert page == run / "report.html"
    assert len(pages) == 5  # the first, three changes, the end
    assert [RELOAD in text for text in pages] == [True] * 4 + [False]
    assert RELOAD not in write_report([run]).read_text()


def test_a_recipe_is_followed_until_it_has_its_results(tmp_path, going):
    stage, pages = tmp_path / "demo/seed0/fit_it", []
    stage.mkdir(parents=True)
    (stage / "settings.json").write_text(json.dumps({"stage": "fit selector.yaml"}))
    (stage / "done.json").write_text("{}")
    (tmp_path / "demo/seed0/run.lock").write_text("{}")
    going(
        lambda: (tmp_path / "demo/seed0/second").mkdir(),
        lambda: (tmp_path / "demo/results.json").write_text("{}"),
    )
    watch([tmp_path / "demo"], written=pages.append)
    assert len(pages) == 2


def test_some_stages_of_a_recipe_are_followed_until_its_lock_is_gone(tmp_path, going):
    """They leave no results; a stage that was killed is waited for."""
    home, pages = tmp_path / "demo", []
    for name in ("first", "second"):
        (home / "seed0" / name).mkdir(parents=True)
        (home / "seed0" / name / "settings.json").write_text(json.dumps({"stage": "fit selector.yaml"}))
        (home / "seed0" / name / "visits.csv").write_text("round,client,loss\n0,a,0.5\n")
    lock = home / "seed0/run.lock"
    lock.write_text("{}")
    (home / "seed0/first/done.json").write_text("{}")
    going(
        lambda: None,
        lambda: lock.unlink(),  # killed: the second stage has no end
        lambda: lock.write_text("{}"),
        lambda: (home / "seed0/second/done.json").write_text("{}"),
        lambda: lock.unlink(),
    )
    watch([home], written=pages.append)
    assert (home / "seed0/second/done.json").is_file()
    assert not lock.exists()


def test_its_own_files_are_no_change(tmp_path, going):
    run = tmp_path / "run"
    run.mkdir()
    (run / "visits.csv").write_text("round,client,loss\n" + "".join(f"{i},a,0.5\n" for i in range(5)))
    pages = []

    def end():
        raise KeyboardInterrupt

    going(lambda: None, lambda: None, end)
    with pytest.raises(KeyboardInterrupt):
        watch([run], written=pages.append)
    assert len(pages) == 1


def test_the_command_ends_quietly(tmp_path, going):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/visits.csv").write_text("round,client,loss\n0,a,0.5\n")

    def end():
        raise KeyboardInterrupt

    going(end)
    done = fedlight("report", str(tmp_path / "run"), "--watch", "--seconds", "2")
    assert (done.code, done.out.splitlines()[-1]) == (0, "no longer watched")
    assert "above 0" in refused(fedlight("report", str(tmp_path / "run"), "--watch", "--seconds", "0"))
