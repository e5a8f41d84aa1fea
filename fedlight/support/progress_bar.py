"""A bar for work that is counted, in a terminal alone: a log file gets no control characters."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Gives a function that moves the bar on; the bar disappears at the end.

    Args:
        what: is done.
        total: how many there are; without any there is no bar.

    Example:
        >>> with progress_bar("Encoding", total=2) as advance:
        ...     advance(2)
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal or not total:
        yield lambda number: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda number: progress.advance(task, number)
