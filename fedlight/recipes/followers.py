"""Processes of ``fedlight run NAME --processes N``: the first one runs the recipe, the others follow it.

A follower is started with the first stage that several processes share and waits for the next one afterwards, since a start
takes seconds. It belongs to the first process's team (`fedlight.processes`) and runs the same Lightning command. It ends
when the first process does, and the recipe ends when a follower does.
"""

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from fedlight.lightning_cli.class_names import last_part
from fedlight.recipes.overlay import set_in

SHARED_STRATEGY = "client_parallel"
SHARED_EVALUATION = ("SFTModule", "SelectorModule", "RewardModule", "DPOModule")
"""Modules whose validation and test batches several processes share; see `fedlight.modules.evaluation`."""
GRACE_SECONDS = 8.0
"""Until the recipe ends when a follower has, unless it fails by itself by the same error."""
STARTED = "from fedlight.recipes.followers import follow; follow()"


def check_processes(number: int | None) -> None:
    """Raise ValueError for a number of processes below 1."""
    if number is not None and number < 1:
        raise ValueError(f"--processes {number} must be at least 1")


def why_one_process(command: str, config: Mapping[str, Any]) -> str | None:
    """Return why a stage runs in one process; None for a stage whose work several processes share.

    Examples:
        >>> why_one_process("fit", {"trainer": {}, "federated": {"class_path": "fedlight.FederatedLoop"}})
        >>> why_one_process("fit", {"trainer": {}})
        'it trains without `federated`, so there are no clients to share out'
    """
    callbacks = (config.get("trainer") or {}).get("callbacks") or []
    classes = {last_part(str(part.get("class_path"))) for part in callbacks if isinstance(part, Mapping)}
    if command == "call":
        return "it is a function"
    if command == "fit":
        has_clients = bool(config.get("federated"))
        return None if has_clients else "it trains without `federated`, so there are no clients to share out"
    if command == "predict":
        shared = "PredictionWriter" in classes
        return None if shared else "it has no PredictionWriter, which puts predictions into order"
    model = str((config.get("model") or {}).get("class_path")).rpartition(".")[2]
    shared = "TaskScores" in classes or model in SHARED_EVALUATION
    return None if shared else f"evaluation is shared by {', '.join(SHARED_EVALUATION)} and by TaskScores"


def for_processes(config: dict[str, Any], number: int, stage: str) -> dict[str, Any]:
    """Return the config of a stage for several processes.

    Raises:
        ValueError: the config sets a strategy or devices.
    """
    trainer = config.get("trainer") or {}
    for name, allowed in (
        ("strategy", ("auto", SHARED_STRATEGY)),
        ("devices", ("auto", 1, "1")),
        ("num_nodes", (1,)),
    ):
        if trainer.get(name) not in (None, *allowed):
            raise ValueError(
                f"stage {stage} has trainer.{name}={trainer[name]}, and --processes {number} shares it by "
                f"trainer.strategy={SHARED_STRATEGY}: leave one of the two out"
            )
    return set_in(set_in(config, "trainer.strategy", SHARED_STRATEGY), "trainer.devices", number)


