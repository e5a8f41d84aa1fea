import json
import os
import socket
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow  # waits for a hub that does not answer

SCRIPT = """
import json, sys, time
from fedlight.datamodules.rows.rows import load_rows
from fedlight.pretrained.hub import load_tokenizer
from fedlight.datamodules.vectors.encoders import find_folder
from fedlight.modules.language.base_model import load_base
import datasets, sentence_transformers, transformers  # their imports are not what is timed

def load(name):
    return load_base(name, base="plain", dtype="fp32", trust_remote_code=False)[0].num_parameters()

told = {}
for name, ask in {
    "model": lambda: load("nobody/model"),
    "tokenizer": lambda: load_tokenizer("nobody/model"),
    "rows": lambda: load_rows("nobody/rows"),
    "encoder": lambda: find_folder("nobody/encoder"),
    "cached model": lambda: load("owner/tiny"),
    "cached tokenizer": lambda: len(load_tokenizer("owner/tiny")),
}.items():
    start = time.monotonic()
    try:
        found = ask()
    except (OSError, ValueError) as error:
        found = str(error)
    told[name] = [time.monotonic() - start, found]
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def told(tiny_model, tmp_path_factory):
    """Seconds and answer of each question to a port that refuses connections; ``owner/tiny`` is in the cache."""
    home = tmp_path_factory.mktemp("home")
    cached = home / "hub/models--owner--tiny"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs/main").write_text("0" * 40)
    (cached / "snapshots").mkdir()
    (cached / "snapshots" / ("0" * 40)).symlink_to(tiny_model)
    with socket.socket() as bound:  # bound and not listening: nobody else gets the port, and it refuses
        bound.bind(("127.0.0.1", 0))
        environment = {key: value for key, value in os.environ.items() if key != "HF_HUB_OFFLINE"}
        environment |= {"HF_ENDPOINT": f"http://127.0.0.1:{bound.getsockname()[1]}", "HF_HOME": str(home)}
        options = {"capture_output": True, "text": True, "timeout": 120}
        done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, **options)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


@pytest.mark.parametrize(
    ("what", "line"),
    [
        ("model", "model='nobody/model' is no folder here, and"),
        ("tokenizer", "tokenizer='nobody/model' is no folder here, and"),
        ("rows", "nobody/rows:"),
        ("encoder", "model='nobody/encoder' is no folder here, and"),
    ],
)
def test_it_is_said_within_seconds(told, what, line):
    seconds, found = told[0][what]
    assert found.startswith(f"{line} the hub cannot be reached (")
    assert seconds < 5  # a refusal takes milliseconds, the clients' own attempts took 8 to 79 seconds


def test_what_is_cached_is_read(told, tiny_model):
    from fedlight.modules.language.base_model import load_base, load_tokenizer

    network, _ = load_base(tiny_model, base="plain", dtype="fp32", trust_remote_code=False)
    assert told[0]["cached model"][1] == network.num_parameters()
    assert told[0]["cached tokenizer"][1] == len(load_tokenizer(tiny_model))
    assert max(told[0][name][0] for name in ("cached model", "cached tokenizer")) < 5
    assert "Retrying" not in told[1]
