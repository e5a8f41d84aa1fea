import os
import signal
import subprocess
import sys
import tempfile
import time

from fedlight.evaluation.sandbox import run_python
from fedlight.evaluation.sandbox.protection import missing_protection

RUN = "from fedlight.evaluation.sandbox import run_python; run_python('while True: pass', unprotected=True)"


def start(folder):
    child = subprocess.Popen([sys.executable, "-c", RUN], env={**os.environ, "TMPDIR": str(folder)})
    for _ in range(600):
        if found := [one for one in folder.glob("fedlight-sandbox.*") if not (one / "left").exists()]:
            return child, found
        time.sleep(0.05)
    raise AssertionError("the sandbox did not begin")


def test_its_folder_is_removed_by_the_next_run(tmp_path, monkeypatch):
    (tmp_path / "fedlight-sandbox-of mine").mkdir()
    killed, [left] = start(tmp_path)
    killed.kill()
    killed.wait()
    (left / "left").touch()
    living, [kept] = start(tmp_path)
    assert not (left / "left").exists()  # the second one has removed it
    try:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        run = run_python("print(1)", unprotected=missing_protection() is not None)
        assert run.outcome == "finished"
        assert set(os.listdir(tmp_path)) == {kept.name, "fedlight-sandbox-of mine"}
    finally:
        living.send_signal(signal.SIGKILL)
        living.wait()
