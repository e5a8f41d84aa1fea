import pytest

from fedlight.cli.main import main
from fedlight.report import page
from fedlight.report.parts import Section
from fedlight.report.sections import overview


@pytest.fixture
def folder(tmp_path):
    header = "round,client,split,steps,examples,loss,bytes_down,bytes_up,seconds\n"
    (tmp_path / "visits.csv").write_text(header)
    return tmp_path


def test_the_page_lies_in_the_folder_of_the_run_and_is_opened_on_demand(folder, capsys, monkeypatch):
    monkeypatch.setattr(page, "SECTIONS", {"overview": overview.section})
    main(["report", str(folder)])
    said = "Nothing was measured.\n"
    assert capsys.readouterr().out == f"{said}report: {folder / 'report.html'}\n"
    assert (folder / "report.html").read_text().startswith("<!doctype html>")
    assert (folder / "report_files").is_dir()
    opened = []
    monkeypatch.setattr(page, "SECTIONS", {"overview": overview.section})
    monkeypatch.setattr("webbrowser.open", opened.append)
    main(["report", str(folder), "--output", str(folder / "x.html"), "--open"])
    assert opened == [(folder / "x.html").as_uri()]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["{}/nothing"], "there is no such folder: give that of a run or of a recipe"),
        (["{}", "--output", "{}/page.txt"], "let it end with .html"),
        (["{}", "--output", "{}/folder.html"], "is a folder: give the name of a file"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(folder, capsys, arguments, told):
    (folder / "folder.html").mkdir()
    with pytest.raises(SystemExit) as stop:
        main(["report", *(argument.format(folder) for argument in arguments)])
    said = str(stop.value.code) + capsys.readouterr().err
    assert told in said
    assert "Traceback" not in said


def test_a_section_that_fails_says_so_and_the_others_are_there(folder, monkeypatch):
    def broken(runs):
        raise KeyError("loss\nof <b>")

    def fine(runs):
        return Section("curves", "Curves of all", "", [])

    monkeypatch.delenv("FEDLIGHT_TRACEBACK", raising=False)
    monkeypatch.setattr(page, "SECTIONS", {"devices": broken, "curves": fine})
    text = page.write_report([folder]).read_text()
    assert "This section could not be made: KeyError: " in text
    assert "of &lt;b&gt;" in text
    assert "Curves of all" in text
