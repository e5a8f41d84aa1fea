import pytest

from fedlight.support.console import progress_bar


@pytest.mark.parametrize(("work", "color"), [(3, ""), (0, "1")])
def test_short_work_outside_of_a_terminal_and_none_in_one_say_nothing(work, color, capfd, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", color)
    with progress_bar("Encoding with x", total=work) as advance:
        advance(work)
    assert capfd.readouterr() == ("", "")


def test_a_bar_in_a_terminal_names_the_work_and_how_far_it_is(capfd, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    with progress_bar("Encoding with x", total=1200) as advance:
        advance(300)
    out, err = capfd.readouterr()
    assert out == ""
    assert "Encoding with x" in err
    assert "300/1200" in err


def test_long_work_says_how_far_it_is_outside_of_a_terminal(capfd, monkeypatch):
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    seconds = iter([0, 20, 40, 50, 120])
    monkeypatch.setattr("fedlight.support.console.time.monotonic", lambda: next(seconds))
    with progress_bar("Encoding with x", total=4000) as advance:
        for _ in range(4):
            advance(1000)
    assert capfd.readouterr().err.splitlines() == [
        "Encoding with x: 2,000 of 4,000, 0.7 min left",
        "Encoding with x: 4,000 of 4,000, 0.0 min left",
    ]
