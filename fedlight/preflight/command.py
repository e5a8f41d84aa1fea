"""Parsing of every stage: does its config parse, and does its function take its arguments? Nothing is loaded for it."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from fedlight.lightning_cli.class_names import class_of
from fedlight.lightning_cli.full_keys import values_in
from fedlight.preflight.finding import Finding, ok, problem
from fedlight.recipes.stages import Stage


class ParsedStage(NamedTuple):
    """A stage and its settings."""

    stage: Stage
    # all settings, defaults included, as plain values; the arguments of a function; empty where they do not parse
    config: dict[str, Any]
    namespace: Any = None  # the parser's form of the settings; None for a function


def parse_stages(stages: Sequence[Stage]) -> tuple[list[ParsedStage], list[Finding]]:
    """Return each stage with its settings, and one finding for each that does not parse, or else one for all."""
    parsed, wrong = [], []
    for stage in stages:
        try:
            settings = stage.check()
            if settings is None:
                parsed.append(ParsedStage(stage, dict(stage.arguments)))
            else:
                plain = {key: value for key, value in settings.as_dict().items() if key != "config"}
                parsed.append(ParsedStage(stage, plain, settings))
        except ValueError as error:
            parsed.append(ParsedStage(stage, {}))
            wrong.append(problem(f"stage {stage.name}", str(error)))
    functions = sum(stage.command == "call" for stage in stages)
    done = sum(stage.is_done for stage in stages)
    summary = f"{len(stages)} parse: {len(stages) - functions} commands, {functions} functions"
    return parsed, wrong or [ok("stages", summary + (f"; {done} are done already" if done else ""))]


def parts_of(value: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every class that settings name, at any depth, with its arguments.

    Examples:
        >>> list(parts_of([{"class_path": "a.B", "init_args": {"c": {"class_path": "d.E"}}}]))
        [('a.B', {'c': {'class_path': 'd.E'}}), ('d.E', {})]
    """
    for _, part in values_in(value):
        if isinstance(part, dict) and isinstance(part.get("class_path"), str):
            yield part["class_path"], part.get("init_args") or {}


def arguments_of(config: Any, kind: type) -> Iterator[dict[str, Any]]:
    """Yield the arguments of every object of a class, or of a class derived from it, that settings name."""
    for path, arguments in parts_of(config):
        cls = class_of(path)
        if cls is not None and issubclass(cls, kind):
            yield arguments
