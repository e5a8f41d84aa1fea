import pytest
from recipe_runs import ran
from tiny_world import HELDOUT, VOTES, table

from fedlight.support.files import result_of

pytestmark = pytest.mark.slow
WIRES = {"phones": 32, "fp16": 16, "int8": 8, "nf4": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_model):
    folder = tmp_path_factory.mktemp("fleets")
    few = ["rounds=2", "clients_per_round=2", "local_steps=1", "batch_size=4", "over_selection=3", "scale=1"]
    changes = (f"model={tiny_model}", f"train_source={VOTES}", f"test_source={HELDOUT}", "accelerator=cpu")
    outcome = ran("run", "fleets", f"--output={folder}", *changes, *few)
    assert "took part" in outcome.out
    return folder / "seed0"


def test_both_figures_and_their_tables(folder):
    for name, methods in (
        ("by_fleet", ["phones", "mixed", "edge"]),
        ("by_wire", ["32 bits", "16 bits", "8 bits", "4 bits", "largest tenth"]),
    ):
        assert (folder / name / "quality.svg").stat().st_size > 5000
        rows = result_of(folder / name)["rows"]
        assert [row["method"] for row in rows] == methods
        assert all(row["hours"] > 0 and row["took_part"] >= 2 for row in rows)


def test_devices_and_wires_are_those_of_the_settings(folder):
    up = {}
    for name in (*WIRES, "mixed", "edge", "largest_tenth"):
        rows = [row for row in table(folder / name / "visits.csv") if not row["reason"]]
        up[name] = int(rows[0]["bytes_up"])
        assert {row["bytes_down"] for row in rows} == {str(up["phones"])} or name == "phones"
    assert up["mixed"] == up["edge"] == up["phones"]
    assert up["phones"] > up["fp16"] > up["int8"] > up["nf4"]
    assert up["phones"] > up["largest_tenth"]
    edge = {"jetson_agx_orin", "jetson_orin_nano", "raspberry_pi_5", "macbook_air_m2"}
    assert {row["device"] for row in table(folder / "edge/visits.csv")} <= edge
