"""``fedlight run NAME --dry-run``: all checks that are possible before a recipe's first stage.

For the exit codes see `exit_code`. Mostly a check cannot be made because the hub cannot be reached.
"""

import importlib.util
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedlight.preflight.disk import check_disk, check_output
from fedlight.preflight.duration import check_durations
from fedlight.preflight.finding import Finding, State, exit_code, ok, problem, show, unknown
from fedlight.preflight.hub import Hub
from fedlight.preflight.machine import check_shared, memory_of, size_text
from fedlight.preflight.memory import check_memory, trainings
from fedlight.preflight.sources import check_models, check_rows
from fedlight.preflight.stages import check_references, needs, parse_stages
from fedlight.recipes import recipe as recipes
from fedlight.recipes.followers import check_processes
from fedlight.recipes.stages import refuse_tied_votes
from fedlight.support.console import quiet
from fedlight.support.needs import Memory, Model, Need, Package, RowSource, Server


def dry_run(
    name: str,
    seeds: list[int] | None = None,
    output: Path | None = None,
    overrides: list[str] | None = None,
    twin: bool = False,
    processes: int | None = None,
) -> int:
    """Check a recipe, print the findings, and return the exit code; arguments as for `fedlight.recipes.recipe.run`."""
    recipe = recipes.load(name, overrides, twin)
    folder = recipes.folder_of(name, output, twin)
    findings = check(recipe, folder, recipes.seeds_of(recipe, seeds), processes)
    show(f"{Path(name).stem}{', its twin' if twin else ''}: before the run", findings)
    return exit_code(findings)


@quiet()
def check(
    recipe: recipes.Recipe, folder: Path, seeds: Sequence[int], processes: int | None = None
) -> list[Finding]:
    """Run all checks of a recipe, whose results go to ``folder``."""
    check_processes(processes)
    by_seed = {seed: recipes.stages(recipe, folder / f"seed{seed}", seed) for seed in seeds}
    together = recipes.stages_over_seeds(recipe, folder, list(seeds))
    first = seeds[0]
    # The stages of the other seeds differ in the seed alone.
    parsed, findings = parse_stages(by_seed[first])
    over_seeds, others = parse_stages(together)
    # A second "ok" about stages would say nothing new.
    findings += [finding for finding in others if finding.state is State.PROBLEM]
    try:
        refuse_tied_votes(by_seed[first])
    except ValueError as error:
        findings.append(problem("stages", str(error)))
    findings += check_references([*parsed, *over_seeds], [folder / f"seed{first}"])
    stages = [*(stage for of_seed in by_seed.values() for stage in of_seed), *together]
    if processes is not None:
        findings += check_shared([*by_seed[first], *together], processes)
    findings.append(check_output(folder, stages))
    wanted, hub = needs([*parsed, *over_seeds]), Hub()
    rows = check_rows(_of(wanted, RowSource), hub, folder)
    models = check_models(_of(wanted, Model), hub, folder)
    findings += rows.findings + models.findings
    # One line for all names: a hub that does not answer is asked once.
    if unasked := [*dict.fromkeys(rows.unasked), *models.unasked]:
        reason = (
            f"it cannot be reached ({hub.silent}), so nothing is known of {', '.join(unasked)}: check the network, "
            "HF_ENDPOINT and HF_HUB_OFFLINE, or give files and folders instead of names"
        )
        findings.append(unknown("hub", reason))
    trained, uncounted = trainings(parsed, models.configs)
    findings += check_memory(trained) + check_durations(parsed, trained) + uncounted
    findings += check_disk(parsed, trained, folder, len(seeds), models.downloads, rows.downloads, rows.counts)
    checks: dict[type, Any] = {Server: _key, Package: _package, Memory: _memory}
    for kind, checked in checks.items():
        findings += [checked(need, ", ".join(names)) for need, names in _of(wanted, kind).items()]
    return findings


def foretell(file: Path) -> list[Finding]:
    """Return the needs of a config's run on this machine: memory and time; nothing for a model that is not here."""
    recipe = {"stages": {"fit": {"fit": str(file)}}}
    with quiet():
        parsed, _ = parse_stages(recipes.stages(recipe, Path("runs") / file.stem, 0))
        trained, _ = trainings(parsed, {})
    return check_memory(trained) + check_durations(parsed, trained)


def _of(wanted: Mapping[Need, list[str]], kind: type) -> dict:
    return {need: stages for need, stages in wanted.items() if isinstance(need, kind)}


def _package(package: Package, whose: str) -> Finding:
    what = f"package {package.name}"
    if importlib.util.find_spec(package.name) is None:
        return problem(what, f"it is not installed: pip install {package.install}, for {whose}")
    return ok(what, f"installed, for {whose}")


def _memory(memory: Memory, whose: str) -> Finding:
    here, what = memory_of(cuda=False), f"memory of {memory.what}"
    detail = f"{size_text(memory.bytes)} for {whose}; {here.words}"
    if memory.bytes > here.size:
        return problem(what, f"{detail}: take a larger machine")
    return ok(what, detail)


def _key(server: Server, whose: str) -> Finding:
    what = f"server {server.url}"
    if server.key is None:
        return ok(what, f"wants no key; asked by {whose}")
    if not os.environ.get(server.key, "").strip():
        reason = f"the environment variable {server.key} is not set: put the key there for {whose}"
        return problem(what, reason)
    return ok(what, f"the key is in {server.key}; asked by {whose}; it may cost")
