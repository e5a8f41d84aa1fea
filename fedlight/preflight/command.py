"""Does every stage's command line parse, and does every function take its arguments? Nothing is loaded for it."""

import contextlib
import importlib
import inspect
import io
import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from lightning import LightningDataModule, LightningModule

from fedlight.callbacks.federated_loop import FederatedLoop
from fedlight.lightning_cli import OneLineParser, ReadSettings
from fedlight.preflight.finding import Finding, ok, problem
from fedlight.stages import Stage


class Read(NamedTuple):
    """A stage and what its command line says.

    Attributes:
        stage: of a recipe.
        config: all settings, defaults included, as plain values; the arguments of a function; empty where they do not parse.
        parsed: the same as the parser has them; None of a function.
    """

    stage: Stage
    config: dict[str, Any]
    parsed: Any = None

    @property
    def is_done(self) -> bool:
        """Does its folder say that it has ended?"""
        return (self.stage.folder / "done.json").is_file()


def read_stages(stages: Sequence[Stage]) -> tuple[list[Read], list[Finding]]:
    """Parses every stage.

    Returns:
        Each stage with its settings; one finding for each that does not parse, or else one for all.
    """
    reads, wrong = [], []
    for stage in stages:
        try:
            reads.append(Read(stage, _bound(stage)) if stage.command == "call" else _parsed(stage))
        except ValueError as error:
            reads.append(Read(stage, {}))
            wrong.append(problem(f"stage {stage.name}", " ".join(str(error).split())))
    functions = sum(stage.command == "call" for stage in stages)
    done = sum(read.is_done for read in reads)
    found = f"{len(stages)} parse: {len(stages) - functions} commands, {functions} functions"
    return reads, wrong or [ok("stages", found + (f"; {done} are done already" if done else ""))]


def _parsed(stage: Stage) -> Read:
    """All settings of a Lightning command; model, data and loop are made once, to have their classes refuse what is wrong.

    None of these loads anything before it is used.
    """
    said = io.StringIO()
    with (
        TemporaryDirectory() as folder,
        warnings.catch_warnings(),
        contextlib.redirect_stderr(said),
        _short_messages(),
    ):
        warnings.simplefilter("ignore")
        try:
            made = ReadSettings([stage.command, f"--config={stage.write_config(Path(folder))}"])
        except SystemExit:  # the parser has said it
            first = said.getvalue().strip().splitlines()[:1] or ["the command line does not parse"]
            raise ValueError(first[0].removeprefix("fedlight: ")) from None
        config = made.config[stage.command]
        _make(config, stage)
    whole: dict[str, Any] = config.as_dict()
    return Read(stage, {key: value for key, value in whole.items() if key != "config"}, config)


@contextlib.contextmanager
def _short_messages() -> Iterator[None]:
    """One line of the parser, whatever the user asked for elsewhere."""
    wanted = os.environ.pop("FEDLIGHT_TRACEBACK", None)
    try:
        yield
    finally:
        if wanted is not None:
            os.environ["FEDLIGHT_TRACEBACK"] = wanted


def _make(config: Any, stage: Stage) -> None:
    parser = OneLineParser(parser_mode="omegaconf+")
    parser.add_lightning_class_args(LightningModule, "model", subclass_mode=True)
    parser.add_lightning_class_args(LightningDataModule, "data", subclass_mode=True)
    parser.add_lightning_class_args(FederatedLoop, "federated", subclass_mode=True, required=False)
    parts = {key: config[key] for key in ("model", "data", "federated") if config.get(key) is not None}
    try:
        parser.instantiate(parser.parse_object(parts))
    except (FileNotFoundError, ValueError) as error:
        if str(stage.folder.parent) not in str(error):  # what an earlier stage will have written
            raise ValueError(str(error)) from None


def _bound(stage: Stage) -> dict[str, Any]:
    try:
        inspect.signature(stage.function).bind(**stage.arguments)
    except TypeError as error:
        raise ValueError(f"{stage.target}: {error}; see its docstring") from None
    return dict(stage.arguments)


def class_of(path: str) -> type | None:
    """The class that a config names in full; None where it cannot be imported."""
    module, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError):
        return None
    return found if isinstance(found, type) else None


def parts_of(value: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every class that settings name, at any depth, with its arguments.

    Example:
        >>> list(parts_of([{"class_path": "a.B", "init_args": {"c": {"class_path": "d.E"}}}]))
        [('a.B', {'c': {'class_path': 'd.E'}}), ('d.E', {})]
    """
    if isinstance(value, dict):
        if isinstance(value.get("class_path"), str):
            yield value["class_path"], value.get("init_args") or {}
        for inner in value.values():
            yield from parts_of(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from parts_of(inner)


def paths_of(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Every text in settings with the key that it stands under.

    Example:
        >>> list(paths_of({"a": "x", "b": {"c": ["y", 1]}}))
        [('a', 'x'), ('c', 'y')]
    """
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from paths_of(inner, str(name))
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from paths_of(inner, key)
    elif isinstance(value, (str, Path)):
        yield key, str(value)
