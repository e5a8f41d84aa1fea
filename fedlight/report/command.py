"""``fedlight report RUN ... [--output FILE] [--open] [--private]``."""

import webbrowser
from pathlib import Path

from fedlight.support.console import OneLineArguments


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
    options = parser.parse_args(argv)
    # Imported late, as matplotlib takes longer than --help should.
    from fedlight.report.page import write_report
    from fedlight.report.sections.outcomes.answer import answer
    from fedlight.runs.run import read_runs

    page = write_report(options.run, options.output, options.private)
    print(answer(read_runs(options.run, options.private)))
    print(f"report: {page}")
    if options.open:
        webbrowser.open(page.absolute().as_uri())
