"""Stage of a recipe: a Lightning command with its config, or a function call, done once and resumable.

A stage's folder holds ``settings.json``, written before its first work, and ``done.json``, written after its last. Both have
a digest of their content: a stage with a damaged or missing file is neither skipped nor silently done again.
A Lightning command reads one file, ``stage.yaml``: the stage's config with the recipe's values merged into it.
Values never pass through a command line, where a text may be read as something else.
"""

import hashlib
import importlib
import inspect
import io
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stderr
from dataclasses import is_dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fedlight.conf import path as conf_path
from fedlight.lightning_cli.config_files import EXTENDS, layers
from fedlight.lightning_cli.parser_words import near_below
from fedlight.recipes.followers import Followers, for_processes, why_one_process
from fedlight.recipes.overlay import as_yaml, is_class, laid_over, set_in, setting_order
from fedlight.runs.contents import MadeWith, in_words, left_in, refuse_changed_results
from fedlight.support.checks import read_yaml, refuse_unfit_arguments
from fedlight.support.console import quiet
from fedlight.support.files import (
    DONE,
    full_disk_named,
    read_json,
    remedy_for,
    sealed,
    write_json,
    write_whole,
)

CONFIG = "stage.yaml"
DIGEST = "digest of the config"
BEFORE_WORK = ("settings.json", "run.json", "run.lock", "config.yaml", CONFIG)
"""Files in a stage's folder before its work begins."""
COMMANDS = ("fit", "validate", "test", "predict", "call")


