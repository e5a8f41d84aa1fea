import numpy as np
import pytest
from finished import finished
from matplotlib.colors import to_rgb
from tiny_world import write_lines

from fedlight.recipes.stages import Stage
from fedlight.report.figures import plots, style
from fedlight.report.figures.plots import Estimate
from fedlight.support.files import read_json

METRICS = "epoch,step,train/loss,win_rate/oracle,win_rate/selector"
CLIENTS = "stage,round,client,examples,group,selector,accuracy,own_accuracy"
GROUPS = """round,client,selector,loss_0,loss_1,known_group
0,c1,0,0.5,0.6,warm
0,c2,1,0.5,0.4,terse
0,c3,1,0.5,0.4,warm
10,c1,1,0.5,0.4,warm
10,c2,0,0.5,0.6,terse
10,c3,1,0.5,0.4,warm
10,c4,1,0.5,0.4,terse
"""


@pytest.fixture
def runs(tmp_path):
    """One run without a stop, and one that was killed after step 20, whose last row was trained again."""
    whole = [",0,,0.5,0.5", "0,9,0.6,,", ",10,,0.625,0.75", ",20,,0.5,1.0"]
    write_lines(tmp_path / "whole/metrics/version_0/metrics.csv", METRICS, *whole)
    parts = {2: [",0,,0.5,0.5", ",10,,0.25,0.125", ",20,,0.875,0.875"]}
    parts |= {9: ["1,15,0.5,,"], 10: [",20,,0.75,1.0"]}
    for version, rows in parts.items():
        header = "epoch,step,train/loss" if version == 9 else METRICS
        rows = [row.rstrip(",") for row in rows] if version == 9 else rows
        write_lines(tmp_path / f"resumed/metrics/version_{version}/metrics.csv", header, *rows)
    return {"FedBis": str(tmp_path / "whole"), "FedBiscuit": str(tmp_path / "resumed")}


RATES = {
    "FedBis": {"step": [0, 10, 20], "oracle": [0.5, 0.625, 0.5], "selector": [0.5, 0.75, 1.0]},
    "FedBiscuit": {"step": [0, 10, 20], "oracle": [0.5, 0.25, 0.75], "selector": [0.5, 0.125, 1.0]},
}


def lines(axes):
    """x, y, colour and style of the lines with more points than two."""
    return [
        (line.get_xdata(), line.get_ydata(), line.get_color(), line.get_linestyle())
        for line in axes.lines
        if len(line.get_xdata()) > 2
    ]


def texts(figure):
    (axes,) = figure.axes
    (legend,) = figure.legends
    return [axes.get_xlabel(), axes.get_ylabel(), *(text.get_text() for text in legend.get_texts())]


def test_win_rates_of_resumed_runs_are_put_together_and_an_svg_has_nothing_but_them(runs, tmp_path):
    figure, again = tmp_path / "figures/hacking.svg", tmp_path / "again.svg"
    given = {"runs": runs, "output": str(figure)}
    told = {"call": "fedlight.report.figures.plots.reward_hacking", "with": given}
    done = Stage("plot", tmp_path / "plot", told).run()
    assert read_json(tmp_path / "plot/done.json", "run it again") == done
    names = ("method", "oracle_best", "oracle_last", "selector_best", "selector_last")
    rows = [("FedBis", 0.625, 0.5, 1.0, 1.0), ("FedBiscuit", 0.75, 0.75, 1.0, 1.0)]
    rows = [dict(zip(names, row, strict=True)) for row in rows]
    assert done["result"] == {"file": str(figure), "table": RATES, "rows": rows}
    plots.reward_hacking(runs, str(again))
    assert figure.read_text() == again.read_text()
    assert figure.read_text().startswith("<?xml")
    assert "dc:date" not in figure.read_text()


