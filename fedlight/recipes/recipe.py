"""Recipes: pipelines of stages, from the first command to a table of results, in one process.

A recipe is a YAML file of ``conf/recipes/`` with ``stages:`` (`fedlight.recipes.stages`) and the values that they share; its
grammar is written down in ``docs/recipes.md``. The rows of the last stage are the results. A second call skips stages that
are done; a stopped stage resumes from its newest readable checkpoint, or from the predictions that it has written.
"""

import functools
import itertools
import math
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import omegaconf
import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fedlight.conf import path as conf_path
from fedlight.lightning_cli.run_folder import alone_in
from fedlight.lightning_cli.values_as_written import ENDING, as_written
from fedlight.recipes.chosen_stages import chosen_stages
from fedlight.recipes.followers import Followers, check_processes
from fedlight.recipes.overlay import merge_arguments, merge_recipes
from fedlight.recipes.stages import COMMANDS, Stage, refuse_tied_votes
from fedlight.runs.folders import SEED
from fedlight.support.checks import read_yaml
from fedlight.support.console import silence_lightning
from fedlight.support.files import BoundError, sealed, write_json
from fedlight.support.words import first_line, near

Recipe = dict[str, Any]
OVER_SEEDS = "over_seeds"
MOST_RECIPES = 10
"""Recipes that extend each other one after the other."""


def _read(file: Path) -> Recipe:
    try:
        recipe: Any = OmegaConf.to_container(OmegaConf.create(read_yaml(file)))
    except BoundError:  # not by the parser
        raise
    except Exception as error:  # whatever the YAML parser raises
        raise ValueError(f"{file} is no YAML: {error}") from None
    if not isinstance(recipe, dict):
        raise ValueError(f"{file} is no recipe: it has no stages")
    return recipe


def load(name: str, overrides: list[str] | None = None, twin: bool = False) -> Recipe:
    """Return a recipe, merged over the recipes that it ``extends:``, with overrides.

    Args:
        name: a recipe's name or path.
        overrides: ``KEY=VALUE`` changes of the recipe's values; they win over ``twin:``.
        twin: merge the values of its ``twin:`` over it.

    Raises:
        ValueError: no such recipe, an override of a value or stage that the recipe does not have, or it has no twin.
    """
    recipe = _load_file(name)
    small = recipe.pop("twin", None)
    if twin:
        if small is None:
            having = sorted(
                f.stem
                for f in conf_path("recipes").glob("*.yaml")
                if "\ntwin:" in f.read_text(encoding="utf-8")
            )
            raise ValueError(
                f"the recipe {name} has no twin; {', '.join(having)} have one, and those that extend them"
            )
        recipe = merge_recipes(recipe, {key: value for key, value in small.items() if key != "twin"})
    for item in overrides or []:
        key, equals, text = item.partition("=")
        if not equals or not key:
            raise ValueError(f"{item!r} gives no value: write KEY=VALUE, as in rounds=3")
        if key.partition(".")[0] not in recipe:
            values = [name for name in recipe if name not in ("stages", OVER_SEEDS)]
            below = [
                f"{value}.{inner}"
                for value in values
                if isinstance(recipe[value], dict)
                for inner in recipe[value]
            ]
            hint = near(key, [*values, *below]) or f"; its values are {', '.join(values)}"
            raise ValueError(f"{item!r}: the recipe {name} has no value {key!r}{hint}")
        first, *parts = key.split(".")
        if first in ("stages", OVER_SEEDS) and parts and parts[0] not in (recipe[first] or {}):
            known = ", ".join(recipe[first] or {})
            raise ValueError(
                f"{item!r}: the recipe {name} has no stage {parts[0]!r}; its {first} are {known}"
            )
        try:
            value = _given(key, text, replaces_text=isinstance(_value_at(recipe, key, item), str))
        except OmegaConfBaseException as error:
            what = str(error).partition("\n")[0]
            raise ValueError(f"{item!r}: {what}; a reference is written as ${{seed}}") from None
        for part in reversed(key.split(".")):
            value = {part: value}
        recipe = merge_recipes(recipe, value)
    return recipe


