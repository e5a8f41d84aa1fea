"""benchmarks/split_memory.py on a tiny language model."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "split_memory.py"


@pytest.mark.slow
def test_a_language_model_in_parts_ends_as_in_one_process(tiny_model, tmp_path):
    rows = tmp_path / "rows.json"
    command = [sys.executable, str(SCRIPT), "--model", str(tiny_model), "--ways", "1", "2 split"]
    settings = {"env": {**os.environ, "HF_HUB_OFFLINE": "1"}, "capture_output": True, "text": True}
    ended = subprocess.run([*command, "--size", "2x8", "--json", str(rows)], timeout=300, **settings)
    assert ended.returncode == 0, ended.stderr  # it compares the weights itself
    one, two = json.loads(rows.read_text())["rows"]
    assert "others" not in one
    assert 0.1 < two["others"] < 4