def test_a_later_version_that_began_anew_counts_alone(runs, tmp_path):
    write_lines(tmp_path / "whole/metrics/version_1/metrics.csv", METRICS, ",0,,0.5,0.5", ",10,,0.25,0.75")
    done = plots.reward_hacking({"x": runs["FedBis"]}, str(tmp_path / "a.png"))
    assert done["table"]["x"] == {"step": [0, 10], "oracle": [0.5, 0.25], "selector": [0.5, 0.75]}


def test_the_oracle_is_solid_and_the_selector_dashed():
    figure = plots.draw_reward_hacking(RATES)
    shown = lines(figure.axes[0])
    assert [(list(x), list(y), style) for x, y, _, style in shown] == [
        ([0, 10, 20], RATES[label][name], style)
        for label in RATES
        for name, style in (("oracle", "-"), ("selector", "--"))
    ]
    colors = [color for _, _, color, _ in shown]
    assert colors[0] == colors[1] != colors[2] == colors[3]
    assert texts(figure) == [
        "optimizer steps",
        "win rate over the raw model\n(share of prompts)",
        *("FedBis", "FedBiscuit", "judged by the oracle", "judged by the selector"),
    ]


@pytest.fixture
def client_files(tmp_path):
    """Accuracies 0.75, 0.25, 1.0 in the test of one method; another method's own models; a third's last round."""
    test = ["test,,c1,4,,1,0.5,0.75", "test,,c2,4,,0,0.5,0.25", "test,,c3,4,,,1.0,"]
    both = [*test, "own,,c1,4,,,0.125,0.125", "own,,c2,4,,,0.0,0.0"]
    val = ["val,2,c1,4,,,0.0,0.0", "val,10,c1,4,,,0.5,0.5", "val,10,c2,4,,,0.25,0.25"]
    return {
        name: write_lines(tmp_path / name / "clients.csv", CLIENTS, *rows)
        for name, rows in {"grouped": test, "alone": both, "watched": val}.items()
    }


def test_clients_are_sorted_by_the_accuracy_that_they_get(client_files, tmp_path):
    done = plots.clients(client_files, str(tmp_path / "clients.png"))
    assert done["table"] == {
        "grouped": {"accuracy": [0.25, 0.75, 1.0], "mean": 2 / 3, "worst_tenth": 0.25},
        "alone": {"accuracy": [0.0, 0.125], "mean": 0.0625, "worst_tenth": 0.0},
        "watched": {"accuracy": [0.25, 0.5], "mean": 0.375, "worst_tenth": 0.25},
    }
    assert (tmp_path / "clients.png").read_bytes().startswith(b"\x89PNG")


def test_the_worst_tenth_is_shaded():
    accuracies = [0.05 * rank for rank in range(20)]
    clients = {"x": {"accuracy": accuracies, "mean": 0.475, "worst_tenth": 0.025}}
    figure = plots.draw_clients(clients, style.looks({"x": "x"}))
    (axes,) = figure.axes
    ((ranks, shown, _, _),) = lines(axes)
    assert list(ranks) == list(range(1, 21))
    assert list(shown) == accuracies
    (shade,) = axes.patches
    assert (shade.get_x(), shade.get_width()) == (0.5, 2)
    assert texts(figure)[2:] == ["x: mean 0.475, worst tenth 0.025"]


def test_groups_are_an_image_of_clients_sorted_by_known_group(tmp_path):
    done = plots.groups(write_lines(tmp_path / "groups.csv", GROUPS), str(tmp_path / "groups.svg"))
    assert done["table"] == {
        "round": [0, 10],
        "client": ["c2", "c4", "c1", "c3"],
        "known_group": ["terse", "terse", "warm", "warm"],
        "selector": [[1, 0], [None, 1], [0, 1], [1, 1]],
    }
    figure = plots.draw_groups(done["table"])
    (axes,) = figure.axes
    areas = axes.patches
    assert [to_rgb(area.get_facecolor()) for area in areas] == [to_rgb(color) for color in style.COLORS[:2]]
    assert not axes.images  # which could not follow the page's theme
    for selector, area in enumerate(areas):
        outlines = area.get_path().to_polygons()
        cells = [
            [
                any(min(x) < at < max(x) and min(y) < row < max(y) for x, y in (o.T for o in outlines))
                for at in (0, 1)
            ]
            for row in range(4)
        ]
        expected = np.array([[1, 0], [-1, 1], [0, 1], [1, 1]]) == selector
        np.testing.assert_array_equal(cells, expected)
    assert [text.get_text() for text in axes.get_xticklabels()] == ["0", "10"]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["terse", "warm"]
    assert axes.get_yticks().tolist() == [0.5, 2.5]
    assert [line.get_ydata()[0] for line in axes.lines] == [1.5]
    assert texts(figure)[2:] == ["selector 0", "selector 1"]


