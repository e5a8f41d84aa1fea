"""Sandbox: runs a model's code in a process without rights and with limits on time, memory and files.

It imports no other part of fedlight. ``process`` starts and watches a process, ``inside`` is its first program,
``protection`` its order, and ``seccomp`` the order's filter of system calls.
"""

from fedlight.evaluation.sandbox.process import Limits, Result, SandboxError
from fedlight.evaluation.sandbox.protection import missing_protection
from fedlight.evaluation.sandbox.run import Check, check_function, run_python

__all__ = ["Check", "Limits", "Result", "SandboxError", "check_function", "missing_protection", "run_python"]
