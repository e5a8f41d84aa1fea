"""``fedlight report``: one HTML page about one run or several, and every figure of it as PNG and CSV."""

from collections.abc import Sequence
from pathlib import Path


def write_report(
    folders: Sequence[str | Path], output: str | Path | None = None, private: bool = False
) -> Path:
    """Write the page about runs, as `fedlight.report.page.write_report` does; the first call loads matplotlib."""
    from fedlight.report import page

    return page.write_report(folders, output, private)
