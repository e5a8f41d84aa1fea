"""Number of clients that are trained in one batch: as set, or found in a short trial before the first round.

The trial runs forward and backward passes on the first batches of the first round, for 1, 2, 4, ... clients, and
takes the number with most clients a second. It ends where the time of a client grows again, memory would run short, or, with
several processes, one of them would get no client. Two runs may find different numbers, which changes their results by
rounding alone. Weights, random streams and data stay as they are.
"""

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.seed import isolate_rng

from fedlight.callbacks.loop.groups.refusals import check_optimizers, check_run
from fedlight.callbacks.loop.groups.side_by_side import SideBySide
from fedlight.callbacks.loop.parts.part import Part
from fedlight.callbacks.loop.plan import Kind, form_bundles
from fedlight.callbacks.loop.run import LossPerExample, Run, ready
from fedlight.callbacks.loop.visits.round import wait_for
from fedlight.callbacks.loop.visits.visit import OpenGroup
from fedlight.devices.hardware import peak_memory
from fedlight.federation.client import Visit
from fedlight.federation.protocols import StreamsGroups
from fedlight.processes.team import current_team
from fedlight.processes.work import once
from fedlight.stacking import StackedAdapters
from fedlight.support.checks import refuse_below
from fedlight.support.pokes import training_source
from fedlight.support.torch_parts import undisturbed

ClientsAtOnce = int | Literal["auto"]
REPEATS = 3
"""Timed passes of each number of clients, of which the fastest counts."""
WORSE = 1.1
"""Factor on the least time of a client at which more clients are not tried."""
SHARE_OF_MEMORY = 0.7
"""Largest share of the free memory that a group may take: later batches may be longer than the first."""


class AtOnce(Part):
    """Groups of a run: how many clients they have, and the one under way.

    Raises:
        ValueError: the number is below 1.
    """

    def __init__(self, setting: ClientsAtOnce) -> None:
        self._is_auto = setting == "auto"
        self._number: int | None = None
        if setting != "auto":
            refuse_below(1, clients_at_once=setting)
            self._number = setting
        self._groups: SideBySide | None = None
        self._data: object = None

    def check(self, run: Run) -> None:
        """Raise ValueError for a run whose clients cannot be trained side by side; ``auto`` then takes one at a time."""
        try:
            check_run(run.trainer, run.lightning_module, run.data, run.buffers)
        except ValueError as error:
            self._one_at_a_time(error)

    def _one_at_a_time(self, error: ValueError) -> None:
        if not self._is_auto:
            raise error
        self._number = 1
        rank_zero_info(f"clients_at_once=auto: one client at a time. {error}")

    def attach(self, run: Run) -> None:
        """Get ready for groups of clients; raise ValueError for a module that cannot be stacked."""
        if self._number == 1:
            return
        # A second fit may read the same data by another object.
        before = {} if self._groups is None or self._data is not run.data else self._groups.parameters
        self._trainer, self._module, self._data = run.trainer, run.lightning_module, run.data
        try:
            check_optimizers(run.optimizers, run.parameters)
            if [*map(id, before.values())] != [*map(id, run.parameters.values())]:
                assert isinstance(run.data, StreamsGroups)  # see `check`
                self._groups = SideBySide(run.lightning_module, run.parameters, run.data, run.seed)
        except ValueError as error:
            self._one_at_a_time(error)

    def start_round(self, run: Run) -> None:
        self.attach(run)  # callbacks may have changed the trained parameters

    def enter(self, run: Run, group: OpenGroup, batch: Any) -> None:
        if len(group.visits) > 1:
            self.groups.enter([open_visit.visiting for open_visit in group.visits], batch, run.round_idx)
            group.beside = self.groups

    @property
    def groups(self) -> SideBySide:
        """Trainer of groups of several visits."""
        assert self._groups is not None
        return self._groups

    def number(self, visits: Sequence[Visit], kind: Kind, round_idx: int) -> int:
        """Return the most clients of a group in a round with these visits; in several processes it is the same number."""
        if self._number is None:
            bundles = form_bundles(visits, max(1, len(visits)), kind)
            largest = max((bundle[0] for bundle in bundles), key=len, default=())
            if len(largest) < 2:
                return 1  # this round shows nothing
            # More than a process's share would leave other processes without a client.
            share = math.ceil(len(largest) / current_team().size)
            self._number = once(lambda: self._try(largest[:share], round_idx))
        return self._number

    def _try(self, visits: Sequence[Visit], round_idx: int) -> int:
        rates, most = dict[int, float](), len(visits)
        with isolate_rng(), undisturbed(self._module):
            self._module.train()
            for number in (*(2**k for k in range((most - 1).bit_length())), most):  # 1, 2, 4, ... and all
                before = peak_memory(self._module.device, reserved=True) or 0
                try:
                    seconds = self._seconds(visits[:number], round_idx)
                except torch.OutOfMemoryError:
                    break
                except ValueError as error:
                    self._one_at_a_time(error)
                    return 1
                rates[number] = number / seconds
                is_worse = rates[number] * WORSE < max(rates.values())
                # Twice the clients take twice the memory of these, whose own is free again.
                taken = (peak_memory(self._module.device, reserved=True) or 0) - before
                if is_worse or 2 * taken > SHARE_OF_MEMORY * _free(self._module.device):
                    break
        best = max(rates, key=lambda number: rates[number], default=1)
        shown = ", ".join(f"{number}: {rate:.3g}" for number, rate in rates.items())
        rank_zero_info(
            f"clients_at_once=auto: {best} (client steps a second in a trial, by clients at once: {shown})"
        )
        return best

    def _seconds(self, visits: Sequence[Visit], round_idx: int) -> float:
        """Return the time of a forward and backward pass for one batch of each visit."""
        data, module = self._data, self._module
        assert isinstance(data, StreamsGroups)
        assert isinstance(module, LossPerExample)
        data.set_groups([tuple(visits)], round_idx)
        loader: Any = training_source(self._trainer).dataloader()
        batch = ready(module, next(iter(loader)))
        stack = None
        if len(visits) > 1:
            counts = data.next_counts()
            self.groups.compare(batch, counts, [None] * len(visits))
            stack = StackedAdapters(module, self.groups.parameters)
            stack.enter([{}] * len(visits), [None] * len(visits))
        try:
            times = []
            for _ in range(1 + REPEATS):
                if stack is not None:
                    stack.set_rows(counts, None)
                start = time.perf_counter()
                with self._trainer.precision_plugin.forward_context():
                    losses = module.example_losses(batch)
                losses.sum().backward()
                wait_for(module.device)
                times.append(time.perf_counter() - start)
            return min(times[1:])
        finally:
            if stack is not None:
                stack.leave()


def _free(device: torch.device) -> float:
    """Return the free memory of the device in bytes; endless where the system does not say."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    lines = Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").exists() else []
    available = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return float(available[0]) if available else float("inf")
