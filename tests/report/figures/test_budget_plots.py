import pytest
from tiny_world import write_lines

from fedlight.recipes.stages import Stage
from fedlight.report.figures import budget_plots

VISITS = "round,client,reason,bytes_down,bytes_up,round_end_seconds"
METRICS = "epoch,step,train/loss,val/accuracy"


@pytest.fixture
def run(tmp_path):
    """Three rounds, the second without anybody and so without validation; stopped after the first and resumed."""
    write_lines(
        tmp_path / "run/visits.csv",
        VISITS,
        *("0,a,,1000000,500000,7200.0", "0,b,late,500000,0,7200.0", "1,a,absent,0,0,7800.0"),
        *("2,a,,1000000,500000,9000.0", "2,a,,1000000,500000,9000.0"),
    )
    write_lines(tmp_path / "run/metrics/version_0/metrics.csv", METRICS, "0,3,0.7,", "0,4,,0.5", "1,8,,0.9")
    write_lines(tmp_path / "run/metrics/version_1/metrics.csv", METRICS, "1,6,0.7,", "2,12,,0.75")
    return tmp_path / "run"


def test_the_figure_adds_up_what_was_sent_until_each_validated_round(run, tmp_path):
    output = tmp_path / "plot/quality.svg"
    settings = {"runs": {"phones": str(run), "other": str(run)}, "output": str(output)}
    spec = {"call": "fedlight.report.figures.budget_plots.quality_under_budget", "with": settings}
    result = Stage("plot", tmp_path / "plot", spec).run()["result"]
    took = {"hours": 2.5, "megabytes": 5.0, "took_part": 2.0, "absent": 1.0, "late": 1.0}
    assert result["rows"][0] == {"method": "phones", "val accuracy": 0.75, **took}
    figure = budget_plots.draw_quality(result["table"], "val/accuracy")
    assert output.is_file()
    by_time, by_bytes = figure.axes
    assert [line.get_label() for line in by_time.lines] == ["phones", "other"]
    assert by_time.lines[0].get_xydata().tolist() == [[2.0, 0.5], [7800 / 3600, 0.9], [2.5, 0.75]]
    assert by_bytes.lines[1].get_xydata().tolist() == [[2.0, 0.5], [2.0, 0.9], [5.0, 0.75]]
    assert by_time.get_xlabel() == "simulated hours"


def test_what_is_missing_is_named(run, tmp_path):
    def refused(complaint):
        with pytest.raises(ValueError, match=complaint):
            budget_plots.quality_under_budget({"phones": str(run)}, str(tmp_path / "f.svg"))

    write_lines(run / "metrics/version_1/metrics.csv", "epoch,step", "1,2")
    assert budget_plots.budget_curve(run, "val/accuracy")["metric"] == [0.5, 0.9]
    write_lines(run / "metrics/version_0/metrics.csv", "epoch,step", "1,2")
    refused("limit_val_batches")
    write_lines(run / "visits.csv", "round,client", "0,a")
    refused("there is no column 'bytes_down'")
    (run / "visits.csv").unlink()
    refused(r"visits\.csv: there is no such file")


def test_scores_of_tasks_are_those_of_their_rounds(run):
    """TaskScores logs by optimizer step, without an epoch; its files have the round, counted from 1."""
    write_lines(run / "metrics/version_2/metrics.csv", "epoch,step,score/domain", ",4,0.25", ",12,0.5")
    for moment, score in (("start", 0.0), ("epoch_1", 0.25), ("epoch_3", 0.5)):
        write_lines(run / f"tasks/{moment}/scores.json", f'{{"score/domain": {score}, "unread/domain": 0.1}}')
    curve = budget_plots.budget_curve(run, "score/domain")
    assert curve == {"seconds": [7200.0, 9000.0], "megabytes": [2.0, 5.0], "metric": [0.25, 0.5]}
    assert budget_plots.budget_curve(run, "val/accuracy")["metric"] == [0.5, 0.9, 0.75]


@pytest.fixture
def longer(tmp_path):
    """Two rounds of 5,000 seconds and a megabyte each."""
    folder = tmp_path / "longer"
    visits = ("0,a,,500000,500000,5000.0", "1,a,late,500000,500000,10000.0")
    write_lines(folder / "visits.csv", VISITS, *visits)
    write_lines(folder / "metrics/version_0/metrics.csv", METRICS, "0,4,,0.25", "1,8,,1.0")
    return folder


def test_quality_at_the_time_and_the_bytes_that_all_runs_reach(run, longer):
    found = budget_plots.quality_at_budget({"run": str(run), "longer": str(longer)}, "val/accuracy")
    assert (found["seconds"], found["megabytes"]) == (9000.0, 2.0)
    short, long = found["rows"]
    assert short == {
        "method": "run",
        **{"at_time": 0.75, "at_half_time": None, "at_bytes": 0.9, "at_half_bytes": None, "at_end": 0.75},
        **{"hours": 2.5, "megabytes": 5.0, "took_part": 2.0, "absent": 1.0, "late": 1.0},
    }
    # At 9,000 and at 4,500 of its 10,000 seconds; at two and at one of its two megabytes.
    reached = {"at_time": 0.25, "at_half_time": None, "at_bytes": 1.0, "at_half_bytes": 0.25, "at_end": 1.0}
    assert (reached | {"took_part": 1.0, "late": 1.0}).items() <= long.items()


def test_rounds_after_the_last_measurement_are_part_of_the_whole_run(longer):
    write_lines(longer / "metrics/version_0/metrics.csv", METRICS, "0,4,,0.25")
    found = budget_plots.quality_at_budget({"longer": str(longer)}, "val/accuracy")
    assert (found["seconds"], found["megabytes"]) == (10000.0, 2.0)
    (row,) = found["rows"]
    assert (row["hours"], row["megabytes"], row["at_end"]) == (10000 / 3600, 2.0, 0.25)