def _value_at(recipe: Recipe, key: str, item: str) -> Any:
    """Return the value that an override replaces; None for none."""
    value: Any = recipe
    for part in key.split("."):
        if isinstance(value, list) or "[" in part:
            raise ValueError(f"{item!r} changes a part of a list: give the whole list")
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _given(key: str, text: str, replaces_text: bool) -> Any:
    """Return the value of an override.

    It is YAML, but an unquoted text is kept as it was written. Where it replaces a text, a text with a colon or in braces
    stays a text as well. So does a template with slots.
    """
    if key.endswith(ENDING) and "{" in text and not text.startswith(("'", '"')):
        made = text = as_written(text)
    else:
        try:
            # References such as ${seed} are resolved when the change is a part of the recipe.
            read: Any = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))
            made = read["value"]
        except yaml.YAMLError:
            made = text
    # YAML would cut an unquoted text at " #" and make a blank of a line break.
    value = text if _is_text(text, made, replaces_text) else made
    OmegaConf.create({"value": value})  # refuses a reference that cannot be read
    return value


def _is_text(text: str, made: Any, replaces_text: bool) -> bool:
    """Return whether an override is kept as it was written, rather than as ``made``, the value that YAML reads."""
    if isinstance(made, str):
        return not text.startswith(("'", '"'))
    if made is None:
        return bool(text) and text.strip().lower() not in ("null", "~")
    if isinstance(made, dict):  # {instruction} is a slot, {number: 3} a map
        return replaces_text and (not text.startswith("{") or all(made[key] is None for key in made))
    return False


def _load_file(name: str, above: tuple[Path, ...] = ()) -> Recipe:
    """Return a recipe merged over those that it extends, and its ``twin`` likewise; paths start at the file's folder."""
    file = Path(name) if name.endswith((".yaml", ".yml")) else conf_path(f"recipes/{name}.yaml")
    if not file.is_file():
        known = ", ".join(sorted(f.stem for f in conf_path("recipes").glob("*.yaml")))
        hint = near(file.stem, known.split(", "))
        raise ValueError(
            f"there is no recipe {name!r}{hint}; there are {known}, or give the path of a YAML file"
        )
    if file.resolve() in above or len(above) >= MOST_RECIPES:
        raise ValueError(
            f"the recipe {name!r} extends itself, or is below more than {MOST_RECIPES} others: join some of them"
        )
    above = (*above, file.resolve())  # resolved: two paths may name one file
    recipe = _extended(_read(file), file, above)
    if (small := recipe.get("twin")) is not None:
        if not isinstance(small, dict):
            raise ValueError(f"{file}: twin={small!r} has to be a map of the values that it changes")
        recipe["twin"] = _extended(small, file, above)
    return recipe


def _extended(recipe: Recipe, file: Path, above: tuple[Path, ...]) -> Recipe:
    extended = recipe.pop("extends", None)
    names = [extended] if isinstance(extended, str) else extended or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(
            f"{file}: extends={extended!r} has to be the name of a recipe's file, or a list of them"
        )
    below = [_load_file(str(file.parent / name), above) for name in names]
    return functools.reduce(merge_recipes, [*below, recipe])


def folder_of(name: str, output: Path | None = None, twin: bool = False) -> Path:
    """Return the folder of a recipe's results: ``output``, else ``runs/NAME`` or ``runs/NAME_twin``."""
    return (output or Path("runs") / (Path(name).stem + ("_twin" if twin else ""))).absolute()


