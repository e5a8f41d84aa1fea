"""Runs as a report reads them: folders of Lightning commands and of recipes' stages, finished or not.

Nothing here raises for half a row, half a file or none: a killed or running command leaves such. A file that cannot be read,
or has changed since a finished run wrote it, is counted in `Run.faults`: no number on the page is of such a file.
"""

import csv
import json
from collections.abc import Callable, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

from fedlight.runs.contents import EARLIER, OWN_FILES, digest_of
from fedlight.runs.folders import SEED, begun, labels, methods, runs_below, versions
from fedlight.runs.rows import Rows, merged, objects, text_can_hold
from fedlight.support.checks import check_yaml
from fedlight.support.files import CHANGED, MOST_BYTES, BoundError, check_regular, csv_rows, unsealed


class Run:
    """Folder of results.

    Args:
        folder: where they are.
        method: a stage's name, which runs of other seeds share.
        label: tells it from all runs on the page.
        home: the folder that the user gave, this one or one above it.
        private: whether clients' own rows may be shown.

    Attributes:
        faults: file -> its fault.
    """

    def __init__(self, folder: Path, method: str, label: str, home: Path, private: bool = False) -> None:
        self.folder, self.method, self.label, self.home = folder, method, label, home
        self.private = private
        self.faults: dict[str, str] = {}
        self._cached: dict[str, Any] = {}

    def __repr__(self) -> str:
        return f"Run({self.label!r})"

    @property
    def seed(self) -> int | None:
        """Seed in the name of the recipe's folder, else in the config; None without both."""
        in_recipe = SEED.fullmatch(self.folder.parent.name)
        value = str(in_recipe[1] if in_recipe else self.config().get("seed_everything"))
        return int(value) if value.isdecimal() else None

    @property
    def command(self) -> str:
        """``fit``, ``validate``, ``test``, ``predict`` or ``call``; empty where nothing says it."""
        command = str(self.record().get("command") or self.settings().get("stage") or "")
        return command.partition(" ")[0]

    @property
    def has_trained(self) -> bool:
        """Whether it is a training run, or has logged metrics of a command that nothing names."""
        return self.command == "fit" or (not self.command and bool(self.metrics()))

    @property
    def is_done(self) -> bool:
        """Whether the run has finished."""
        return self.path("done.json") is not None or self.record().get("state") == "done"

    def path(self, name: str) -> Path | None:
        """Return the file or folder of this name, None where there is none."""
        file = self.folder / name
        return file if file.exists() else None

    def csv(self, name: str) -> Rows:
        """Return the whole rows of a CSV file, as text; none without the file. The list is shared: do not change it."""

        def parse(text: str) -> Rows:
            rows: Rows = text_can_hold(csv_rows(text.replace("\0", "")))  # a crash may leave zeros
            # None: cells beyond the header, or lacking.
            whole = [row for row in rows if None not in row and None not in row.values()]
            return self._counted(name, "rows", len(rows), whole)

        return self._read(name, parse, "CSV") or []

    def json(self, name: str) -> dict[str, Any]:
        """Return the object in a JSON file; empty where there is none."""

        def parse(text: str) -> Any:
            value = json.loads(text)
            return text_can_hold(unsealed(value)) if isinstance(value, dict) else None

        return self._read(name, parse, "JSON") or {}

    def jsonl(self, name: str) -> list[dict[str, Any]]:
        """Return the objects in a file of JSON lines; other lines are left out and counted."""

        def parse(text: str) -> list[dict[str, Any]]:
            lines = [*StringIO(text, newline="\n")]  # an answer may hold other ends of lines
            whole = [value for line in lines if isinstance(value := _object(line), dict)]
            return self._counted(name, "lines", len(lines), whole)

        return self._read(name, parse, "JSON") or []

    def config(self) -> dict[str, Any]:
        """Return the config of the Lightning command, with all defaults; empty where none was saved."""
        name = self.config_file()
        content = self._read(name, lambda text: _yaml(text, str(name)), "YAML") if name else None
        return content if isinstance(content, dict) else {}

    def _counted(self, name: str, what: str, number: int, whole: list[Any]) -> list[Any]:
        if len(whole) < number:
            self.faults[name] = f"{number - len(whole):,} of {number:,} {what} are not whole"
        return whole

    def _read(self, name: str, parse: Callable[[str], Any], kind: str) -> Any:
        """Return what ``parse`` makes of a file's text, read once; None for no file and, with a fault, for a damaged one."""
        if name not in self._cached:
            self._cached[name] = None  # a damaged file is not read again either
            try:
                file = check_regular(self.folder / name, MOST_BYTES)
                if self.is_earlier(name):
                    raise BoundError("it is of an earlier run in this folder, which was started over")
                if self.is_changed(name):
                    raise BoundError("it is not what the run wrote: put it back, or run again")
                self._cached[name] = parse(file.read_text(encoding="utf-8", errors="replace"))
            except FileNotFoundError:
                pass
            except BoundError as error:
                self.faults[name] = f"is left out: {str(error).removeprefix(f'{self.folder}/')}"
            except OSError as error:
                self.faults[name] = f"could not be read: {error.strerror}"
            except (ValueError, RecursionError, csv.Error) as error:
                text = str(error)  # other errors are of Python's parsers, about positions in the file
                self.faults[name] = f"is left out: {text}" if text == CHANGED else f"is not whole {kind}"
        return self._cached[name]

    def config_file(self) -> str | None:
        """Return the name of the newest file with the config."""
        if (self.folder / "config.yaml").is_file():
            return "config.yaml"
        # A command of Lightning's own CLI keeps it there.
        return next(reversed(self._versions("config.yaml")), None)

    def settings(self) -> dict[str, Any]:
        """Return the ``settings.json`` of a recipe's stage; empty where this is no stage."""
        return self.json("settings.json")

    def record(self) -> dict[str, Any]:
        """Return what ``run.json`` has of the last fit, else of the last command: versions, start, end."""
        return (self._fits() or self._commands() or [{}])[-1]  # a later test says nothing about the training

    @property
    def is_continued(self) -> bool:
        """Whether several commands trained in the folder."""
        return len(self._fits()) > 1

    def _commands(self) -> list[dict[str, Any]]:
        return objects(self.json("run.json").get("commands"))

    def _fits(self) -> list[dict[str, Any]]:
        return [entry for entry in self._commands() if entry.get("command") == "fit"]

    def done(self) -> dict[str, Any]:
        """Return the result of a finished stage, or the last metrics of its command; empty before the end."""
        result = self.json("done.json").get("result", {})
        return result if isinstance(result, dict) else {}

    def results(self) -> list[dict[str, Any]]:
        """Return the rows about methods in the ``results.json`` of a recipe's folder; none in other folders."""
        rows = objects(self.json("results.json").get("rows"))
        return [row for row in rows if isinstance(row.get("method"), str)]

    def metrics(self) -> Rows:
        """Return the rows of the CSV logger; a resumed run's values replace earlier ones from where it began."""
        if "metrics" not in self._cached:
            self._cached["metrics"] = merged([self.csv(name) for name in self._versions("metrics.csv")])
        rows: Rows = self._cached["metrics"]
        return rows

    def _versions(self, name: str) -> list[str]:
        return [str(file.relative_to(self.folder)) for file in versions(self.folder, name)]

    def _digests(self) -> dict[str, Any]:
        """Return file -> digest at the end of the last command or stage; empty where it did not end."""
        commands = self._commands()
        if commands and commands[-1].get("state") != "done":  # a command under way is changing them
            return {}
        files = [entry.get("files") for entry in commands or [self.json("done.json")]]
        return {name: digest for each in files if isinstance(each, dict) for name, digest in each.items()}

    def is_earlier(self, name: str) -> bool:
        """Tell whether a file is of an earlier run: it was there when this one started over, and was not written since."""
        if name in OWN_FILES or name in (self.record().get("files") or {}):
            return False
        digest = (self.json("fit.json").get(EARLIER) or {}).get(name)
        return digest is not None and digest_of(self.folder / name) == digest

    def is_changed(self, name: str) -> bool:
        """Tell whether a file differs from the one that the run wrote; files with a digest in them are checked elsewhere."""
        if name in (*OWN_FILES, "results.json"):
            return False
        digest = self._digests().get(name)
        file = self.folder / name
        return digest is not None and file.is_file() and digest_of(file) != digest


