"""`fedlight run NAME --dry-run`: everything that can be known before a recipe's first stage is checked, and nothing is done.

Exit code 0: nothing is wrong. 1: a problem was found. 2: no problem, but something could not be checked, mostly since
the hub cannot be reached and what it has is not in the cache.
"""

import importlib.util
import logging
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedlight import recipes
from fedlight.federation.needs import Memory, Model, Need, Package, Rows, Server
from fedlight.preflight.command import read_stages
from fedlight.preflight.disk import check_disk, check_output
from fedlight.preflight.finding import Finding, State, exit_code, ok, problem, show, unknown
from fedlight.preflight.hub import Hub
from fedlight.preflight.machine import memory_of
from fedlight.preflight.memory import check_memory, trainings
from fedlight.preflight.models import check_models, size_text
from fedlight.preflight.need import needs
from fedlight.preflight.reference import check_references
from fedlight.preflight.rows import check_rows


def dry_run(
    name: str,
    seeds: list[int] | None = None,
    output: Path | None = None,
    overrides: list[str] | None = None,
    twin: bool = False,
) -> int:
    """Checks a recipe, prints what was found, and returns the exit code.

    Args:
        name: a recipe's name or path.
        seeds: as for the run itself, like the others; those of the first are parsed, as the others differ in the seed.
        output: folder of the results.
        overrides: ``KEY=VALUE`` changes of the recipe's values.
        twin: check its small copy.

    Raises:
        ValueError: there is no such recipe, or it is none.
    """
    recipe = recipes.load(name, overrides, twin)
    folder = recipes.folder_of(name, output, twin)
    wanted = seeds if seeds is not None else recipe.get("seeds", [0])
    findings = check(recipe, folder, wanted)
    show(f"{Path(name).stem}{', its twin' if twin else ''}: before the run", findings)
    return exit_code(findings)


def check(recipe: recipes.Recipe, folder: Path, seeds: Sequence[int]) -> list[Finding]:
    """All checks of a recipe.

    Args:
        recipe: as `fedlight.recipes.load` gives it.
        folder: of the results.
        seeds: of the runs.
    """
    # The log is for runs; what matters of it is in the table.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            return _check(recipe, folder, seeds)
        finally:
            logging.disable(logging.NOTSET)


def _check(recipe: recipes.Recipe, folder: Path, seeds: Sequence[int]) -> list[Finding]:
    by_seed = {seed: recipes.stages(recipe, folder / f"seed{seed}", seed) for seed in seeds}
    together = recipes.stages_over_seeds(recipe, folder, list(seeds))
    first = seeds[0]
    reads, findings = read_stages(by_seed[first])
    over_seeds, said = read_stages(together)
    findings += [finding for finding in said if finding.state is State.PROBLEM]
    findings += check_references([*reads, *over_seeds], [folder / f"seed{seed}" for seed in seeds[:1]])
    stages = [*(stage for of_seed in by_seed.values() for stage in of_seed), *together]
    findings.append(check_output(folder, stages))
    asked, hub = needs([*reads, *over_seeds]), Hub()
    rows = check_rows(_of(asked, Rows), hub, folder)
    models = check_models(_of(asked, Model), hub, folder)
    findings += rows.findings + models.findings
    if unasked := [*dict.fromkeys(rows.unasked), *models.unasked]:
        findings.append(
            unknown(
                "hub",
                f"it cannot be reached ({hub.silent}), so nothing is known of {', '.join(unasked)}: check the "
                "network, HF_ENDPOINT and HF_HUB_OFFLINE, or give files and folders instead of names",
            )
        )
    trained, uncounted = trainings(reads, models.configs)
    findings += check_memory(trained) + uncounted
    findings += check_disk(reads, trained, folder, len(seeds), models.downloads, rows.downloads, rows.counts)
    findings += [_key(server, stages_) for server, stages_ in _of(asked, Server).items()]
    findings += [_package(package, stages_) for package, stages_ in _of(asked, Package).items()]
    return findings + [_memory(memory, stages_) for memory, stages_ in _of(asked, Memory).items()]


def _of(asked: Mapping[Need, list[str]], kind: type) -> dict:
    return {need: stages for need, stages in asked.items() if isinstance(need, kind)}


def _package(package: Package, stages: Sequence[str]) -> Finding:
    what, whose = f"package {package.name}", ", ".join(stages)
    if importlib.util.find_spec(package.name) is None:
        return problem(what, f"it is not installed: pip install {package.install}, for {whose}")
    return ok(what, f"installed, for {whose}")


def _memory(memory: Memory, stages: Sequence[str]) -> Finding:
    here = memory_of(cuda=False)
    what, whose = (
        f"memory of {memory.what}",
        f"{size_text(memory.bytes)} for {', '.join(stages)}; {here.words}",
    )
    return ok(what, whose) if memory.bytes <= here.size else problem(what, f"{whose}: take a larger machine")


def _key(server: Server, stages: Sequence[str]) -> Finding:
    what = f"server {server.url}"
    if server.key is None:
        return ok(what, f"wants no key; asked by {', '.join(stages)}")
    if not os.environ.get(server.key, "").strip():
        return problem(
            what,
            f"the environment variable {server.key} is not set: put the key there for {', '.join(stages)}",
        )
    return ok(
        what,
        f"the key is in {server.key}; asked by {', '.join(stages)}; it may cost",
    )
