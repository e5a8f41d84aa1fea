"""Parsing of every stage: does its config parse, and does its function take its arguments? Nothing is loaded for it."""

import contextlib
import io
import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from lightning import LightningDataModule, LightningModule

from fedlight.callbacks.loop.federated_loop import FederatedLoop
from fedlight.lightning_cli.class_names import class_of
from fedlight.lightning_cli.cli import OneLineParser, ReadSettings
from fedlight.preflight.finding import Finding, ok, problem
from fedlight.recipes.stages import Stage


class ParsedStage(NamedTuple):
    """A stage and its settings.

    Attributes:
        config: all settings, defaults included, as plain values; the arguments of a function; empty where they do not parse.
        namespace: the parser's form of the settings; None for a function.
    """

    stage: Stage
    config: dict[str, Any]
    namespace: Any = None


def parse_stages(stages: Sequence[Stage]) -> tuple[list[ParsedStage], list[Finding]]:
    """Return each stage with its settings, and one finding for each that does not parse, or else one for all."""
    parsed, wrong = [], []
    for stage in stages:
        try:
            parsed.append(_called(stage) if stage.command == "call" else _parsed(stage))
        except ValueError as error:
            parsed.append(ParsedStage(stage, {}))
            wrong.append(problem(f"stage {stage.name}", " ".join(str(error).split())))  # a cell is one line
    functions = sum(stage.command == "call" for stage in stages)
    done = sum(stage.is_done for stage in stages)
    summary = f"{len(stages)} parse: {len(stages) - functions} commands, {functions} functions"
    return parsed, wrong or [ok("stages", summary + (f"; {done} are done already" if done else ""))]


def _parsed(stage: Stage) -> ParsedStage:
    """Return all settings of a Lightning command."""
    messages = io.StringIO()
    with (
        TemporaryDirectory() as folder,
        warnings.catch_warnings(),
        contextlib.redirect_stderr(messages),
        _short_messages(),
    ):
        warnings.simplefilter("ignore")
        try:
            made = ReadSettings([stage.command, f"--config={stage.write_config(Path(folder))}"])
        except SystemExit:  # the parser has printed the error
            first = messages.getvalue().strip().splitlines()[:1] or ["the command line does not parse"]
            raise ValueError(first[0].removeprefix("fedlight: ")) from None
        config = made.config[stage.command]
        # The classes of model, data and loop refuse wrong values when made; none loads anything before use.
        _make(config, stage)
    whole: dict[str, Any] = config.as_dict()
    return ParsedStage(stage, {key: value for key, value in whole.items() if key != "config"}, config)


@contextlib.contextmanager
def _short_messages() -> Iterator[None]:
    """Have the parser print one line, even if the user asked for tracebacks."""
    wanted = os.environ.pop("FEDLIGHT_TRACEBACK", None)
    try:
        yield
    finally:
        if wanted is not None:
            os.environ["FEDLIGHT_TRACEBACK"] = wanted


def _called(stage: Stage) -> ParsedStage:
    stage.call_arguments()  # refuses what does not fit
    return ParsedStage(stage, dict(stage.arguments))


def _make(config: Any, stage: Stage) -> None:
    parser = OneLineParser(parser_mode="omegaconf+")
    parser.add_lightning_class_args(LightningModule, "model", subclass_mode=True)
    parser.add_lightning_class_args(LightningDataModule, "data", subclass_mode=True)
    parser.add_lightning_class_args(FederatedLoop, "federated", subclass_mode=True, required=False)
    parts = {key: config[key] for key in ("model", "data", "federated") if config.get(key) is not None}
    try:
        parser.instantiate(parser.parse_object(parts))
    except (FileNotFoundError, ValueError) as error:
        if str(stage.folder.parent) not in str(error):  # an earlier stage will have written that file
            raise ValueError(str(error)) from None


def parts_of(value: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every class that settings name, at any depth, with its arguments.

    Examples:
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


def arguments_of(config: Any, kind: type) -> Iterator[dict[str, Any]]:
    """Yield the arguments of every object of a class, or of a class derived from it, that settings name."""
    for path, arguments in parts_of(config):
        cls = class_of(path)
        if cls is not None and issubclass(cls, kind):
            yield arguments


def paths_of(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield every text in settings with the key that it stands under, at any depth."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from paths_of(inner, str(name))
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from paths_of(inner, key)
    elif isinstance(value, (str, Path)):
        yield key, str(value)
