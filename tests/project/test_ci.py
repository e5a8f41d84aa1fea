"""What continuous integration runs: the tests on real data as well, where these lie beside the checkout."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

CI = Path(__file__).parents[2] / ".ci/run"


@pytest.mark.parametrize("is_there", [True, False])
def test_tests_on_real_data_run_where_it_is(tmp_path, is_there):
    """With stubs for make and for a browser, of which the one says what it was called with."""
    checkout, programs, shared = tmp_path / "checkout", tmp_path / "bin", tmp_path / "shared"
    (checkout / ".ci").mkdir(parents=True)
    shutil.copy(CI, checkout / ".ci/run")
    programs.mkdir()
    for name in ("make", "chromium"):
        (programs / name).write_text('#!/bin/sh\necho "$0 $* ${FEDLIGHT_SHARED-unset}" >&2\n')
        (programs / name).chmod(0o755)
    if is_there:
        shared.mkdir()
    environment = {name: value for name, value in os.environ.items() if name != "FEDLIGHT_SHARED"}
    environment["PATH"] = f"{programs}:{environment['PATH']}"
    place = {"env": environment, "cwd": tmp_path}
    done = subprocess.run([checkout / ".ci/run"], **place, capture_output=True, text=True, check=True)
    value = str(shared) if is_there else "unset"
    targets = ("-j2 --output-sync=target check figures", "test-all")
    calls = [f"{programs}/make {target} {value}" for target in targets]
    assert done.stderr.splitlines() == calls
    assert ("so tests on real data are skipped" in done.stdout) is not is_there
