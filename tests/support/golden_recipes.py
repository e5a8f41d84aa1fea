"""What the commands of every recipe are told, as a digest, and once parsed: ``tests/golden/recipes.json``.

``python tests/support/golden_recipes.py`` writes the file anew; ``... NAME STAGE`` prints what is behind one digest, to
compare two states of the code.
"""

import functools
import hashlib
import json
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import yaml

from fedlight.conf import path as conf_path
from fedlight.lightning_cli.cli import ReadSettings
from fedlight.recipes import recipe as recipes
from fedlight.recipes.overlay import as_yaml
from fedlight.recipes.stages import CONFIG, Stage

FILE = Path(__file__).parent.parent / "golden/recipes.json"
FOLDER = Path("/run/seed0")
RUN, CONF, TOLD = "RUN", "CONF", "told"
CLASS = re.compile(r"\bfedlight\.(?:[a-z_0-9]+\.)+(?=[A-Z])|\bfedlight\.(?=[A-Z])")
"""What stands before the name of a class of fedlight: a moved file changes no setting."""
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
OWN = ("model", "data", "federated", "seed_everything")


def names() -> list[str]:
    """Every recipe, and ``NAME --twin`` where it has a small copy."""
    found = []
    for file in sorted(conf_path("recipes").glob("*.yaml")):
        found.append(file.stem)
        try:
            loaded(f"{file.stem} --twin")
            found.append(f"{file.stem} --twin")
        except ValueError:
            pass
    return found


@functools.cache
def loaded(name: str) -> recipes.Recipe:
    return recipes.load(name.removesuffix(" --twin"), twin=name.endswith(" --twin"))


@functools.cache
def commands(name: str, run: Path = FOLDER) -> list[Stage]:
    """The stages of a recipe that are Lightning commands, for seed 0."""
    stages = [stage for stage in recipes.stages(loaded(name), run, 0) if stage.command != "call"]
    for stage in stages:
        stage.config = functools.cache(stage.config)  # it reads the files anew, and is asked several times
    return stages


@functools.cache
def written(stage: Stage) -> str:
    """Text of a stage's config."""
    return as_yaml(stage.config())


def in_order(stage: Stage) -> str:
    """A stage's config with sorted keys: in which order a recipe names stages and keys changes no setting."""
    return json.dumps(stage.config(), sort_keys=True)


@functools.cache
def new_to_the_parser() -> dict[str, list[Stage]]:
    """The fewest stages that have each key, type of number, choice and class of all stages at its place.

    The parser understands the others as it understands these: another number or another folder is no news to it.
    """
    places = {
        (name, stage): {(stage.command, *leaf) for leaf in leaves(stage.config())}
        for name in names()
        for stage in sorted(commands(name), key=lambda stage: stage.name)
    }
    missing, chosen = set().union(*places.values()), set()
    while missing:
        best = max(places, key=lambda key: len(places[key] & missing))
        chosen.add(best)
        missing -= places[best]
    return {name: [stage for stage in commands(name) if (name, stage) in chosen] for name in names()}


def leaves(told, at: str = "") -> Iterator[tuple[str, str]]:
    """Where each value stands, and the value, of a number its type alone, of a path in a run nothing."""
    if isinstance(told, (dict, list)) and told:
        for key, value in told.items() if isinstance(told, dict) else enumerate(told):
            yield from leaves(value, f"{at}.{key}")
    elif type(told) in (int, float):
        yield at, type(told).__name__
    else:
        yield at, RUN if str(FOLDER) in str(told) else repr(told)


@functools.cache  # a hundred commands of recipes are those of others
def _parsed(command: str, text: str) -> dict:
    with TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        file = Path(folder, CONFIG)
        file.write_text(text, encoding="utf-8")
        return ReadSettings([command, f"--config={file}"]).config[command].as_dict()


def parsed(stage: Stage) -> dict:
    """All settings of a command, defaults included, as its own parser has them."""
    return _parsed(stage.command, written(stage))


def named(stage: Stage, settings: dict) -> str:
    """What of the parsed settings is the recipe's or fedlight's, without the places of this machine.

    Defaults of Lightning's own classes are left out: another version of it may have others.
    """
    told = {key: settings.get(key) for key in OWN}
    given = stage.config()["trainer"]
    told["trainer"] = {key: settings["trainer"][key] for key in given if key != "callbacks"}
    told["callbacks"] = [
        one if one["class_path"].startswith("fedlight.") else asked
        for one, asked in zip(
            settings["trainer"]["callbacks"] or [], given.get("callbacks") or [], strict=True
        )
    ]
    return without_places(stage, json.dumps(told, sort_keys=True, indent=1, default=str))


def without_places(stage: Stage, text: str) -> str:
    """A text without the folders of this machine and of fedlight's classes."""
    places = {str(stage.folder.parent): RUN, str(conf_path("recipes").parent): CONF}
    for place, name in places.items():
        text = text.replace(place, name)
    return CLASS.sub("", text)


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def unlike(told, settings, at: str = "") -> list[str]:
    """Where the parser has understood something else than what it was told; references and names of classes apart."""
    if isinstance(told, dict):
        if "class_path" in told and isinstance(settings, dict) and "class_path" not in settings:
            told = told["init_args"]  # the one class that can stand there
        if not isinstance(settings, dict):
            return [f"{at}: {told!r} -> {settings!r}"]
        return [
            line
            for key, value in told.items()
            for line in unlike(value, settings.get(key, "is not there"), f"{at}.{key}")
        ]
    if isinstance(told, list):
        if not isinstance(settings, (list, tuple)) or len(told) != len(settings):
            return [f"{at}: {told!r} -> {settings!r}"]
        pairs = zip(told, settings, strict=True)
        return [line for place, pair in enumerate(pairs) for line in unlike(*pair, f"{at}[{place}]")]
    if at.endswith(".class_path"):
        return (
            []
            if told.rpartition(".")[2] == settings.rpartition(".")[2]
            else [f"{at}: {told!r} -> {settings!r}"]
        )
    is_reference = isinstance(told, str) and "${" in told
    return [] if is_reference or told == settings else [f"{at}: {told!r} -> {settings!r}"]


def digests(name: str) -> dict[str, str]:
    """A digest of what all commands of a recipe are told, and one of what each that is new to the parser hears."""
    told = sorted(without_places(stage, f"{stage.name}: {in_order(stage)}") for stage in commands(name))
    heard = {stage.name: digest(named(stage, parsed(stage))) for stage in new_to_the_parser()[name]}
    return {TOLD: digest("".join(told)), **heard}


if __name__ == "__main__":
    if len(sys.argv) > 1:
        (stage,) = [stage for stage in commands(" ".join(sys.argv[1:-1])) if stage.name == sys.argv[-1]]
        print(named(stage, parsed(stage)))
    else:
        FILE.parent.mkdir(exist_ok=True)
        FILE.write_text(json.dumps({name: digests(name) for name in names()}, indent=1) + "\n")
