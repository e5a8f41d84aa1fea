import pytest
from stage_folders import logged, stage_folder

from fedlight.report.sections.curves import held, over_time, time_section
from fedlight.runs.run import read_runs

HEADER = "round,client,split,steps,loss,device,round_end_seconds,reason\n"


def run(home, name, ends, accuracies, seed=0, device="phone"):
    """A run whose rounds end at these seconds with these accuracies; None: not validated."""
    visits = "".join(f"{idx},c0,train,1,1,{device},{end},\n" for idx, end in enumerate(ends))
    folder = stage_folder(home / f"seed{seed}" / name, visits_csv=HEADER + visits)
    rows = [f"{idx},{idx},{value},1" for idx, value in enumerate(accuracies) if value is not None]
    logged(folder, "val/accuracy,val/accuracy_high", *rows)


def test_synchronous_and_buffered_runs_share_an_axis_of_time(tmp_path):
    """The synchronous run has two rounds in the time of four buffered ones; after 240 s both have a value."""
    run(tmp_path, "sync", [120, 240], [0.25, 0.5])
    run(tmp_path, "buffered", [60, 110, 180, 300], [0.125, None, 0.375, 0.75])
    (chart,) = time_section(read_runs([tmp_path])).parts
    assert chart.name == "time_val_accuracy"
    found = {name: [] for name in ("sync", "buffered")}
    for row in chart.rows:
        found[row["run"]].append((row["seconds"], row["mean"]))
    assert found["sync"] == [(120.0, 0.25), (240.0, 0.5)]
    assert found["buffered"] == [(60.0, 0.125), (180.0, 0.375), (300.0, 0.75)]
    assert "At 4 minutes, when the first run ends" in chart.caption
    assert "sync: 0.5" in chart.caption
    assert "buffered: 0.375" in chart.caption


def test_seeds_are_averaged_at_equal_times_and_not_at_equal_rounds(tmp_path):
    run(tmp_path, "fedbuff", [100, 200, 400], [0.25, 0.5, 1.0], seed=0)
    run(tmp_path, "fedbuff", [150, 300, 450], [0.0, 0.25, 0.5], seed=1)
    (chart,) = time_section(read_runs([tmp_path])).parts
    assert [(row["seconds"], row["mean"], row["low"], row["high"]) for row in chart.rows] == [
        (150.0, 0.125, 0.0, 0.25),
        (200.0, 0.25, 0.0, 0.5),
        (300.0, 0.375, 0.25, 0.5),
        (400.0, 0.625, 0.25, 1.0),
    ]
    assert {row["seeds"] for row in chart.rows} == {2}


def test_without_devices_or_common_times_there_is_nothing(tmp_path):
    run(tmp_path, "plain", [0, 0], [0.25, 0.5], device="")
    runs = read_runs([tmp_path])
    assert time_section(runs) is None
    assert over_time(runs[0]) == {}
    assert held([{1.0: 0.0, 2.0: 1.0}, {5.0: 0.5, 6.0: 1.0}]).x.tolist() == []
    assert held([{2.0: 0.5, 4.0: 1.0}]).middle.tolist() == pytest.approx([0.5, 1.0])
