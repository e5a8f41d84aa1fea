import json

import numpy as np
import pytest
from added_rows import added_rows
from finished import finished as result
from tiny_world import write_lines

from fedlight.report.figures import coverage_plots
from fedlight.report.figures.lines import draw_scatter


def private(folder, owned):
    rows = [
        {"client": client, "fields": {"instruction": f"{i}", "category": category}}
        for client, categories in owned.items()
        for i, category in enumerate(categories)
    ]
    write_lines(folder / "private.jsonl", *map(json.dumps, rows))
    return str(folder)


def added(folder, scores):
    return added_rows(folder, [(client, "text", score) for client, own in scores.items() for score in own])


def test_labels_are_counted_by_client(tmp_path):
    records = {
        "even": private(tmp_path / "even", {"c1": "xy", "c0": "xxz"}),
        "uneven": private(tmp_path / "uneven", {"c0": "x", "c1": "zzzz"}),
    }
    done = coverage_plots.label_distribution(records, str(tmp_path / "labels.svg"))
    assert done["table"]["even"] == {"c0": {"x": 2, "z": 1}, "c1": {"x": 1, "y": 1}}
    assert done["table"]["uneven"] == {"c0": {"x": 1}, "c1": {"z": 4}}
    figure = coverage_plots.draw_labels(done["table"])
    cells = [axes.images[0].get_array().tolist() for axes in figure.axes[:2]]
    assert cells == [[[2, 1], [0, 1], [1, 0]], [[1, 0], [0, 0], [0, 4]]]
    assert [axes.get_title() for axes in figure.axes[:2]] == ["even", "uneven"]
    assert {axes.images[0].norm.vmax for axes in figure.axes[:2]} == {4}


def test_similarities_are_binned_by_client(tmp_path):
    record = added(tmp_path / "run", {"u": [0.0, 0.4, 0.41], "v": [0.2, 0.1]})
    done = coverage_plots.similarities({"FedDCA": record}, str(tmp_path / "sim.png"), alpha=0.7)
    edges = np.array(done["table"]["FedDCA"]["edges"])
    assert len(edges) == coverage_plots.BINS + 1
    assert (edges[0], round(edges[-1], 3)) == (0.0, 0.41)
    counts = done["table"]["FedDCA"]["counts"]
    assert {client: sum(own) for client, own in counts.items()} == {"u": 3, "v": 2}
    assert counts["v"][int(np.searchsorted(edges, 0.2)) - 1] == 1
    (axes,) = coverage_plots.draw_similarities(done["table"], 0.7).axes
    drawn = [patch.get_data().values for patch in axes.patches]
    np.testing.assert_allclose(drawn[-1], (np.array(counts["u"]) / 3 + np.array(counts["v"]) / 2) / 2)
    assert [line.get_xdata()[0] for line in axes.lines] == [0.7]


SEEDS = [
    [{"method": "none", "coverage": 0.5, "score": 0.2}, {"method": "FedDCA", "coverage": 0.9, "score": 0.5}],
    [{"method": "none", "coverage": 0.7, "score": 0.4}, {"method": "FedDCA", "coverage": 0.7, "score": 0.9}],
]


def test_coverage_and_score_are_averaged_over_seeds(tmp_path):
    more = {"method": "x", "score": 1.0}
    tables = [result(tmp_path / str(seed), [*rows, more]) for seed, rows in enumerate(SEEDS)]
    done = coverage_plots.coverage_against_score(tables, str(tmp_path / "scatter.svg"))
    none, feddca = {"x": [0.5, 0.7], "y": [0.2, 0.4]}, {"x": [0.9, 0.7], "y": [0.5, 0.9]}
    assert done["table"] == {"none": none, "FedDCA": feddca}
    assert done["correlation"] is None  # of two points it says nothing
    (axes,) = draw_scatter(done["table"], "coverage", "score").axes
    places = {text.get_text(): tuple(np.round(text.xy, 6)) for text in axes.texts}
    assert places == {"none": (0.6, 0.3), "FedDCA": (0.8, 0.7)}


def test_the_correlation_is_that_of_the_means(tmp_path):
    rows = [{"method": str(i), "coverage": i, "b": b} for i, b in enumerate((0.0, 2.0, 1.0))]
    table, output = result(tmp_path / "t", rows), str(tmp_path / "x.png")
    done = coverage_plots.coverage_against_score(table, output, y="b")
    assert done["correlation"] == pytest.approx(0.5)


def test_what_is_missing_is_named(tmp_path):
    out, nowhere = str(tmp_path / "x.svg"), str(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"nowhere/private\.jsonl: there is no such file: give the aug"):
        coverage_plots.label_distribution({"a": nowhere}, out)
    with pytest.raises(ValueError, match=r"nowhere/added\.jsonl: there is no such file: give the aug"):
        coverage_plots.similarities({"a": nowhere}, out)
    with pytest.raises(ValueError, match=r"nowhere/done\.json: there is no such file"):
        coverage_plots.coverage_against_score(nowhere, out)
    with pytest.raises(ValueError, match=r"no row has both 'coverage' and 'wins', but .*, score: set x and"):
        coverage_plots.coverage_against_score(result(tmp_path / "t", SEEDS[0]), out, y="wins")
    bare = str(tmp_path / "bare")
    write_lines(tmp_path / "bare/private.jsonl", '{"client": "u", "fields": {"instruction": "x"}}')
    with pytest.raises(ValueError, match="a row has no category: map a column to category, or set pseudo_"):
        coverage_plots.label_distribution({"a": bare}, out)
    with pytest.raises(ValueError, match="a client has no row with a score"):
        coverage_plots.similarities({"a": added(tmp_path / "random", {"u": [None]})}, out)