class Stage:
    """Step of a recipe that writes ``done.json`` into its folder when it has ended.

    Args:
        name: name of the stage and of its folder.
        folder: folder that it writes to.
        spec: one of ``fit``, ``validate``, ``test``, ``predict`` with a config file of ``conf/``, or ``call`` with a
            dotted function; and ``with``, the function's arguments, or the values that replace those of the config, by key:
            ``data.limit`` is ``data.init_args.limit``, and ``trainer.callbacks+`` adds to the config's list.
        run: folder of the whole run, all seeds together; the folder above ``folder`` if not given.

    Raises:
        ValueError: the spec names no command, several, or an unknown one.
    """

    def __init__(self, name: str, folder: Path, spec: dict[str, Any], run: Path | None = None) -> None:
        commands = [command for command in COMMANDS if command in spec]
        unknown = set(spec) - set(COMMANDS) - {"with"}
        if len(commands) != 1 or unknown:
            raise ValueError(
                f"stage {name}: give one of {', '.join(COMMANDS)}, and 'with'; it has {list(spec)}"
            )
        self.name = name
        self.folder = folder.absolute()
        self.run_folder = (run or folder.parent).absolute()
        self.command = commands[0]
        self.target: str = spec[self.command]
        self.arguments: dict[str, Any] = spec.get("with") or {}
        self._parsed: dict[bytes, Any] = {}  # bytes of a config -> its parsed settings
        if self.command == "call":
            self.function = _function(name, self.target)
        elif not _is_config(self.target):
            raise ValueError(f"stage {name}: there is no config {self.target!r} in fedlight or here")

    def run(self, followers: Followers | None = None) -> dict[str, Any]:
        """Run the stage unless it is done.

        Args:
            followers: processes that share its work, if it can be shared; the result is the same for any number.

        Returns:
            ``result``, the return value of the call or the metrics of the command; ``seconds`` that it took.

        Raises:
            ValueError: it was done, or begun, with other settings, or a file of it or of earlier stages is damaged.
            KeyboardInterrupt: it was stopped; another call resumes it.
        """
        self._check_settings()
        if self.is_done:
            return self._done()
        refuse_changed_results(self._named(), self.run_folder)
        print(f"── {self.name}", file=sys.stderr, flush=True)
        start = time.perf_counter()
        try:
            with full_disk_named(self.folder):
                if self.command == "call":
                    result = self.function(**self.call_arguments()) or {}
                else:
                    result = self._lightning(followers)
        except KeyboardInterrupt as stop:
            raise type(stop)(f"in stage {self.name}; the same command goes on from here") from None
        if "report" in result:
            print(result["report"], file=sys.stderr, flush=True)
        done = {"result": result, "seconds": time.perf_counter() - start, "files": left_in(self.folder)}
        write_json(self.folder / DONE, sealed(done))  # last: a killed stage is not done
        return done

    @property
    def is_done(self) -> bool:
        """Whether the stage has ended."""
        return (self.folder / DONE).is_file()

    def calls(self, function: Callable[..., Any]) -> bool:
        """Return whether the stage is a call of this function."""
        return self.command == "call" and self.function is function

    def _done(self) -> dict[str, Any]:
        done = read_json(self.folder / DONE, remedy_for(self.folder))
        if not isinstance(done.get("result"), dict) or not isinstance(done.get("seconds"), (int, float)):
            raise ValueError(
                f"{self.folder / DONE} is damaged (it has no result or no seconds): {remedy_for(self.folder)}"
            )
        return done

    def _check_settings(self) -> None:
        """Write ``settings.json`` before the first work; refuse to resume with other settings."""
        self.refuse_other_settings()
        made = self._made_with()
        if not made.file.is_file() or self._not_begun():
            made.write()

    def refuse_other_settings(self) -> None:
        """Raise ValueError if settings or files' contents are unknown or not those the stage was done, or begun, with."""
        made = self._made_with()
        if not made.file.is_file():
            self._refuse_work_without_settings()
            return
        if self._not_begun():
            return
        remedy = "give another --output, or delete that folder and those of the stages after it"
        if changes := made.differences():
            # A changed setting changes the digest, too, and says more.
            named = [change for change in changes if change[0] != DIGEST] or changes
            raise ValueError(f"{self.folder} was made with other settings ({in_words(named)}): {remedy}")
        # An unfinished stage reads its files again, so their content is compared, not only size and time.
        made.refuse_changed_files(everything=not self.is_done, remedy=remedy)

    def _made_with(self) -> MadeWith:
        file = self.folder / "settings.json"
        return MadeWith(file, self._settings(), self._named(), self.run_folder, remedy_for(self.folder))

    def _not_begun(self) -> bool:
        """Return whether no work was done, as after a refused setting, which may then be replaced."""
        files = (path for path in self.folder.rglob("*") if not path.is_dir())
        return all(file.name in BEFORE_WORK and file.parent == self.folder for file in files)

    def _refuse_work_without_settings(self) -> None:
        begun = [self.folder / DONE, *self.folder.glob("checkpoints/*.ckpt"), *self.folder.glob("*.partial")]
        if left := [file for file in begun if file.is_file()]:
            raise ValueError(
                f"{self.folder} has no settings.json, so nobody can tell with which settings {left[0].name} was made: "
                f"put it back, or {remedy_for(self.folder)}"
            )

    def _named(self) -> dict[str, Any]:
        """Return all settings that may name files and folders."""
        return self.arguments if self.command == "call" else self.config()

    def _settings(self) -> dict[str, Any]:
        """Return all that the stage depends on; configs by content, paths relative to the run's folder, which may move."""
        named = [self.target, *self.arguments.values()]
        contents = {
            name: hashlib.sha256(_config(name).read_bytes()).hexdigest()[:16]
            for name in named
            if _is_config(name)
        }
        # JSON makes lists of tuples, as in the file that they are compared with.
        settings: dict[str, Any] = json.loads(
            json.dumps({"stage": f"{self.command} {self.target}", **self.arguments})
        )
        if self.command != "call":
            whole = as_yaml(_relative(self.config(), self.run_folder)).encode()
            settings[DIGEST] = hashlib.sha256(whole).hexdigest()[:16]
        return {**_relative(settings, self.run_folder), "contents of configs": contents}

    def call_arguments(self) -> dict[str, Any]:
        """Return the arguments of its function, with maps made into the dataclasses that the function takes.

        Raises:
            ValueError: an argument is unknown, missing, of another type or out of range.
        """
        signature = inspect.signature(self.function)
        kinds = {name: parameter.annotation for name, parameter in signature.parameters.items()}
        try:
            signature.bind(**self.arguments)  # TypeError for unknown and missing arguments
            refuse_unfit_arguments(self.function, self.arguments)
            return {
                name: kinds[name](**value) if is_dataclass(kinds.get(name)) else value
                for name, value in self.arguments.items()
            }
        except TypeError as error:
            hints = (near_below(name, kinds) for name in self.arguments if name not in kinds)
            raise ValueError(
                f"{self.target}: {error}{next(filter(None, hints), '')}; see its docstring"
            ) from None

    def config(self) -> dict[str, Any]:
        """Return the settings of its Lightning command: its config with the recipe's values merged into it.

        Raises:
            ValueError: a config cannot be read, or a key does not exist in it.
        """
        settings = settings_in(self.target)
        for key in sorted(self.arguments, key=setting_order):
            value = self.arguments[key]
            try:
                settings = set_in(settings, key, _part_in(value) if _is_config(value) else value)
            except ValueError as error:
                raise ValueError(f"stage {self.name}: with {key}: {error}") from None
        return set_in(settings, "trainer.default_root_dir", str(self.folder))

    def why_one_process(self) -> str | None:
        """Return why the stage runs in one process; None for a stage that several share."""
        return why_one_process(self.command, {} if self.command == "call" else self.config())

    def write_config(self, folder: Path, checkpoint: Path | None = None, processes: int = 1) -> Path:
        """Write `config` into a folder, for several processes, with the checkpoint to resume from; return the file."""
        resumed = {} if checkpoint is None else {"ckpt_path": str(checkpoint)}
        config = for_processes(self.config(), processes, self.name) if processes > 1 else self.config()
        file = folder / CONFIG
        write_whole(file, as_yaml({**config, **resumed}))
        return file

    def check(self) -> Any:
        """Return the parsed settings of its Lightning command, None for a call; nothing is read, loaded or trained.

        Raises:
            ValueError: a setting is unknown, missing or wrong, or settings do not suit each other.
        """
        if self.command == "call":
            self.call_arguments()
            return None
        from fedlight.lightning_cli.cli import ReadSettings

        messages = io.StringIO()
        # One line of an error, even if the user asked for tracebacks.
        wanted = os.environ.pop("FEDLIGHT_TRACEBACK", "")
        with TemporaryDirectory() as folder, quiet(), redirect_stderr(messages):
            file = self.write_config(Path(folder))
            arguments = [self.command, f"--config={file}"]
            try:
                parsed = self._parsed[file.read_bytes()] = ReadSettings(arguments).config
                if not self._can_be_made(arguments, parsed):
                    others = parsed.clone()
                    others[self.command].trainer.callbacks = None
                    self._can_be_made(arguments, others)
            except SystemExit:  # the parser has printed the error
                first = messages.getvalue().strip().splitlines()[:1] or ["the command line does not parse"]
                raise ValueError(first[0].removeprefix("fedlight: ")) from None
            finally:
                os.environ.update({"FEDLIGHT_TRACEBACK": wanted} if wanted else {})
        return parsed[self.command]

    def _can_be_made(self, arguments: list[str], parsed: Any) -> bool:
        """Make the objects of its command; return False if one needs a file that an earlier stage writes."""
        from fedlight.lightning_cli.cli import CheckSettings

        try:
            CheckSettings(arguments, parsed=parsed)
        except (OSError, ValueError) as error:
            if str(self.folder.parent) not in str(error):
                raise ValueError(str(error)) from None
            return False
        return True

    def _lightning(self, followers: Followers | None) -> dict[str, Any]:
        from fedlight.lightning_cli.cli import lightning_cli
        from fedlight.support.checkpoint_files import newest_checkpoint

        written = self.folder.glob("checkpoints/*.ckpt") if self.command == "fit" else ()
        checkpoint = newest_checkpoint(written)
        if followers is None or followers.number == 1 or self.why_one_process() is not None:
            file = self.write_config(self.folder, checkpoint)
            shared: AbstractContextManager[None] = nullcontext()
        else:
            file = self.write_config(self.folder, checkpoint, followers.number)
            shared = followers.running(self.command, file)
        with shared:
            parsed = self._parsed.get(file.read_bytes())  # unless it has changed since it was checked
            cli = lightning_cli([self.command, f"--config={file}"], parsed=parsed)
        metrics = cli.trainer.callback_metrics
        return {"metrics": {key: float(value) for key, value in metrics.items()}}  # tensors are no JSON


