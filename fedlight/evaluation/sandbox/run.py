"""Runs of untrusted Python code, a model's for example, and tests of a function in such code.

The code has its own process, an empty environment and an empty folder. It can read the standard library, the system's
shared libraries and that folder, and write to that folder (no sub-folders, no links). It has nothing else: no other file,
no network, no further process or thread, no signals, no installed packages, neither by import nor by opening their files.
`Limits` bounds time, memory and files. This needs Linux 5.13 or later, and neither root nor a container. It does not
protect from faults of the kernel or the processor, and does not hide whether a known path exists (stat).

Code and tests of `check_function` run in two processes, both in the sandbox, and the tests call the function through a pipe
(calls.py). In one process the code could always pass: by ending it early, by returning an object that equals everything, or
by changing objects that the tests use. Here only plain values come back, and the code sees neither tests nor verdict.
"""

import os
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from fedlight.evaluation.sandbox import calls
from fedlight.evaluation.sandbox.process import Limits, Outcome, Result, SandboxedProcess, watch
from fedlight.evaluation.sandbox.protection import protection
from fedlight.support.files import temporary_folder

MODULE = "sandbox_calls"
END_SECONDS = 1.0


class Check(NamedTuple):
    """Verdict of tests.

    Attributes:
        passed: whether the tests ran to their end.
        outcome: of the code if its process ended first, else of the tests; see `Result`.
        detail: last line that this process wrote to stderr, empty without one.
        seconds: wall-clock time.
    """

    passed: bool
    outcome: Outcome
    detail: str
    seconds: float


def run_python(code: str, limits: Limits | None = None, unprotected: bool = False) -> Result:
    r"""Run code as ``__main__``, without input, and wait for its end.

    ``finished`` means that the code reached its end: neither ``os._exit(0)`` nor printed text can fake it. Code that
    searches its own process for the way to report it still can: `check_function` tests whether a function is right.

    Args:
        code: a program.
        limits: None: the defaults of `Limits`.
        unprotected: leave files, network and processes open to the code. Only for a machine that you can afford to lose.

    Raises:
        SandboxError: this machine cannot protect itself from a process, or the process could not be started.

    Examples:
        >>> from fedlight.evaluation.sandbox.protection import missing_protection
        >>> result = run_python("print(6 * 7)", unprotected=missing_protection() is not None)
        >>> result.outcome, result.stdout
        ('finished', '42\n')
    """
    limits = limits or Limits()
    with ExitStack() as stack:
        process = _start(stack, code, limits, unprotected, name="__main__")
        return process.result(watch([process]))


def check_function(
    code: str,
    function: str,
    tests: str,
    prelude: str = "",
    limits: Limits | None = None,
    unprotected: bool = False,
) -> Check:
    """Run tests against a function.

    Args:
        code: defines the function; not trusted.
        function: name of the function.
        tests: a program that calls the function by its name and raises if it is wrong. Trusted: it decides. Of the code it
            sees only this function, whose arguments and results must be plain values (calls.py).
        prelude: imports and helpers that the tests need before the function gets its name. Trusted as well.
        limits: of each of the two processes; None: the defaults of `Limits`.
        unprotected: see `run_python`.

    Raises:
        SandboxError: see `run_python`.

    Examples:
        >>> from fedlight.evaluation.sandbox.protection import missing_protection
        >>> unprotected = missing_protection() is not None
        >>> check_function("def double(x): return 2 * x", "double", "assert double(3) == 6", unprotected=unprotected).passed
        True
        >>> check_function("import os; os._exit(0)", "double", "assert double(3) == 6", unprotected=unprotected).passed
        False
    """
    limits = limits or Limits()
    modules = {MODULE: Path(calls.__file__).read_text(encoding="utf-8")}
    with ExitStack() as stack:
        ends = ExitStack()
        with ends:  # afterwards only the processes hold the pipes, and each notices when the other has ended
            (asked, asks), (answered, answers) = _pipe(ends), _pipe(ends)
            serving = f"{code}\n\nimport {MODULE}\n{MODULE}.serve({function}, {asked}, {answers})\n"
            asking = (
                f"{prelude}\nimport {MODULE}\n{function} = {MODULE}.Remote({asks}, {answered})\n{tests}\n"
            )
            judge = _start(stack, asking, limits, unprotected, "tests", modules, (asks, answered))
            judged = _start(stack, serving, limits, unprotected, "code", modules, (asked, answers))
        stopped = watch([judge, judged])
        verdict = judge.result(stopped)
        blamed = verdict if stopped else _failed_result(verdict, judged)
    lines = blamed.stderr.strip().splitlines()
    return Check(verdict.outcome == "finished", blamed.outcome, lines[-1] if lines else "", verdict.seconds)


def _failed_result(verdict: Result, judged: SandboxedProcess) -> Result:
    """Return the code's own result if it ended before the tests."""
    if watch([judged], at_most_seconds=END_SECONDS):  # without further calls it ends as well
        return verdict
    code_result = judged.result(None)
    # Where the code failed, the tests report only an end of file.
    return verdict if code_result.outcome == "finished" else code_result


def _start(
    stack: ExitStack,
    code: str,
    limits: Limits,
    unprotected: bool,
    name: str,
    modules: dict[str, str] | None = None,
    pipes: tuple[int, ...] = (),
) -> SandboxedProcess:
    place = stack.enter_context(temporary_folder("fedlight-sandbox")).resolve()
    locks = {} if unprotected else protection(place)
    process = SandboxedProcess(code, limits, locks, place, modules or {}, name, pipes)
    stack.callback(process.close)
    return process


def _pipe(stack: ExitStack) -> tuple[int, int]:
    reads, writes = os.pipe()
    stack.callback(os.close, reads)
    stack.callback(os.close, writes)
    return reads, writes
