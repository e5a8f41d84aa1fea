import json

import pytest

from fedlight.runs.facts import rounds
from fedlight.runs.run import read_runs


@pytest.mark.parametrize("is_done", [True, False])
def test_rounds_of_a_run_that_has_logged_nothing(tmp_path, is_done):
    (tmp_path / "config.yaml").write_text("trainer: {max_epochs: 4}\n")
    (tmp_path / "settings.json").write_text(json.dumps({"stage": "fit sft.yaml"}))
    if is_done:
        (tmp_path / "done.json").write_text("{}")
    (run,) = read_runs([tmp_path])
    assert rounds(run) == ((4 if is_done else 0), 4)
