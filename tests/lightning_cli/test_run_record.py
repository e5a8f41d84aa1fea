import json
import platform
import re
import time

import pytest

from fedlight.lightning_cli.run_record import machine, recorded


def entries(folder):
    return json.loads((folder / "run.json").read_text())["commands"]


def test_an_entry_is_there_while_it_runs_and_says_how_it_ended(tmp_path):
    (tmp_path / "of_a_run_before.csv").touch()
    time.sleep(0.05)  # more than a tick of the file system's clock
    with recorded(tmp_path, "fit", ["fit", "--config", "/home/me/fedbis.yaml"], 3):
        (tmp_path / "visits.csv").touch()
        (running,) = entries(tmp_path)
        assert running["state"] == "running"
        assert "end" not in running
    (done,) = entries(tmp_path)
    told = {"command": "fit", "configs": ["fedbis.yaml"], "seed": 3, "state": "done"}
    assert {name: done[name] for name in told} == told
    assert done["start"] <= done["end"]
    assert [*done["files"]] == ["visits.csv"]
    assert done["threads"] == 1
    assert set(done["versions"]) == {"python", "fedlight", "torch", "lightning", "transformers", "peft"}


@pytest.mark.parametrize(
    ("error", "state"), [(KeyboardInterrupt, "stopped"), (SystemExit, "stopped"), (ValueError, "failed")]
)
def test_what_did_not_end_well_is_kept_beside_the_next(tmp_path, error, state):
    with pytest.raises(error), recorded(tmp_path, "fit", ["fit"], 0):
        raise error
    with recorded(tmp_path, "test", ["test"], 0):
        pass
    ends = [(entry["command"], entry["state"]) for entry in entries(tmp_path)]
    assert ends == [("fit", state), ("test", "done")]


def test_the_machine_is_not_named():
    assert re.fullmatch(r"\w+, \w+, \d+ cores, \d+ GiB(, .*)?", machine())
    assert platform.node() not in machine()
