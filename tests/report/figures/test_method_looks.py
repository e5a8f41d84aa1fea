from stage_folders import logged, stage_folder

from fedlight.report.figures.style import COLORS, method_looks, row_looks
from fedlight.report.sections import client_data, curves
from fedlight.runs.run import read_runs


def metrics(folder, *columns):
    logged(folder, ",".join(columns), *(f"{n},{n}" + ",0.5" * len(columns) for n in range(3)))


def drawn(chart):
    return {line.get_gid(): line.get_color() for line in chart.figure.axes[0].get_lines() if line.get_gid()}


def test_a_method_keeps_its_colour_on_a_chart_that_lacks_another(tmp_path):
    metrics(stage_folder(tmp_path / "seed0/fedavg"), "val/loss")
    metrics(stage_folder(tmp_path / "seed0/fedprox"), "val/loss", "val/accuracy")
    colors = {chart.name: drawn(chart) for chart in curves.section(read_runs([tmp_path])).parts}
    assert colors == {
        "curve_val_accuracy_epoch": {"series:fedprox": COLORS[1]},
        "curve_val_loss_epoch": {"series:fedavg": COLORS[0], "series:fedprox": COLORS[1]},
    }


def test_a_method_of_two_recipes_has_one_colour_and_two_kinds_of_dashes(tmp_path):
    for home in ("first", "second"):
        for name in ("fedavg", "ditto"):
            stage_folder(tmp_path / home / "seed0" / name)
    looks = method_looks(read_runs([tmp_path / "first", tmp_path / "second"]))
    assert sorted(looks) == ["first/ditto", "first/fedavg", "second/ditto", "second/fedavg"]
    for name in ("fedavg", "ditto"):
        assert looks[f"first/{name}"]["color"] == looks[f"second/{name}"]["color"]
    assert len({(look["color"], look["linestyle"]) for look in looks.values()}) == 4


def test_the_table_of_a_recipe_has_the_colours_of_the_stages_that_it_names(tmp_path):
    trained = stage_folder(tmp_path / "seed0/fedbiscuit3")
    stage_folder(tmp_path / "seed0/fedbis")
    spec = {"stage": "call f", "methods": {"FedBiscuit, U = 3": {"train": str(trained)}}}
    stage_folder(tmp_path / "seed0/table", spec)
    runs = read_runs([tmp_path])
    known = method_looks(runs)
    looks = row_looks(["raw", "FedBis", "FedBiscuit, U = 3"], runs, known)
    assert looks["FedBis"] == known["fedbis"]
    assert looks["FedBiscuit, U = 3"] == known["fedbiscuit3"]
    assert looks["raw"]["color"] not in COLORS


def test_the_clients_of_a_method_are_drawn_in_its_colour(tmp_path):
    metrics(stage_folder(tmp_path / "seed0/first"), "val/loss")
    rows = "stage,round,client,accuracy,own_accuracy\n" + "".join(f"val,{n},c{n},0.5,\n" for n in range(2))
    stage_folder(tmp_path / "seed0/second", clients_csv=rows)
    runs = read_runs([tmp_path])
    charts = [part for part in client_data.spread_section(runs).parts if part.kind == "chart"]
    colors = {line.get_color() for chart in charts for line in chart.figure.axes[0].get_lines()}
    assert colors == {COLORS[1]}
