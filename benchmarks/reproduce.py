"""The published numbers: rerun, recorded, written into the pages. ``docs/results.toml`` lists them.

* without a command: reruns all measurements that fit into half an hour, and compares (``make reproduce``);
* ``check``: the subset of at most a minute that CI reruns;
* ``record NAME``: runs a measurement and writes ``docs/results/NAME.json``; ``--from`` takes the rows of a finished run;
* ``render``: writes the tables of the pages from the records.

Run: python benchmarks/reproduce.py [all | check | record NAME [--from PLACE] [--commit HASH] | render] [--only NAME ...]
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from published.measurements import ROOT, load
from published.record import record
from published.rerun import rerun
from published.tables import pages


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; 1 where a figure is another one now."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command")
    for name in ("all", "check"):
        rerunning = commands.add_parser(name)
        rerunning.add_argument("--only", nargs="+", metavar="NAME", help="these measurements alone")
    recording = commands.add_parser("record")
    recording.add_argument("name", help="of a measurement of docs/results.toml")
    recording.add_argument("--from", dest="place", type=Path, help="a run's folder, or a JSON file with rows")
    recording.add_argument("--commit", help="what made them; default: what is checked out")
    commands.add_parser("render")
    options = parser.parse_args(argv)
    if options.command in (None, "all", "check"):
        only = getattr(options, "only", None)
        return rerun(
            load(), ROOT / "build" / "reproduce", ("check",) if options.command == "check" else None, only
        )
    if options.command == "record":
        record(load(), options.name, options.place, options.commit)
    for page, old, new in pages(load()):
        if new != old:
            page.write_text(new, encoding="utf-8")
            print(f"written: {page.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ValueError, RuntimeError) as error:
        sys.exit(f"reproduce: {error}")
