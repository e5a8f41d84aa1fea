from fedlight.report.figures.style import looks
from fedlight.report.parts import capitalized
from fedlight.report.sections.curves import in_words
from fedlight.report.sections.overview import draw_results, headline

METRICS = ["accuracy", "clients", "own", "spread", "win_rate", "by_group", "sent"]
ROWS = [
    {"method": "a", "accuracy": 0.1, "clients": 0.4, "own": 3.0, "spread": 0.2, "win_rate": 0.5, "sent": 9.0},
    {"method": "b", "accuracy": 0.2, "clients": 0.1, "spread": 0.9, "win_rate": 0.4, "by_group": 0.5},
    {"method": "c", "win_rate": None, "clients": 0.8, "sent": None},
]


def test_scores_are_drawn_before_others_and_one_panel_needs_no_figure_for_phones():
    assert headline(METRICS) == ["accuracy", "clients", "own", "win_rate"]
    assert headline(METRICS[:3]) == METRICS[:3]
    seen = looks({name: name for name in "abc"})
    one, two, three = (draw_results(ROWS, [*"abc"], METRICS[:n], "Results", "x", seen) for n in (1, 2, 3))
    assert one.narrow is None
    assert (len(two.narrow.axes), len(three.narrow.axes)) == (2, 3)


def test_odd_metrics_have_words():
    assert [capitalized(in_words(metric)) for metric in ("my", "a/")] == ["My", "A/ (a)"]
