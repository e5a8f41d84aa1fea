"""The recipe of a fleet of which some phones cannot backpropagate: who does what, and the table at equal time and bytes."""

import pytest
from recipe_runs import is_drawn, ran, rows_of
from tiny_world import table

from fedlight.support.files import result_of

pytestmark = pytest.mark.slow
RUNS = ("dropouts", "forward", "forward_light", "flexlora", "hetlora", "buffered")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """One short step of everybody who is there, of the toy model, on whose memory it depends who fits."""
    folder = tmp_path_factory.mktemp("mixed_fleet")
    few = ["rounds=2", "server_steps=3", "asked_every=1", "clients_per_round=12", "local_steps=1"]
    few.append("buffer_size=4")
    source = "test_source=toy:instructions?seed=${seed}&split=test&topic_rows=1"
    outcome = ran("run", "mixed_fleet", f"--output={folder}", "--seeds", "0", "accelerator=cpu", source, *few)
    return folder, outcome


def visits(folder, name):
    return table(folder / f"seed0/{name}/visits.csv")


def test_small_phones_drop_out_train_forward_or_have_a_smaller_rank(run):
    folder, _ = run
    small = {name: [row for row in visits(folder, name) if row["device"] == "iphone_xr"] for name in RUNS}
    left_out = {row["reason"] for name in ("dropouts", "buffered") for row in small[name]}
    assert left_out <= {"absent", "out_of_memory"}
    for name in RUNS:
        there = [row for row in small[name] if row["reason"] != "absent"]
        assert there, name
        others = [row for row in visits(folder, name) if row["device"] != "iphone_xr" and not row["reason"]]
        assert "out_of_memory" not in {row["reason"] for row in visits(folder, name) if row not in there}
        if name.startswith("forward"):
            assert {row["train"] for row in there} == {"forward"}
            assert {row["train"] for row in others} == {"backprop"}
        if name in ("flexlora", "hetlora"):
            assert {row["lora_rank"] for row in there} == {"16"}
            assert {row["lora_rank"] for row in others} == {"32"}
            assert max(int(row["bytes_up"]) for row in there) < min(int(row["bytes_up"]) for row in others)


def test_the_table_compares_at_equal_time_and_bytes(run):
    folder, outcome = run
    rows = rows_of(folder)
    assert len(rows) == len(RUNS)
    done = result_of(folder / "seed0/table")
    assert done["seconds"] == pytest.approx(3600 * min(row["hours"] for row in rows.values()))
    assert done["megabytes"] == min(row["megabytes"] for row in rows.values())
    assert rows["dropouts"]["out_of_memory"] > 0
    assert "out_of_memory" not in rows["forward"]
    assert rows["forward"]["took_part"] > rows["dropouts"]["took_part"]
    assert is_drawn(folder / "seed0/figure/quality.svg")
    assert "minus dropouts" in outcome.err
