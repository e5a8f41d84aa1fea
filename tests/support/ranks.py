"""Work in several processes under the strategy ``client_parallel``: forks, because importing torch anew takes longer."""

import contextlib
import logging
import os
import pickle
import signal
import socket
import sys
import time
import traceback

import torch


def run_ranks(size, work, folder, seconds=120):
    """Run ``work(rank)`` in ``size`` processes at once, and return their results in the order of the ranks.

    What they print goes to ``folder/RANK.log``, which is in the error if one of them ends by another way.
    """
    folder.mkdir(parents=True, exist_ok=True)
    children = start_ranks(size, work, folder)
    codes = wait_for(children, seconds)
    if any(codes):
        logs = "\n".join(f"--- {rank}: {log_of(folder, rank)}" for rank in range(size))
        raise AssertionError(f"processes ended with {codes}\n{logs}")
    return [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(size)]


def start_ranks(size, work, folder):
    """Begin ``work(rank)`` in ``size`` processes, and return their ids."""
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return [_start(rank, size, port, work, folder) for rank in range(size)]


def _start(rank, size, port, work, folder):
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        # its pool is lost in a fork; two threads at once cannot renew it
        torch.set_num_threads(torch.get_num_threads())
        place = {"LOCAL_RANK": rank, "NODE_RANK": 0, "WORLD_SIZE": size, "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")
        with (folder / f"{rank}.log").open("w", buffering=1) as log:
            os.dup2(log.fileno(), 2)
            _log_to(log)
            with contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
                try:
                    (folder / f"{rank}.pickle").write_bytes(pickle.dumps(work(rank)))
                    code = 0
                except BaseException:
                    traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _log_to(log):
    """Write each message of Lightning there once, whatever other tests have done to its loggers in this process."""
    logging.disable(logging.NOTSET)
    logger, names = logging.getLogger("lightning.pytorch"), [*logging.root.manager.loggerDict]
    for each in (logging.getLogger(name) for name in names if name.startswith(f"{logger.name}.")):
        each.disabled = False
        each.setLevel(logging.NOTSET)
    logger.setLevel(logging.INFO)
    # Those of Lightning's import, here or in the logger above, may write to stderr, which is this log.
    logger.handlers, logger.propagate = [logging.StreamHandler(log)], False


def wait_for(children, seconds):
    """Return the exit codes of processes, of a killed one the negative signal; kill what is left after ``seconds``."""
    codes, until = {}, time.monotonic() + seconds
    while len(codes) < len(children):
        for child in children:
            if child not in codes:
                ended, status = os.waitpid(child, os.WNOHANG)
                if ended:
                    codes[child] = os.waitstatus_to_exitcode(status)
        if time.monotonic() > until:
            for child in children:
                if child not in codes:
                    os.kill(child, signal.SIGKILL)
        time.sleep(0.01)
    return [codes[child] for child in children]


def log_of(folder, rank):
    """Return what a process has printed."""
    return (folder / f"{rank}.log").read_text()
