"""Ends the build where a page differs from its record, or a verdict from its intervals.

The records are docs/results.toml and docs/results/*.json, for tables of measurements, and docs/papers/coverage.toml, for the
page on the coverage of the papers.
"""

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


class NotAsRecorded(ValueError):
    """A page and its record differ."""


def on_pre_build(config: Any) -> None:
    """Makes every written table again from the records, and compares."""
    sys.path.append(str(ROOT / "benchmarks"))
    from published.claims import contradictions
    from published.measurements import load
    from published.tables import pages, table

    published = load()
    for page, text, made in pages(published):
        if text != made:
            raise NotAsRecorded(
                f"{page.relative_to(ROOT)} is not what the records give: python benchmarks/reproduce.py render"
            )
    faults = [f"table claims: {fault}" for fault in contradictions(table(published, "claims")[0])]
    if faults:
        raise NotAsRecorded("docs/results.toml: " + "\n".join(faults))