def run(
    name: str,
    seeds: list[int] | None = None,
    output: Path | None = None,
    overrides: list[str] | None = None,
    twin: bool = False,
    only: list[str] | None = None,
    processes: int | None = None,
) -> dict[str, Any]:
    """Run the stages of a recipe that are not done yet, print the answer and the table, and write ``results.json``.

    Args:
        name: a recipe's name or path.
        seeds: one run for each; the recipe's own if not given. Results are also of other seeds that the folder has whole.
        output: folder of the results, ``runs/NAME`` if not given.
        overrides: ``KEY=VALUE`` changes of the recipe's values.
        twin: run its small copy; see `load`.
        only: run these stages and those that they read from, see `fedlight.recipes.chosen_stages`, and write no results.
        processes: number of processes that share the work of stages, >= 1; results do not depend on it, see
            `fedlight.recipes.followers.Followers`. None: one process with as many threads as torch takes.

    Returns:
        Content of ``results.json``: ``rows``, one per method and seed; ``seconds``; ``versions``. With ``only`` the rows are
        one per seed and stage, with its metrics.

    Raises:
        ValueError: ``only`` names no stage, ``processes`` is below 1 or a stage sets a strategy itself, an even number of
            selectors would vote, a stage was done with other settings in this folder, of any seed, or another process works
            there.
    """
    check_processes(processes)
    recipe = load(name, overrides, twin)
    output = folder_of(name, output, twin)
    silence_lightning()
    wanted = seeds_of(recipe, seeds)
    plan = {seed: stages(recipe, output / f"seed{seed}", seed) for seed in wanted}
    for steps in plan.values():
        refuse_tied_votes(steps)  # before the first stage
    together = stages_over_seeds(recipe, output, wanted)
    if only is not None:
        chosen, together = chosen_stages(list(plan.values()), together, only)
        plan = dict(zip(plan, chosen, strict=True))
    rows: list[dict[str, Any]] = []
    of_stages: list[dict[str, Any]] = []
    seconds = 0.0
    wanted_stages = [stage for steps in (*plan.values(), together) for stage in steps]
    with ExitStack() as stack:
        # Each seed has its own lock, so that several processes may share the seeds of a recipe.
        for folder in dict.fromkeys(stage.folder.parent for stage in wanted_stages):
            stack.enter_context(alone_in(folder, "--output"))
        others = _other_seeds(recipe, output, plan)
        if only is None:
            plan = others | plan  # a damaged result of theirs is refused before any work
        _check([stage for stage in wanted_stages if not stage.is_done])
        followers = None if processes is None else stack.enter_context(Followers(processes))
        for seed, steps in plan.items():
            for stage in steps:
                done = stage.run(followers)
                seconds += done["seconds"]
                of_stages.append({"method": stage.name, **done["result"].get("metrics", {}), "seed": seed})
            if only is None:
                rows += [{**row, "seed": seed} for row in done["result"].get("rows", [])]
        seconds += sum(stage.run(followers)["seconds"] for stage in together)
    rows.sort(key=lambda row: row["seed"])  # whichever command has trained it
    from fedlight.judges.finding import finding
    from fedlight.support.results import show, show_stages, versions

    results = {"recipe": Path(name).stem, "rows": rows, "seconds": round(seconds, 1), "versions": versions()}
    if only is not None:
        show_stages(of_stages, output)
        return {**results, "rows": of_stages}
    write_json(output / "results.json", sealed(results))
    show(results, output, finding(rows))
    return results


def _check(wanted: Sequence[Stage]) -> None:
    """Raise ValueError for wrong settings of any stage, which its turn would show after hours; seeds differ in paths."""
    first: dict[str, Stage] = {}
    for stage in wanted:
        first.setdefault(stage.name, stage)
    if len(first) > 20:  # it takes seconds
        print(f"checking the settings of {len(first)} stages", file=sys.stderr, flush=True)
    for stage in first.values():
        try:
            stage.check()
        except ValueError as error:
            # A parser that wants a path to be there cannot know that an earlier stage writes it.
            if str(stage.folder.parent) not in str(error):
                raise ValueError(f"stage {stage.name}: {error}") from None


