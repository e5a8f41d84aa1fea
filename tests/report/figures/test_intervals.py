import pytest
from finished import finished

from fedlight.report.figures.plots import Estimate, draw_intervals, method_intervals


def test_dots_and_lines_are_the_estimates():
    panels = {
        "one": {"m": Estimate(0.6, 0.5, 0.7), "n": Estimate(0.4, 0.3, 0.45)},
        "two": {"n": Estimate(0.9, 0.8, 1.0), "m": Estimate(0.1, 0.0, 0.2)},
    }
    figure = draw_intervals(panels, "accuracy")
    for axes, (title, found) in zip(figure.axes, panels.items(), strict=True):
        assert axes.get_title() == title
        middle, *drawn = axes.get_lines()
        assert list(middle.get_xdata()) == [0.5, 0.5]
        for row, method in enumerate(("m", "n")):
            line, dot = drawn[2 * row : 2 * row + 2]
            assert list(line.get_xdata()) == [found[method].low, found[method].high]
            assert list(dot.get_xdata()) == [found[method].value]
            assert list(line.get_ydata()) == [row, row]
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == ["m", "n"]


def test_a_stage_over_seeds(tmp_path):
    folders = []
    for seed, value in enumerate((0.5, 0.75)):
        row = {"method": "m", "own": value, "own_low": value - 0.1, "own_high": value + 0.2}
        folders.append(finished(tmp_path / f"seed{seed}", [row, {"method": "without"}]))
    done = method_intervals(folders, str(tmp_path / "figure.svg"))
    assert done["table"] == {"m": pytest.approx((0.625, 0.525, 0.825))}
    first = (tmp_path / "figure.svg").read_text()
    assert "<svg" in first
    method_intervals(folders, str(tmp_path / "figure.svg"))
    assert (tmp_path / "figure.svg").read_text() == first
