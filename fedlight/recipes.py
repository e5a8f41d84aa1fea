"""Recipes: from the first stage to a table of results, in one process.

A recipe is a YAML file in ``conf/recipes/`` with ``stages:``. A stage is one Lightning command with its config and
overrides (``fit: selector.yaml``), or one function call (``call: package.module.function``). Values refer to each other
with ``${...}``; ``${run}`` is the folder of one seed's run and ``${seed}`` the seed. A stage that is done leaves
``done.json`` in its folder with what it returned, so a second call does nothing twice; a stage that was stopped goes on
from its newest readable checkpoint, or from the predictions that it had written.
"""

import argparse
import hashlib
import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fedlight.conf import path as conf_path

COMMANDS = ("fit", "validate", "test", "predict", "call")


def main(argv: list[str]) -> None:
    """``fedlight run NAME [--seeds 0 1 2] [--output DIR] [KEY=VALUE ...]``."""
    from fedlight.errors import one_line_errors

    parser = argparse.ArgumentParser("fedlight run", description=_listing(), formatter_class=_Raw)
    parser.add_argument("name", help="a recipe's name or the path of a recipe's YAML file")
    parser.add_argument("--seeds", type=int, nargs="+", help="one run for each; default: the recipe's")
    parser.add_argument("--output", type=Path, help="folder of the results; default: runs/NAME")
    parser.add_argument("set", nargs="*", metavar="KEY=VALUE", help="change a value of the recipe, such as rounds=3")
    options = parser.parse_intermixed_args(argv)
    with one_line_errors():
        run(options.name, options.seeds, options.output, options.set)


class _Raw(argparse.RawDescriptionHelpFormatter):
    """Keeps the line breaks of the listing."""


def _listing() -> str:
    lines = [f"  {file.stem:<12} {_first_comment(file)}" for file in sorted(conf_path("recipes").glob("*.yaml"))]
    return "Recipes:\n" + "\n".join(lines)


def _first_comment(file: Path) -> str:
    return file.read_text().partition("\n")[0].lstrip("# ")


def load(name: str, overrides: list[str] | None = None) -> DictConfig:
    """Reads a recipe, with its ``base:`` recipe under it and ``KEY=VALUE`` overrides over it.

    Raises:
        ValueError: no such recipe, or an override of a key that the recipe does not have.
    """
    file = Path(name) if name.endswith((".yaml", ".yml")) else conf_path(f"recipes/{name}.yaml")
    if not file.is_file():
        known = ", ".join(sorted(f.stem for f in conf_path("recipes").glob("*.yaml")))
        raise ValueError(f"there is no recipe {name!r}: give one of {known}, or the path of a YAML file")
    recipe = OmegaConf.load(file)
    base = recipe.pop("base", None)
    if base is not None:
        recipe = OmegaConf.merge(load(str(file.parent / base)), recipe)
    for item in overrides or []:
        key, equals, value = item.partition("=")
        if not equals or OmegaConf.select(recipe, key, default=recipe) is recipe:
            raise ValueError(f"{item!r}: the recipe {name} has no value {key!r}; its values are {_values(recipe)}")
        OmegaConf.update(recipe, key, OmegaConf.create({"v": OmegaConf.create(f"v: {value}").v}).v)
    return recipe


def _values(recipe: DictConfig) -> str:
    return ", ".join(str(key) for key in recipe if key not in ("stages", "seeds", "description"))


def run(
    name: str, seeds: list[int] | None = None, output: Path | None = None, overrides: list[str] | None = None
) -> dict[str, Any]:
    """Runs what of the recipe is not done yet, prints the table and writes ``results.json``.

    Args:
        name: a recipe's name or path.
        seeds: one run for each; the recipe's own if not given.
        output: folder of the results, ``runs/NAME`` if not given.
        overrides: ``KEY=VALUE`` changes of the recipe's values.

    Returns:
        What is in ``results.json``: ``rows``, one per method and seed; ``seconds``; ``versions``.

    Raises:
        ValueError: a stage was done with other settings in this folder.
    """
    recipe = load(name, overrides)
    output = (output or Path("runs") / Path(name).stem).absolute()
    _quiet()
    rows: list[dict[str, Any]] = []
    seconds = 0.0
    for seed in seeds if seeds is not None else list(recipe.seeds):
        folder = output / f"seed{seed}"
        for stage in _stages(recipe, folder, seed):
            done = stage.run()
            seconds += done["seconds"]
            rows += [{**row, "seed": seed} for row in done["result"].get("rows", [])]
    from fedlight.results import show, versions

    results = {"recipe": Path(name).stem, "rows": rows, "seconds": round(seconds, 1), "versions": versions()}
    write_json(output / "results.json", results)
    show(results, output)
    return results