def _other_seeds(recipe: Recipe, output: Path, plan: dict[int, list[Stage]]) -> dict[int, list[Stage]]:
    """Return the stages of other seeds in the folder that are done with all; reports take means over all seeds.

    Raises:
        ValueError: a stage has other settings there.
    """
    names = {stage.name for steps in plan.values() for stage in steps}
    begun = {int(match[1]) for folder in output.glob("seed*") if (match := SEED.fullmatch(folder.name))}
    others = {seed: stages(recipe, output / f"seed{seed}", seed) for seed in sorted(begun - {*plan})}
    for stage in (stage for steps in others.values() for stage in steps if stage.name in names):
        stage.refuse_other_settings()
    return {seed: steps for seed, steps in others.items() if all(stage.is_done for stage in steps)}


def seeds_of(recipe: Recipe, given: list[int] | None) -> list[int]:
    """Return the given seeds, or the recipe's; raise ValueError if they are not different whole numbers."""
    seeds: Any = recipe.get("seeds", [0]) if given is None else given
    fine = isinstance(seeds, list) and all(type(seed) is int and 0 <= seed < 2**32 for seed in seeds)
    if not fine or not seeds or len({*seeds}) < len(seeds):  # a seed twice would look like an exact result
        raise ValueError(f"seeds={seeds}: give whole numbers from 0 to {2**32 - 1}, each once, as [0, 1, 2]")
    return seeds


def stages(recipe: Recipe, folder: Path, seed: int) -> list[Stage]:
    """Return the stages of one seed's run, in order, without those with ``when: false``.

    Raises:
        ValueError: a ``${...}`` or a ``like:`` that the recipe does not have.
    """
    of_seed = {key: value for key, value in recipe.items() if key != OVER_SEEDS}
    resolved = _resolved({**of_seed, "run": str(folder), "seed": seed}, [folder])
    return _stages(resolved, folder)


def stages_over_seeds(recipe: Recipe, output: Path, seeds: list[int]) -> list[Stage]:
    """Return the stages that read the runs of all seeds, in order; their folder is named after the seeds."""
    if not recipe.get(OVER_SEEDS):
        return []
    folders = [output / f"seed{seed}" for seed in seeds]
    folder = output / "_".join(["seeds", *map(str, seeds)])
    # Values for one seed alone are resolved only where a stage refers to them.
    resolved = _resolved({**recipe, "run": str(folder)}, folders, OVER_SEEDS)
    return _stages({"stages": resolved}, folder)


def _resolved(config: Recipe, runs: list[Path], key: str | None = None) -> Recipe:
    """Return the config, or its part under ``key``, with all references replaced by their values."""
    # The method of this name in 2.3, which hydra-core needs, is an older one.
    is_old = omegaconf.__version__.startswith("2.3.")
    register: Any = OmegaConf.register_new_resolver if is_old else OmegaConf.register_resolver
    register("choose", lambda condition, yes, no: yes if condition else no, replace=True)
    register("product", lambda *numbers: math.prod(numbers), replace=True)
    register("sum", lambda *numbers: sum(numbers), replace=True)
    register("share", lambda number, part: round(number * part), replace=True)
    register("by_name", lambda names: {name: name for name in names}, replace=True)
    register("every", lambda name: [str(run / name) for run in runs], replace=True)

    def grid(name: str, *, _root_: Any) -> Any:
        if key is not None:
            raise ValueError(f"${{grid:{name}}} are folders of one seed: in {key} take ${{every:STAGE}}")
        axes = OmegaConf.select(_root_, f"stages.{name}.grid")
        if axes is None:
            raise ValueError(f"${{grid:{name}}}: there is no stage {name!r} with a grid")
        axes = OmegaConf.to_container(axes, resolve=True) if OmegaConf.is_config(axes) else axes
        return _grid_folders(_axes(name, axes), runs[0])

    register("grid", grid, replace=True)
    try:
        whole: Any = OmegaConf.create(config)
        part = whole if key is None else whole[key]
        resolved: Any = OmegaConf.to_container(part, resolve=True) if OmegaConf.is_config(part) else part
    except OmegaConfBaseException as error:
        what = f"{first_line(error)}, in {error.full_key}"
        raise ValueError(f"the recipe refers to what it does not have: {what}") from None
    return resolved