class Followers:
    """Followers of this process, from their first stage until the block is left.

    Args:
        number: processes of the recipe, this one counted, >= 1; each has one thread of torch, or as many as
            ``OMP_NUM_THREADS``, or ``fedlight --threads``, says.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self._ranks: list[_Follower] = []
        self._environment: dict[str, str] = {}
        self._threads = 0

    def __enter__(self) -> Self:
        import torch

        # The number of threads decides the order of sums, so it must not depend on the number of processes.
        self._threads = torch.get_num_threads()
        torch.set_num_threads(_threads_of_each())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        import torch

        torch.set_num_threads(self._threads)
        if self._ranks:
            from fedlight.processes.joining import leave

            for follower in self._ranks:
                follower.end()
            leave()
            self._ranks = []

    @contextmanager
    def running(self, command: str, file: Path) -> Iterator[None]:
        """Have the followers run a Lightning command with its config while the body runs it in this process."""
        if not self._ranks:
            self._start()  # with the first stage that is shared
        before = {name: os.environ.get(name) for name in self._environment}
        os.environ.update(self._environment | {"RANK": "0", "LOCAL_RANK": "0"})  # the first process
        for follower in self._ranks:
            follower.run(command, file)
        try:
            yield
            for follower in self._ranks:
                follower.wait()
        finally:
            for follower in self._ranks:
                follower.is_needed = False
            for name, value in before.items():
                os.environ.pop(name)
                if value is not None:
                    os.environ[name] = value

    def _start(self) -> None:
        from lightning.fabric.plugins.environments.lightning import find_free_network_port

        # As torchrun does: Lightning then neither starts processes nor asks a cluster.
        number = str(self.number)
        self._environment = {
            "TORCHELASTIC_RUN_ID": "fedlight",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(find_free_network_port()),
            "WORLD_SIZE": number,
            "LOCAL_WORLD_SIZE": number,
            "GROUP_RANK": "0",
            "OMP_NUM_THREADS": str(_threads_of_each()),
            "RANK": "",  # of each process; named here so that `running` restores it
            "LOCAL_RANK": "",
        }
        self._ranks = [_Follower(rank, self._environment) for rank in range(1, self.number)]


def _threads_of_each() -> int:
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    return max(1, int(wanted)) if wanted.isdecimal() else 1


class _Follower:
    """Follower as the first process sees it.

    Attributes:
        is_needed: whether it runs a stage, so that its end is the end of the recipe.
    """

    def __init__(self, rank: int, environment: Mapping[str, str]) -> None:
        self.rank, self.is_needed = rank, False
        self._process = subprocess.Popen(
            [sys.executable, "-c", STARTED],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            start_new_session=True,  # Ctrl-C is for the first process, which ends its followers
            text=True,
        )
        self._finished: queue.Queue[None] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def run(self, command: str, file: Path) -> None:
        """Have it run a stage."""
        self.is_needed = True
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps([command, str(file)]) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # `_listen` says that it has ended

    def wait(self) -> None:
        """Wait until it has finished the stage."""
        self._finished.get()

    def end(self) -> None:
        """End it."""
        self._process.kill()  # it writes no file
        self._process.wait()  # leaves no zombie

    def _listen(self) -> None:
        assert self._process.stdout is not None
        cause = "it was killed"
        for line in self._process.stdout:
            answer = json.loads(line)
            cause = answer.get("error", cause)
            if "error" not in answer:
                self._finished.put(None)
        if not self.is_needed:  # the recipe has ended it
            return
        time.sleep(GRACE_SECONDS)
        if self.is_needed:
            print(
                f"fedlight: process {self.rank} has ended ({cause}), so the recipe ends; the same command goes on from here",
                file=sys.stderr,
                flush=True,
            )
            os._exit(1)  # the main thread may wait for the follower


def follow() -> None:
    """Run the stages that the first process names, until it ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)  # by line: the first process waits for each
    os.dup2(2, 1)  # what libraries print is no answer
    orders: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_read_orders, args=(orders,), daemon=True).start()

    import torch

    from fedlight.lightning_cli.cli import lightning_cli
    from fedlight.support.console import quiet_logs, silence_lightning

    torch.set_num_threads(_threads_of_each())
    with quiet_logs():
        silence_lightning()
        while True:
            command, file = json.loads(orders.get())
            try:
                lightning_cli([command, f"--config={file}"])
            except BaseException as error:
                if os.environ.get("FEDLIGHT_TRACEBACK"):
                    raise
                print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=answers)
                os._exit(1)
            print(json.dumps({"finished": file}), file=answers)


def _read_orders(orders: "queue.Queue[str]") -> None:
    """Take orders until the first process ends; then end this one."""
    for line in sys.stdin:
        orders.put(line)
    os._exit(0)
