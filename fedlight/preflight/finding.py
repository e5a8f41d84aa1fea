"""Result of a check, the table of all results, and the exit code that follows from them."""

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

WIDTH = 200  # characters, where there is no terminal


class State(Enum):
    """Outcome of a check: passed, failed, or it could not be made."""

    OK = "ok"
    PROBLEM = "problem"
    UNKNOWN = "unknown"


COLORS = {State.OK: "green", State.PROBLEM: "bold red", State.UNKNOWN: "yellow"}


class Finding(NamedTuple):
    """One line of the table.

    Attributes:
        what: what was checked: a stage, a data set, a model, a folder.
        detail: what was found, or what is wrong and how to mend it, in one line.
    """

    what: str
    state: State
    detail: str


def ok(what: str, detail: str) -> Finding:
    """Return the finding that a check passed."""
    return Finding(what, State.OK, detail)


def problem(what: str, detail: str) -> Finding:
    """Return the finding that the run would fail."""
    return Finding(what, State.PROBLEM, detail)


def unknown(what: str, detail: str) -> Finding:
    """Return the finding that the check could not be made."""
    return Finding(what, State.UNKNOWN, detail)


def exit_code(findings: Sequence[Finding]) -> int:
    """Return 2 with a problem, as for any error of the input, else 3 where a check could not be made, else 0.

    Examples:
        >>> exit_code([ok("a", "")]), exit_code([ok("a", ""), unknown("b", "")]), exit_code([problem("c", "")])
        (0, 3, 2)
    """
    states = {finding.state for finding in findings}
    return 2 if State.PROBLEM in states else 3 if State.UNKNOWN in states else 0


def verdict(findings: Sequence[Finding]) -> str:
    """Return the last line of the table: whether the run can start.

    Examples:
        >>> verdict([ok("a", ""), problem("b", ""), unknown("c", "")])
        '1 problem and 1 check that could not be made: mend the problem before the run'
    """
    wrong, open_ = (
        sum(finding.state is state for finding in findings) for state in (State.PROBLEM, State.UNKNOWN)
    )
    problems = f"{wrong} problem{'s' if wrong != 1 else ''}"
    checks = f"{open_} check{'s' if open_ != 1 else ''} that could not be made"
    if wrong:
        them = "problem" if wrong == 1 else "problems"
        return f"{problems}{f' and {checks}' if open_ else ''}: mend the {them} before the run"
    return f"no problem, but {checks}" if open_ else "nothing is wrong: the run can start"


def show(title: str, findings: Sequence[Finding], last_line: str | None = None) -> None:
    """Print the table and the last line, the verdict unless another is given."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if not console.is_terminal:  # a file has no width, and a narrow table cuts its words
        console = Console(width=WIDTH)
    table = Table(title=title, title_justify="left")
    for name in ("check", "state", "detail"):
        table.add_column(name, overflow="fold")
    for finding in findings:
        table.add_row(
            Text(finding.what), Text(finding.state.value, COLORS[finding.state]), Text(finding.detail)
        )
    console.print(table)
    console.print(last_line or verdict(findings), highlight=False, markup=False, soft_wrap=True)
