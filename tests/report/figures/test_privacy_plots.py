import itertools

import numpy as np
import pytest
from finished import finished as table
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Annotation

from fedlight.callbacks.attacks.records import AttackTable
from fedlight.recipes.stages import Stage
from fedlight.report.figures.lines import draw_scatter
from fedlight.report.figures.privacy_plots import differences, draw_leakage, leakage_over_rounds, trade_off
from fedlight.report.figures.privacy_table import PRETRAINED

BETAS = {f"beta = {beta}": f"FewFedPIT, {beta}" for beta in (0, 0.5, 1)}


def row(method, leakage, utility):
    return {"method": method, "utility": utility, "leakage": leakage}


@pytest.fixture
def tables(tmp_path):
    """Two seeds; LocIT leaks nothing that was measured."""
    seeds = [
        [
            row(PRETRAINED, 0.125, 0.25),
            row("FedAvg", 0.5 + off, 0.5),
            row("FewFedPIT, 0", 0.25, 0.375 - off),
            row("FewFedPIT, 0.5", 0.375, 0.625),
            row("FewFedPIT, 1", 0.5 + off, 0.5),
            {"method": "LocIT", "utility": 0.25},
        ]
        for off in (0, 0.25)
    ]
    return [table(tmp_path / f"seed{seed}/table", rows) for seed, rows in enumerate(seeds)]


def run(folder, values, target="global"):
    attack = AttackTable(folder / "attacks/attacks.csv", "memory")
    for number, value in values.items():
        attack.put(number, {target: {"rouge_l": value}})
    return str(folder)


def test_trade_off_shows_the_means_and_joins_the_betas(tables, tmp_path):
    told = {"tables": tables, "x": "leakage", "paths": {"FewFedPIT": BETAS}}
    told["output"] = str(tmp_path / "t.svg")
    stage = {"call": "fedlight.report.figures.privacy_plots.trade_off", "with": told}
    found = Stage("trade_off", tmp_path / "trade_off", stage).run()["result"]
    assert list(found["table"]) == [PRETRAINED, "FedAvg", *BETAS.values()]
    assert found["table"]["FedAvg"] == {"x": [0.5, 0.75], "y": [0.5, 0.5]}
    (axes,) = draw_scatter(found["table"], "leakage", "utility", {"FewFedPIT": BETAS}).axes
    joined = next(line for line in axes.lines if line.get_label() == "FewFedPIT")
    assert [text.get_text() for text in axes.figure.legends[0].get_texts()] == ["FewFedPIT"]
    np.testing.assert_allclose(joined.get_xydata(), [[0.25, 0.25], [0.375, 0.625], [0.625, 0.5]])
    named = {text.get_text(): text.xy for text in axes.texts}
    assert named["FedAvg"] == (0.625, 0.5)
    assert named["beta = 0"] == (0.25, 0.25)
    assert set(named) == {PRETRAINED, "FedAvg", *BETAS}
    assert "<!-- leakage  (less is better) -->" in (tmp_path / "t.svg").read_text()
    one = trade_off(tables[0], "leakage", str(tmp_path / "one.png"), names={"utility": "exact match"})
    assert one["table"]["FedAvg"] == {"x": [0.5], "y": [0.5]}


def shown(figure):
    """The boxes of all names, in pixels."""
    figure.draw_without_rendering()
    renderer = FigureCanvasAgg(figure).get_renderer()
    texts = [text for axes in figure.axes for text in axes.texts if isinstance(text, Annotation)]
    # Without their lines, which may cross.
    return [super(Annotation, text).get_window_extent(renderer) for text in texts]


def apart(boxes):
    return all(not one.overlaps(other) for one, other in itertools.combinations(boxes, 2))


def test_names_do_not_cover_each_other():
    """Twelve points in a corner of the figure, some of them at the same place."""
    stream = np.random.default_rng(1)
    points = stream.normal(0, 0.05, (9, 2))
    near = {f"a method of name {i}": {"x": [x], "y": [y]} for i, (x, y) in enumerate(points)}
    same = {f"FewFedPIT {i}": {"x": [0.01], "y": [0.02]} for i in range(3)}
    figure = draw_scatter({**near, **same, "far": {"x": [1], "y": [1]}}, "x", "y")
    boxes = shown(figure)
    assert len(boxes) == 13
    assert apart(boxes)
    points = figure.axes[0].get_window_extent()
    assert all(points.x1 < box.x0 and box.x1 <= figure.bbox.x1 for box in boxes)
    means = {f"method {i}": [0.1 * i, 0.5 + 0.001 * i] for i in range(12)}
    lines = {name: {"round": [1, 2], "mean": mean, "std": [0, 0]} for name, mean in means.items()}
    boxes = shown(draw_leakage(lines, "leakage", level=0.5))
    assert len(boxes) == 13
    assert apart(boxes)
    heights = [box.y0 for box in boxes[:-1]]
    assert heights == sorted(heights)  # in the order of the lines


