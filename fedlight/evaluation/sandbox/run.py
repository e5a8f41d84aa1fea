"""Runs Python code that nobody has read, a model's for example, where it can do no harm.

The code has a process, an empty environment and an empty folder to itself. It can read the standard library, the system's
shared libraries and that folder, write to that folder (no sub-folders, no links), and nothing else: no other file, no
network, no further process or thread, no signals, no installed packages, neither by import nor by opening their files.
See `Limits` for time, memory and files. Linux 5.13 or later; neither root nor a container.

It is no protection against faults of the kernel or the processor, nor against looking whether a known path exists (stat).
"""

import tempfile
from contextlib import ExitStack
from pathlib import Path

from fedlight.evaluation.sandbox.limits import Limits, Result
from fedlight.evaluation.sandbox.process import SandboxedProcess, watch
from fedlight.evaluation.sandbox.protection import protection


def run_python(code: str, limits: Limits | None = None, unprotected: bool = False) -> Result:
    r"""Runs code as ``__main__``, without input, and waits for its end.

    ``finished`` means that the end was reached: neither ``os._exit(0)`` nor anything printed looks like it. Code that goes
    looking in its own process for how that is told can still claim it: `check_function` says whether a function is right.

    Args:
        code: a program.
        limits: what it may use; None: the defaults of `Limits`.
        unprotected: leave files, network and processes open to the code. Only where nothing can be lost.

    Raises:
        SandboxError: this machine cannot lock up a process, or the process could not be started.

    Example:
        >>> from fedlight.evaluation.sandbox.protection import missing_protection
        >>> result = run_python("print(6 * 7)", unprotected=missing_protection() is not None)
        >>> result.outcome, result.stdout
        ('finished', '42\n')
    """
    limits = limits or Limits()
    with ExitStack() as stack:
        process = start(stack, code, limits, unprotected, name="__main__")
        return process.result(watch([process]))


def start(
    stack: ExitStack,
    code: str,
    limits: Limits,
    unprotected: bool,
    name: str,
    modules: dict[str, str] | None = None,
    pipes: tuple[int, ...] = (),
) -> SandboxedProcess:
    """Starts code in a folder of its own; leaving the stack ends the process and removes the folder."""
    folder = tempfile.TemporaryDirectory(prefix="fedlight-sandbox-", ignore_cleanup_errors=True)
    stack.enter_context(folder)
    place = Path(folder.name).resolve()
    locks = {} if unprotected else protection(place)
    process = SandboxedProcess(code, limits, locks, place, modules or {}, name, pipes)
    stack.callback(process.close)
    return process
