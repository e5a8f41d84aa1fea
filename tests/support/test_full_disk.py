from pathlib import Path

import pytest

from fedlight.support.files import full_disk_named


def test_names_the_file_and_the_remedy_and_no_other_error(tmp_path):
    with (
        pytest.raises(OSError, match=r"the disk is full while writing runs/x\.csv: free some space"),
        full_disk_named(Path("runs/x.csv")),
        open("/dev/full", "w") as file,
    ):
        file.write("a row\n")
    with pytest.raises(FileNotFoundError, match="missing"), full_disk_named(Path("runs/x.csv")):
        (tmp_path / "missing.csv").read_text()