def test_leakage_is_averaged_over_seeds_and_the_start_is_a_level(tmp_path):
    seeds = [run(tmp_path / f"a{i}", {0: 0.125, 2: 0.25 + i / 4, 4: 0.5}) for i in (0, 1)]
    runs = {"FedAvg": seeds, "FewFedPIT": run(tmp_path / "b", {2: 0.25, 4: 0.25})}
    found = leakage_over_rounds(runs, "memory/rouge_l", str(tmp_path / "l.svg"), name="ROUGE-L")
    assert found["pretrained"] == 0.125
    assert found["table"]["FewFedPIT"] == {"round": [2, 4], "mean": [0.25, 0.25], "std": [0, 0]}
    assert found["table"]["FedAvg"]["mean"] == [0.375, 0.5]
    assert found["table"]["FedAvg"]["std"] == pytest.approx([0.125 * 2**0.5, 0])
    (axes,) = draw_leakage(found["table"], "ROUGE-L", found["pretrained"]).axes
    np.testing.assert_allclose(axes.lines[0].get_xydata(), [[2, 0.375], [4, 0.5]])
    assert axes.lines[-1].get_linestyle() == "--"
    assert set(axes.lines[-1].get_ydata()) == {0.125}
    assert [text.get_text() for text in axes.texts] == [PRETRAINED, "FewFedPIT", "FedAvg"]  # by height
    assert axes.get_ylabel() == "ROUGE-L"
    assert len({line.get_color() for line in axes.lines[:2]}) == 2
    run(tmp_path / "b", {4: 0.75}, target="c0")
    one, output = {"b": runs["FewFedPIT"]}, str(tmp_path / "u.png")
    of_uploads = leakage_over_rounds(one, "memory/rouge_l", output, "uploads")
    assert of_uploads["table"] == {"b": {"round": [4], "mean": [0.75], "std": [0]}}
    assert of_uploads["pretrained"] is None


def test_what_cannot_be_drawn_is_named(tables, tmp_path):
    out = str(tmp_path / "x.svg")
    with pytest.raises(ValueError, match=r"no row has both 'auc' and 'utility', but .*, leakage: set x"):
        trade_off(tables, "auc", out)
    with pytest.raises(ValueError, match="paths: F has 'LocIT', which is no method with leakage and util"):
        trade_off(tables, "leakage", out, paths={"F": {"x": "LocIT"}})
    with pytest.raises(ValueError, match=r"nowhere/done\.json: there is no such file"):
        trade_off(str(tmp_path / "nowhere"), "leakage", out)
    with pytest.raises(ValueError, match=r"attacks\.csv: there is no such file"):
        leakage_over_rounds({"x": str(tmp_path / "nowhere")}, "memory/rouge_l", out)
    one, other = run(tmp_path / "one", {0: 0.5, 2: 0.5}), run(tmp_path / "other", {3: 0.5})
    with pytest.raises(ValueError, match=r"x: its runs were attacked after rounds \[\[2\], \[3\]\]: give"):
        leakage_over_rounds({"x": [one, other]}, "memory/rouge_l", out)
    with pytest.raises(ValueError, match=r"x: its runs were attacked after rounds \[\[\]\]"):
        leakage_over_rounds({"x": run(tmp_path / "before", {0: 0.5})}, "memory/rouge_l", out)
    with pytest.raises(ValueError, match="19 lines: between 1 and 18 can be told apart"):
        leakage_over_rounds({str(i): one for i in range(19)}, "memory/rouge_l", out)
    with pytest.raises(ValueError, match=r"output=.*x\.pdf must end with \.svg or \.png"):
        leakage_over_rounds({"x": one}, "memory/rouge_l", str(tmp_path / "x.pdf"))


def test_differences_are_paired_by_seed_with_students_interval(tmp_path):
    seeds = [{"a": 0.5, "b": 0.25}, {"a": 0.75, "b": 0.375}, {"a": 0.25, "b": 0.25}]
    rows = [[{"method": method, "utility": value} for method, value in seed.items()] for seed in seeds]
    tables = [table(tmp_path / f"s{number}", own) for number, own in enumerate(rows)]
    arguments = {"pairs": {"a over b": ["a", "b"], "b over a": ["b", "a"]}, "output": str(tmp_path / "d.svg")}
    found = differences(tables, **arguments)
    # Differences 0.25, 0.375 and 0, of mean 5/24; t of 0.975 with 2 degrees of freedom is 4.302653.
    gaps = np.array([0.25, 0.375, 0.0])
    half = 4.302653 * gaps.std(ddof=1) / 3**0.5
    first, second = found["rows"]
    assert first == {
        **{"pair": "a over b", "difference": pytest.approx(5 / 24), "low": pytest.approx(5 / 24 - half)},
        **{"high": pytest.approx(5 / 24 + half), "seeds": 3},
    }
    assert second["low"] == pytest.approx(-first["high"])
    drawn = (tmp_path / "d.svg").read_text()
    assert all(f"<!-- {name} -->" in drawn for name in ("a over b", "b over a", "difference of utility"))
    one = differences(tables[0], **arguments)["rows"][0]
    assert (one["difference"], one["low"], one["high"], one["seeds"]) == (0.25, None, None, 1)


@pytest.mark.parametrize(
    ("pair", "message"),
    [(["a"], "has 1 methods: give one and the one to subtract"), (["a", "c"], "s0 has no 'utility' of 'c'")],
)
def test_pairs_that_are_none(pair, message, tmp_path):
    folder = table(tmp_path / "s0", [{"method": "a", "utility": 1.0}, {"method": "b"}])
    with pytest.raises(ValueError, match=message):
        differences(folder, {"p": pair}, str(tmp_path / "d.svg"))
