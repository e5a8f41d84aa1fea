"""Ends the build where a page is not what its record gives, or a verdict is not what its intervals say.

Written from records are the tables of measurements (docs/results.toml, docs/results/*.json) and the page of what the papers
have (docs/papers/coverage.toml).
"""

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


class NotAsRecorded(ValueError):
    """A page and its record differ."""


def on_pre_build(config: Any) -> None:
    """Makes every written table and interval again from the records, and compares."""
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
    if faults := list(contradictions(table(published, "claims")[0])):
        raise NotAsRecorded("docs/results.toml, table claims: " + "\n".join(faults))