def test_without_known_groups_no_group_is_named(tmp_path):
    file = write_lines(tmp_path / "g.csv", "round,client,selector", "0,b,0", "0,a,0")
    table = plots.groups(file, str(tmp_path / "g.png"))["table"]
    assert table["client"] == ["a", "b"]
    axes = plots.draw_groups(table).axes[0]
    assert axes.get_ylabel() == "2 clients"
    assert axes.lines[:] == []


def test_dots_and_lines_are_the_estimates():
    estimates = {"m": Estimate(0.6, 0.5, 0.7), "n": Estimate(0.4, 0.3, 0.45)}
    (axes,) = plots.draw_intervals({"": estimates}, "accuracy").axes
    middle, *drawn = axes.get_lines()
    assert list(middle.get_xdata()) == [0.5, 0.5]
    for row, estimate in enumerate(estimates.values()):
        line, dot = drawn[2 * row : 2 * row + 2]
        assert list(line.get_xdata()) == [estimate.low, estimate.high]
        assert list(dot.get_xdata()) == [estimate.value]
        assert list(line.get_ydata()) == [row, row]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["m", "n"]


def test_intervals_over_seeds(tmp_path):
    folders = []
    for seed, value in enumerate((0.5, 0.75)):
        row = {"method": "m", "own": value, "own_low": value - 0.1, "own_high": value + 0.2}
        folders.append(finished(tmp_path / f"seed{seed}", [row, {"method": "without"}]))
    done = plots.method_intervals(folders, str(tmp_path / "figure.svg"))
    assert done["table"] == {"m": pytest.approx((0.625, 0.525, 0.825))}
    assert "<svg" in (tmp_path / "figure.svg").read_text()


def test_what_is_missing_is_named(runs, client_files, tmp_path):
    out = str(tmp_path / "x.svg")
    with pytest.raises(ValueError, match=r"elsewhere: no metrics/version_\*/metrics.csv in it has the col"):
        plots.reward_hacking({"x": str(tmp_path / "elsewhere")}, out)
    write_lines(tmp_path / "other/metrics/version_0/metrics.csv", "step,win_rate/oracle", "0,0.5")
    with pytest.raises(ValueError, match="has the columns win_rate/oracle and win_rate/selector"):
        plots.reward_hacking({"x": str(tmp_path / "other")}, out)
    with pytest.raises(ValueError, match=r"none\.csv: there is no such file"):
        plots.clients({"x": str(tmp_path / "none.csv")}, out)
    with pytest.raises(ValueError, match="there is no column 'own_accuracy' among stage, round, accuracy"):
        plots.clients({"x": write_lines(tmp_path / "c.csv", "stage,round,accuracy", "test,,1")}, out)
    with pytest.raises(ValueError, match=r"e\.csv: there is no row"):
        plots.groups(write_lines(tmp_path / "e.csv", "round,client,selector"), out)
    with pytest.raises(ValueError, match=r"output=figure\.gif must end with \.svg or \.png"):
        plots.reward_hacking(runs, "figure.gif")
    with pytest.raises(ValueError, match="13 methods: between 1 and 12 can be told apart"):
        plots.clients({str(index): client_files["alone"] for index in range(13)}, out)
    assert not (tmp_path / "x.svg").exists()
