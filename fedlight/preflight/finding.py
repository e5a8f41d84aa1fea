"""Result of a check, the table of all results, and the exit code that follows from them."""

from collections import Counter
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from fedlight.support.console import print_table
from fedlight.support.words import count_noun


class State(Enum):
    """Outcome of a check: passed, failed, or it could not be made."""

    OK = "ok"
    PROBLEM = "problem"
    UNKNOWN = "unknown"


COLORS = {State.OK: "green", State.PROBLEM: "bold red", State.UNKNOWN: "yellow"}


class Finding(NamedTuple):
    """One line of the table."""

    what: str  # subject of the check: a stage, a data set, a model, a folder
    state: State
    detail: str  # result, or problem and remedy, in one line


def ok(what: str, detail: str) -> Finding:
    """Return the finding that a check passed."""
    return Finding(what, State.OK, detail)


def problem(what: str, detail: str) -> Finding:
    """Return the finding that the run would fail."""
    return Finding(what, State.PROBLEM, " ".join(detail.split()))  # a cell is one line


def unknown(what: str, detail: str) -> Finding:
    """Return the finding that the check could not be made."""
    return Finding(what, State.UNKNOWN, " ".join(detail.split()))


def exit_code(findings: Sequence[Finding]) -> int:
    """Return 2 with a problem, as for any error of the input, else 3 where a check could not be made, else 0.

    Examples:
        >>> fine, open_ = ok("a", ""), unknown("b", "")
        >>> exit_code([]), exit_code([fine]), exit_code([fine, open_]), exit_code([open_, problem("c", "")])
        (0, 0, 3, 2)
    """
    states = {finding.state for finding in findings}
    return 2 if State.PROBLEM in states else 3 if State.UNKNOWN in states else 0


def verdict(findings: Sequence[Finding]) -> str:
    """Return the last line of the table: whether the run can start.

    Examples:
        >>> verdict([ok("a", ""), problem("b", ""), unknown("c", "")])
        '1 problem and 1 check that could not be made: mend the problem before the run'
    """
    counts = Counter(finding.state for finding in findings)
    wrong, open_ = counts[State.PROBLEM], counts[State.UNKNOWN]
    checks = f"{count_noun(open_, 'check')} that could not be made"
    if wrong:
        them = "problem" if wrong == 1 else "problems"
        problems = count_noun(wrong, "problem") + (f" and {checks}" if open_ else "")
        return f"{problems}: mend the {them} before the run"
    return f"no problem, but {checks}" if open_ else "nothing is wrong: the run can start"


def show(title: str, findings: Sequence[Finding], last_line: str | None = None) -> None:
    """Print the table and the last line, the verdict unless another is given."""
    from rich.text import Text

    rows = [(what, Text(state.value, COLORS[state]), detail) for what, state, detail in findings]
    print_table(title, ("check", "state", "detail"), rows)
    print(last_line or verdict(findings))