def _function(stage: str, name: str) -> Callable[..., dict[str, Any] | None]:
    module, _, function = name.rpartition(".")
    try:
        step: Callable[..., dict[str, Any] | None] = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"stage {stage}: there is no function {name!r} ({error})") from None
    return step


def _relative(value: Any, folder: Path) -> Any:
    """Return settings with ``.`` for a folder in their paths."""
    if isinstance(value, dict):
        return {key: _relative(item, folder) for key, item in value.items()}
    if isinstance(value, list):
        return [_relative(item, folder) for item in value]
    inside = isinstance(value, str) and f"{value}/".startswith(f"{folder}/")
    return f".{value.removeprefix(str(folder))}" if inside else value


def _config(name: str) -> Path:
    """Return the path of one of fedlight's own configs, else of a file here."""
    return conf_path(name) if conf_path(name).is_file() else Path(name).absolute()


def _is_config(value: Any) -> bool:
    return isinstance(value, str) and value.endswith(".yaml") and _config(value).is_file()


def settings_in(config: str) -> dict[str, Any]:
    """Return the settings of a config, its numbers and texts as the command's parser reads them."""
    from jsonargparse import get_loader

    settings: dict[str, Any] = {}
    for file in layers(str(_config(config))):
        layer = get_loader("yaml")(read_yaml(file))
        settings = laid_over(settings, {key: value for key, value in layer.items() if key != EXTENDS})
    return settings


