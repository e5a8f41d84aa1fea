"""``fedlight report RUN ... [--output FILE] [--open] [--private] [--watch]``."""

import time
import webbrowser
from collections.abc import Callable, Sequence
from pathlib import Path

from fedlight.support.console import OneLineArguments

RESULTS = "results.json"
"""What a recipe writes when all of its stages are done."""


def main(argv: list[str]) -> None:
    """Write the page and print its path."""
    parser = OneLineArguments(
        "fedlight report",
        description="One HTML page about runs: curves, clients, devices, answers, configs. It needs no network.",
    )
    parser.add_argument(
        "run", nargs="+", help="folder of a run, or of a recipe with all its seeds and stages"
    )
    parser.add_argument(
        "--output",
        type=Path,
        help="the page; default: report.html in the folder, or here where several are given",
    )
    parser.add_argument("--open", action="store_true", help="open the page in the browser")
    parser.add_argument(
        "--private",
        action="store_true",
        help="show clients' own rows as well, where a run has written them down",
    )
    parser.add_argument(
        "--watch",
        action="store_true",
        help="write it again whenever the runs have gone on, until they are finished",
    )
    parser.add_argument(
        "--seconds", type=float, default=5.0, help="between two looks at the files with --watch; default: 5"
    )
    options = parser.parse_args(argv)
    seen: list[Path] = []

    def show(page: Path) -> None:
        if not seen:
            # Imported late, as matplotlib takes longer than --help should.
            from fedlight.report.sections.outcomes.answer import answer
            from fedlight.runs.run import read_runs

            print(answer(read_runs(options.run, options.private)))
            print(f"report: {page}", flush=True)  # --watch goes on, so a pipe would not show it
            if options.open:
                webbrowser.open(page.absolute().as_uri())
        seen.append(page)

    if options.watch:
        try:
            watch(options.run, options.output, options.private, options.seconds, show)
        except KeyboardInterrupt:
            print("no longer watched")
            return
        print(f"finished; the page was written {len(seen)} times")
        return
    from fedlight.report.page import write_report

    show(write_report(options.run, options.output, options.private))


def watch(
    folders: Sequence[str | Path],
    output: str | Path | None = None,
    private: bool = False,
    seconds: float = 5.0,
    written: Callable[[Path], None] = lambda page: None,
) -> Path:
    """Write the page at once, then after each change of the runs' files, and a last time when all runs are finished.

    The page loads itself again in the browser, but for the last one. A run that was stopped is waited for.

    Args:
        folders: see `fedlight.report.page.write_report`; the runs have begun.
        output: likewise.
        private: likewise.
        seconds: between two looks at the files, above 0.
        written: is called with the page whenever it has been written.

    Raises:
        ValueError: see `fedlight.report.page.write_report`; or ``seconds`` is out of range.
    """
    from fedlight.report.page import page_of, write_report

    if seconds <= 0:
        raise ValueError(f"--seconds {seconds:g} has to be above 0")
    page, before = page_of(folders, output), None
    while True:
        now = _state(folders, page)
        # Before the page is written: else files that a run writes meanwhile would be missed.
        is_over = _are_done(folders, private)
        if now != before or is_over:
            write_report(folders, output, private, reload_seconds=None if is_over else seconds)
            written(page)
        if is_over:
            return page
        before = now
        time.sleep(seconds)


def _are_done(folders: Sequence[str | Path], private: bool) -> bool:
    from fedlight.lightning_cli.run_folder import LOCK
    from fedlight.runs.folders import SEED
    from fedlight.runs.run import read_runs

    homes = {Path(folder).resolve() for folder in folders}
    recipes = {home for home in homes if any(SEED.fullmatch(part.name) for part in home.iterdir())}
    with_results = {home for home in recipes if (home / RESULTS).is_file()}
    # A recipe holds a lock on the folders of its seeds from its first stage to its last; some stages alone leave no results.
    is_locked = any((part / LOCK).is_file() for home in recipes - with_results for part in home.iterdir())
    # Of a recipe with results, a stage that has failed or was left out never ends.
    runs = [run for run in read_runs(folders, private) if run.home.resolve() not in with_results]
    return not is_locked and all(run.is_done for run in runs)


def _state(folders: Sequence[str | Path], page: Path) -> dict[str, tuple[int, int]]:
    """Return size and time of each file of the runs, without those of the page itself."""
    figures, states = page.with_name(f"{page.stem}_files").absolute(), {}
    for file in (file for folder in folders for file in Path(folder).absolute().rglob("*")):
        # The page changes with every writing, and would be written forever.
        if file == page.absolute() or figures in file.parents or not file.is_file():
            continue
        try:
            about = file.stat()
        except FileNotFoundError:  # a checkpoint that has just been replaced
            continue
        states[str(file)] = about.st_size, about.st_mtime_ns
    return states
