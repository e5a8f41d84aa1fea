import json

from fedlight.report.figures.style import COLORS, method_looks, row_looks
from fedlight.report.sections import clients, curves
from fedlight.runs.run import read_runs


def stage(home, name, settings=None, **files):
    """A folder of a recipe's stage, ``fit`` if not told otherwise."""
    folder = home / "seed0" / name
    folder.mkdir(parents=True)
    (folder / "settings.json").write_text(json.dumps(settings or {"stage": "fit selector.yaml"}))
    for file, text in files.items():
        (folder / file.replace("_csv", ".csv")).write_text(text)
    return folder


def metrics(folder, *columns):
    (folder / "metrics" / "version_0").mkdir(parents=True)
    text = "epoch,step," + ",".join(columns) + "\n"
    text += "".join(f"{n},{n}" + ",0.5" * len(columns) + "\n" for n in range(3))
    (folder / "metrics" / "version_0" / "metrics.csv").write_text(text)


def drawn(chart):
    return {line.get_gid(): line.get_color() for line in chart.figure.axes[0].get_lines() if line.get_gid()}


def test_a_method_keeps_its_colour_on_a_chart_that_lacks_another(tmp_path):
    metrics(stage(tmp_path, "fedavg"), "val/loss")
    metrics(stage(tmp_path, "fedprox"), "val/loss", "val/accuracy")
    colors = {chart.name: drawn(chart) for chart in curves.section(read_runs([tmp_path])).parts}
    assert colors == {
        "curve_val_accuracy_epoch": {"series:fedprox": COLORS[1]},
        "curve_val_loss_epoch": {"series:fedavg": COLORS[0], "series:fedprox": COLORS[1]},
    }


def test_a_method_of_two_recipes_has_one_colour_and_two_kinds_of_dashes(tmp_path):
    for home in ("first", "second"):
        stage(tmp_path / home, "fedavg")
        stage(tmp_path / home, "ditto")
    looks = method_looks(read_runs([tmp_path / "first", tmp_path / "second"]))
    assert {name: look["color"] for name, look in looks.items()} == {
        **{"first/fedavg": looks["second/fedavg"]["color"], "first/ditto": looks["second/ditto"]["color"]},
        **{"second/fedavg": looks["first/fedavg"]["color"], "second/ditto": looks["first/ditto"]["color"]},
    }
    assert len({(look["color"], look["linestyle"]) for look in looks.values()}) == 4


def test_the_table_of_a_recipe_has_the_colours_of_the_stages_that_it_names(tmp_path):
    trained = stage(tmp_path, "fedbiscuit3")
    stage(tmp_path, "fedbis")
    spec = {"stage": "call f", "methods": {"FedBiscuit, U = 3": {"train": str(trained)}}}
    stage(tmp_path, "table", spec)
    runs = read_runs([tmp_path])
    known = method_looks(runs)
    looks = row_looks(["raw", "FedBis", "FedBiscuit, U = 3"], runs, known)
    assert looks["FedBis"] == known["fedbis"]
    assert looks["FedBiscuit, U = 3"] == known["fedbiscuit3"]
    assert looks["raw"]["color"] not in COLORS


def test_a_single_line_is_named_as_well(tmp_path):
    metrics(stage(tmp_path, "alone"), "val/accuracy")
    (chart,) = curves.section(read_runs([tmp_path])).parts
    assert [text.get_text() for text in chart.figure.legends[0].get_texts()] == ["alone"]


def test_the_clients_of_a_method_are_drawn_in_its_colour(tmp_path):
    metrics(stage(tmp_path, "first"), "val/loss")
    rows = "stage,round,client,accuracy,own_accuracy\n" + "".join(f"val,{n},c{n},0.5,\n" for n in range(2))
    stage(tmp_path, "second", clients_csv=rows)
    runs = read_runs([tmp_path])
    charts = [part for part in clients.section(runs).parts if part.kind == "chart"]
    colors = {line.get_color() for chart in charts for line in chart.figure.axes[0].get_lines()}
    assert colors == {COLORS[1]}
