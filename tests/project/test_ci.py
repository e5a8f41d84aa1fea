"""What continuous integration runs: tests on real data where these lie beside the checkout, and checks beside the tests."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

CI = Path(__file__).parents[2] / ".ci/run"


@pytest.mark.parametrize(
    ("is_there", "fails"), [(True, None), (False, None), (False, "check"), (False, "test-all")]
)
def test_tests_on_real_data_run_where_it_is_and_a_failure_is_one_of_the_whole(tmp_path, is_there, fails):
    """With stubs for make and for a browser, of which the one says what it was called with."""
    checkout, programs, shared = tmp_path / "checkout", tmp_path / "bin", tmp_path / "shared"
    (checkout / ".ci").mkdir(parents=True)
    shutil.copy(CI, checkout / ".ci/run")
    programs.mkdir()
    for name in ("make", "chromium"):
        script = (
            f'#!/bin/sh\necho "$* ${{FEDLIGHT_SHARED-unset}}" >&2\ncase "$*" in *{fails}*) exit 2;; esac\n'
        )
        (programs / name).write_text(script)
        (programs / name).chmod(0o755)
    if is_there:
        shared.mkdir()
    environment = {name: value for name, value in os.environ.items() if name != "FEDLIGHT_SHARED"}
    environment["PATH"] = f"{programs}:{environment['PATH']}"
    done = subprocess.run(
        [checkout / ".ci/run"], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    value = str(shared) if is_there else "unset"
    targets = ("setup", "-j2 --output-sync=target check figures", "test-all")
    assert sorted(done.stderr.splitlines()) == sorted(f"{target} {value}" for target in targets)
    assert done.returncode == (1 if fails else 0)
    assert ("so tests on real data are skipped" in done.stdout) is not is_there
