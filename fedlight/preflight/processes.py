"""Check of ``--processes N``: which stages the processes share, and which run in one."""

from collections.abc import Sequence

from fedlight.preflight.finding import Finding, ok, problem
from fedlight.recipes.followers import for_processes
from fedlight.recipes.stages import Stage


def check_shared(stages: Sequence[Stage], processes: int) -> list[Finding]:
    """Return a finding for the stages that the processes share, one for each reason to run others in one process.

    A stage whose config has a strategy of its own is a problem. A config that cannot be read is another check's.
    """
    shared: list[str] = []
    alone: dict[str, list[str]] = {}
    findings: list[Finding] = []
    for stage in stages:
        try:
            why = stage.why_one_process()
        except ValueError:
            continue
        if why is not None:
            alone.setdefault(why, []).append(stage.name)
            continue
        shared.append(stage.name)
        try:
            for_processes(stage.config(), processes, stage.name)
        except ValueError as error:
            findings.append(problem(f"processes of {stage.name}", str(error)))
    named = "1 process" if processes == 1 else f"{processes} processes"
    findings.append(ok(named, f"one thread each on the CPU, for {', '.join(shared) or 'no stage'}"))
    return findings + [ok("one process", f"for {', '.join(names)}: {why}") for why, names in alone.items()]
