"""The command line in a process of its own that dies where a test wants it to."""

import os
import signal

from tiny_world import fedlight

KILLED, STOPPED, TERMINATED = "killed", "stopped", "terminated"
SIGNALS = {KILLED: signal.SIGKILL, STOPPED: signal.SIGINT, TERMINATED: signal.SIGTERM}
CODES = {KILLED: -signal.SIGKILL, STOPPED: 130, TERMINATED: 143}


class Child:
    """The command in a process of its own: a fork, because importing torch anew would take longer than the run."""

    def __init__(self, arguments, log, prepare=lambda: None):
        self.log = log
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                signal.signal(signal.SIGINT, signal.default_int_handler)
                prepare()
                outcome = fedlight(*arguments)
                log.write_text(outcome.err)
                code = outcome.code
            finally:
                os._exit(code)

    def wait(self):
        _, status = os.waitpid(self.pid, 0)
        return os.waitstatus_to_exitcode(status)


def at(owner, name, when, signum):
    """Has the process send itself a signal right before ``owner.name(...)`` does its work, the first time ``when``."""

    def prepare():
        original = getattr(owner, name)

        def sabotaged(*args, **kwargs):
            if when(*args, **kwargs):
                os.kill(os.getpid(), signum)
            return original(*args, **kwargs)

        setattr(owner, name, sabotaged)

    return prepare