def _stages(resolved: Recipe, folder: Path) -> list[Stage]:
    named = resolved.get("stages")
    if not named or not isinstance(named, dict) or not all(isinstance(spec, dict) for spec in named.values()):
        raise ValueError("a recipe needs stages: names, each with a command, see conf/recipes/fedbis.yaml")
    specs: dict[str, Any] = {}
    for name, spec in named.items():
        _check_stage(name, spec)
        like, grid = spec.pop("like", None), spec.pop("grid", None)
        if like is not None and like not in specs:
            raise ValueError(f"stage {name} is like {like!r}, which is no stage before it")
        base = specs[like] if like else {}
        spec = {**base, **spec, "with": merge_arguments(base.get("with"), spec.get("with"))}
        for cell, changes in [(name, [])] if grid is None else _cells(name, grid):
            if cell in specs:
                raise ValueError(f"stage {name}: there are two stages {cell!r}: give its grid other names")
            specs[cell] = {**spec, "with": functools.reduce(merge_arguments, changes, spec["with"])}
    return [
        Stage(name, folder / name, spec, folder.parent)
        for name, spec in specs.items()
        if spec.pop("when", True)  # only now: others may be like a stage that is left out
    ]


def _check_stage(name: Any, spec: dict[Any, Any]) -> None:
    """Raise ValueError for a stage with a value of another kind, such as a text in place of false."""
    if not isinstance(name, str) or "/" in name or name in ("", ".", ".."):
        raise ValueError(f"stage {name!r}: its name is that of its folder: give a text without a slash")
    arguments, is_wanted = spec.get("with") or {}, spec.get("when", True)
    if not isinstance(arguments, dict) or not all(isinstance(key, str) for key in arguments):
        raise ValueError(f"stage {name}: with={arguments!r} has to be a map of names to values")
    if isinstance(is_wanted, str):
        raise ValueError(f"stage {name}: when={is_wanted!r} is a text: write true or false")
    for key in ("like", *COMMANDS):
        if not isinstance(spec.get(key, ""), str):
            raise ValueError(f"stage {name}: {key}={spec[key]!r} has to be a name")


def _cells(name: str, grid: Any) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield the name of each stage of a grid, and what its places on the axes change in ``with``."""
    for places in itertools.product(*(axis.items() for axis in _axes(name, grid))):
        yield _cell([place for place, _ in places]), [changes or {} for _, changes in places]


def _axes(name: str, grid: Any) -> list[dict[str, Any]]:
    axes = grid if isinstance(grid, list) else []
    changes = [change for axis in axes if isinstance(axis, dict) for change in axis.values()]
    are_axes = axes and all(isinstance(axis, dict) and axis for axis in axes)
    if not are_axes or not all(change is None or isinstance(change, dict) for change in changes):
        raise ValueError(f"stage {name}: grid is a list of axes, each a map of names to changes of 'with'")
    return axes


def _cell(places: Sequence[str]) -> str:
    parts = [re.sub(r"\W+", "_", str(place).lower()).strip("_") for place in places]
    if not all(parts):
        raise ValueError(f"grid: {[*places]} names a stage, so each needs letters or digits")
    return "_".join(parts)


def _grid_folders(axes: list[dict[str, Any]], run: Path, places: tuple[str, ...] = ()) -> Any:
    """Return the folders of a grid's stages, by their places on the axes."""
    if not axes:
        return str(run / _cell(places))
    return {place: _grid_folders(axes[1:], run, (*places, place)) for place in axes[0]}
