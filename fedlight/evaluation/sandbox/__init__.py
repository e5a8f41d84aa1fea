"""Sandbox: runs a model's code in a process without rights and with limits on time, memory and files.

It imports nothing of fedlight but a helper for files. ``process`` starts and watches a process, ``inside`` is its first
program, ``protection`` its order with the filter of system calls, ``calls`` the way from the tests to a function.
"""

from fedlight.evaluation.sandbox.process import Limits, Result, SandboxError
from fedlight.evaluation.sandbox.protection import missing_protection
from fedlight.evaluation.sandbox.run import Check, check_function, run_python

__all__ = ["Check", "Limits", "Result", "SandboxError", "check_function", "missing_protection", "run_python"]