def _stages(recipe: DictConfig, folder: Path, seed: int) -> list["Stage"]:
    merged = OmegaConf.merge(recipe, {"run": str(folder), "seed": seed})
    try:
        resolved: Any = OmegaConf.to_container(merged, resolve=True)
    except OmegaConfBaseException as error:
        raise ValueError(f"the recipe refers to what it does not have: {error}") from None
    return [
        Stage(name, folder / name, spec) for name, spec in resolved["stages"].items() if spec.pop("when", True)
    ]


class Stage:
    """One step of a recipe, which is done once.

    Args:
        name: of the stage, and of its folder.
        folder: where it writes.
        spec: one of ``fit``, ``validate``, ``test``, ``predict`` with a config file of ``conf/``, or ``call`` with a
            dotted function; and ``with``, its overrides or arguments.
    """

    def __init__(self, name: str, folder: Path, spec: dict[str, Any]) -> None:
        commands = [command for command in COMMANDS if command in spec]
        unknown = set(spec) - set(COMMANDS) - {"with"}
        if len(commands) != 1 or unknown:
            raise ValueError(f"stage {name}: give exactly one of {', '.join(COMMANDS)}, and 'with'; it has {list(spec)}")
        self.name = name
        self.folder = folder
        self.command = commands[0]
        self.target = spec[self.command]
        self.arguments: dict[str, Any] = spec.get("with") or {}

    def run(self) -> dict[str, Any]:
        """Does the stage unless it is done; gives what it returned and the seconds that it took."""
        marker = self.folder / "done.json"
        fingerprint = self._fingerprint()
        if marker.is_file():
            done = json.loads(marker.read_text())
            if done["fingerprint"] != fingerprint:
                raise ValueError(
                    f"{self.folder} was made with other settings: give another --output, or delete that folder and the "
                    "ones of the stages after it"
                )
            return done
        self.folder.mkdir(parents=True, exist_ok=True)
        print(f"── {self.name}", file=sys.stderr, flush=True)
        start = time.perf_counter()
        result = self._call() if self.command == "call" else self._lightning()
        done = {"result": result, "seconds": time.perf_counter() - start, "fingerprint": fingerprint}
        write_json(marker, done)
        return done

    def _fingerprint(self) -> str:
        settings: list[Any] = [self.command, self.target, self.arguments]
        if self.command != "call":
            settings.append(conf_path(self.target).read_text())
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]

    def _call(self) -> dict[str, Any]:
        module, _, function = self.target.rpartition(".")
        return getattr(importlib.import_module(module), function)(**self.arguments) or {}

    def _lightning(self) -> dict[str, Any]:
        from fedlight.cli import lightning_cli

        argv = [self.command, f"--config={conf_path(self.target)}", f"--trainer.default_root_dir={self.folder}"]
        argv += [f"--{key}={_text(value)}" for key, value in self.arguments.items()]
        checkpoint = newest_checkpoint(self.folder / "checkpoints") if self.command == "fit" else None
        if checkpoint is not None:
            argv.append(f"--ckpt_path={checkpoint}")
        trainer = lightning_cli(argv).trainer
        if trainer.interrupted:
            sys.exit(f"fedlight: stopped in stage {self.name}; the same command goes on from here")
        return {"metrics": {key: float(value) for key, value in trainer.callback_metrics.items()}}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint that can be read; a damaged one is named and passed over."""
    import torch

    for file in sorted(folder.glob("*.ckpt"), key=lambda f: f.stat().st_mtime, reverse=True):
        try:
            torch.load(file, map_location="cpu", weights_only=True)
            return file
        except Exception as error:  # whatever a truncated zip raises
            print(f"passing over the damaged checkpoint {file} ({type(error).__name__})", file=sys.stderr)
    return None


def write_json(file: Path, content: Any) -> None:
    """Writes all or nothing, so that a stop leaves no half file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, indent=2) + "\n")
    os.replace(temporary, file)


def _quiet() -> None:
    import logging

    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
