"""The page of the matrix, ``docs/conformance.md``: written by ``python tests/conformance/page.py``.

A test fails where the page is not what this program would write.
"""

from pathlib import Path

import rows_batches
import rows_behaviour
import rows_callbacks
import rows_data
import rows_modules
import rows_optimizers
import rows_processes
import rows_projects
import rows_schedulers
import rows_surroundings
import rows_trainer
from matrix import COLUMNS, Equals, Refused, Row

FILES = (
    *(rows_trainer, rows_callbacks, rows_modules, rows_behaviour, rows_optimizers, rows_schedulers),
    *(rows_data, rows_batches, rows_surroundings, rows_processes),
    rows_projects,
)
ROWS: list[Row] = [row for file in FILES for row in file.ROWS]
PAGE = Path(__file__).parents[2] / "docs" / "conformance.md"

HEAD = """# What works in a federation

This page puts each documented feature of Lightning and torch into one of three columns.
Each row is a test in [tests/conformance](../tests/conformance), which also writes this page
(`python tests/conformance/page.py`).

* **{}**: the global parameters after two or more rounds of two clients are those of [federated averaging written
  out](../tests/conformance/reference.py) in plain torch, bit for bit unless the row says otherwise.
* **{}**: the run ends before the first training batch, with an error that names the setting, the value and the remedy.
  Problems that only training can show end the run before the first round is over.
* **{}**: the row describes the effect in a federation, and the test asserts it.

The tests enumerate Lightning's and torch's own lists (arguments of `Trainer`, callbacks, optimizers, schedules, samplers,
data sets, loggers, profilers, strategies, accelerators, plugins), so additions of a new release are noticed.
The versions are those of [constraints.txt](../constraints.txt).
"""


def render() -> str:
    """The page."""
    lines = [HEAD.format(*COLUMNS)]
    counts = {column: sum(row.proof.column == column for row in ROWS) for column in COLUMNS}
    lines += [
        "| column | rows |",
        "|---|---|",
        *(f"| {column} | {count} |" for column, count in counts.items()),
    ]
    lines += [f"| together | {len(ROWS)} |", ""]
    for kind in dict.fromkeys(row.kind for row in ROWS):
        rows = [row for row in ROWS if row.kind == kind]
        lines += [f"## {kind}", "", "| what | column | in a federation |", "|---|---|---|"]
        lines += [f"| {_code(row.subject)} | {_short(row.proof.column)} | {_meaning(row)} |" for row in rows]
        lines += [""]
    return "\n".join(lines).rstrip() + "\n"


def _code(subject: str) -> str:
    """A name or an argument as code, words as words."""
    return (
        subject if " of one's own" in subject or (subject[0].islower() and " " in subject) else f"`{subject}`"
    )


def _short(column: str) -> str:
    """Its first word."""
    return column.split()[0].rstrip(",")


def _meaning(row: Row) -> str:
    said = [row.means] if row.means else []
    if isinstance(row.proof, Refused):
        said.append(f"error: \u201c{row.proof.says} ... {row.proof.remedy}\u201d")
    if isinstance(row.proof, Equals) and row.proof.tolerance:
        said.append(f"within {row.proof.tolerance:g}")
    return "; ".join(said).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
    print(f"{len(ROWS)} rows in {PAGE}")