def _part_in(config: str) -> Any:
    """Return the settings of the config of a class, such as a datamodule; for another file its path."""
    part = settings_in(config)
    return part if is_class(part) else str(_config(config))


def refuse_tied_votes(stages: Sequence[Stage]) -> None:
    """Raise ValueError, before the first stage of a run, if an even number of selectors that it trains would vote.

    Votes are read by a call with an argument ``votes``, written by a ``predict`` stage, and cast by the adapters of a
    ``fit`` stage.
    """
    by_folder = {stage.folder: stage for stage in stages}

    def trained_voters(file: str) -> tuple[Stage, int] | None:
        writes = by_folder.get(Path(file).absolute().parent)
        adapter = writes.config()["model"]["init_args"].get("adapter") if writes else None
        fits = by_folder.get(Path(adapter).absolute().parent) if adapter else None
        return (fits, fits.config()["model"]["init_args"].get("num_adapters") or 1) if fits else None

    for stage in stages:
        files = stage.arguments.get("votes") if stage.command == "call" else None
        voters = [trained_voters(file) for file in ([files] if isinstance(files, str) else files or [])]
        known = [voter for voter in voters if voter is not None]
        number = sum(count for _, count in known)
        if known and len(known) == len(voters) and number % 2 == 0:  # else some are not known
            raise ValueError(
                f"stage {stage.name} has {number} selectors vote, of which an even number can tie: set num_adapters of "
                f"stage {known[0][0].name} to an odd number, or leave out the stages that label"
            )