def by_method(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Return the runs of each method, in their order."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.method, []).append(run)
    return groups


def read_recipe(home: Path) -> Run:
    """Return the folder of a recipe, to be read with the care of a run's."""
    return Run(home, home.name, home.name, home)


def read_runs(folders: Sequence[str | Path], private: bool = False) -> list[Run]:
    """Return all runs in the given folders, of commands or recipes, in the order of their beginnings.

    Raises:
        ValueError: a folder is not there, or holds no run.
    """
    pairs: list[tuple[Path, Path]] = []
    for folder in map(Path, folders):
        if folder.is_file():
            raise ValueError(f"{folder}: is a file: give the folder of a run or of a recipe")
        if not folder.is_dir():
            raise ValueError(f"{folder}: there is no such folder: give that of a run or of a recipe")
        home = folder.resolve()  # two paths of a folder give its runs once
        below = [(run, home) for run in sorted(runs_below(home), key=begun)]
        if not below:
            raise ValueError(
                f"{folder}: there is no run in it, neither config.yaml, metrics/version_0 nor visits.csv: give the "
                "--trainer.default_root_dir of a command, or the --output of a recipe"
            )
        pairs += [pair for pair in below if pair[0] not in [run for run, _ in pairs]]
    return [
        Run(run, method, label, home, private)
        for (run, home), method, label in zip(pairs, methods(pairs), labels(pairs), strict=True)
    ]


def _yaml(text: str, name: str) -> Any:
    import yaml

    try:
        check_yaml(text, name)
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the one in C is not in every build
        return text_can_hold(yaml.load(text, Loader=loader))
    except yaml.YAMLError as error:
        raise ValueError(name) from error


def _object(line: str) -> Any:
    try:
        return text_can_hold(json.loads(line))
    except (ValueError, RecursionError):
        return None
