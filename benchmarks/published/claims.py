"""Verdicts on the papers' claims, against the intervals in their rows.

A verdict is a bold word: **holds** and **does not** where an interval of 95 % lies on one side of 0, **undecided** where it
contains 0. Claims that one method is as good as another name the margin: **holds** where the interval lies inside of it,
**does not** where it lies outside, else **undecided**. Each clause of a row, up to a semicolon, may have an interval; a row
with a clause that has none is not checked, since its verdict may be by every seed, by exact counts or by one run.
"""

import re
from collections.abc import Iterator

MARGIN = 0.02  # in accuracy, of claims that one method is as good as another
VERDICT = re.compile(r"\*\*(holds|does not|undecided)\*\*", re.IGNORECASE)
EXCEPT = re.compile(
    r"every seed|of (two|three|four|five|six|seven|eight|nine|ten)\b"
)  # two conversations of five
INTERVAL = re.compile(r"\[([+-]?\d+\.\d+), ([+-]?\d+\.\d+)\]")


def contradictions(table: str) -> Iterator[str]:
    """Name each verdict that the intervals of its row contradict.

    Args:
        table: the claims in Markdown; columns are paper, claim, verdict and figures.

    Example:
        >>> row = "| | A is better | **holds** in one world | A from B +0.1 [-0.1, +0.3] | `command` | |"
        >>> list(contradictions(row))
        ['A is better: **holds** needs an interval without 0, or every seed; there is [-0.1, +0.3]']
        >>> list(contradictions(row.replace("holds", "undecided")))
        []
    """
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if len(cells) >= 4 and (verdicts := {word.lower() for word in VERDICT.findall(cells[2])}):
            yield from (f"{cells[1]}: {fault}" for fault in _faults(verdicts, cells[2], cells[3]))


def _faults(verdicts: set[str], said: str, figures: str) -> Iterator[str]:
    clauses = [INTERVAL.findall(clause) for clause in figures.split(";")]
    found = [(float(low), float(high)) for clause in clauses for low, high in clause]
    if not found or not all(clauses):
        return
    bound = MARGIN if "margin" in said else 0.0
    open_ones = [one for one in found if not _is_decided(*one, bound)]
    decided = [one for one in found if _is_decided(*one, bound)]
    shown = ", ".join(f"[{low:+g}, {high:+g}]" for low, high in found)
    limit = f"the margin {MARGIN} inside" if bound else "0"
    if verdicts - {"undecided"} and not decided and "every seed" not in said:
        word = min(verdicts - {"undecided"}, key=["holds", "does not"].index)
        yield f"**{word}** needs an interval without {limit}, or every seed; there is {shown}"
    if "undecided" in verdicts and not open_ones:
        yield f"**undecided** needs an interval with {limit}; there is {shown}"
    if "undecided" not in verdicts and open_ones and decided and not EXCEPT.search(said):
        yield f"an interval contains {limit}, so one verdict is **undecided**; there is {shown}"


def _is_decided(low: float, high: float, margin: float) -> bool:
    if margin:
        return -margin < low <= high < margin or low > margin or high < -margin
    return low > 0 or high < 0
