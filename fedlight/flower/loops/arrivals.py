"""Buffered rounds of a deployment: the server steps with the updates that have arrived, on the real clock.

The schedule and the step are those of the emulator (`fedlight.callbacks.loop.parts.buffered`); what ends when is told by the
nodes. The server sends a separate message to each client, so updates arrive one by one. A visit has the rates and random
numbers of the round that asks the client, and its movement is relative to the model in the message.

Messages do not survive the server: a checkpoint names the clients at work, and the next server counts them as dropped.
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import inf
from typing import Any

from fedlight.callbacks.loop.parts.buffered import Buffered, columns_of
from fedlight.callbacks.loop.round_table import Record
from fedlight.callbacks.loop.run import Run
from fedlight.callbacks.loop.visits.round import RoundSchedule
from fedlight.federation.asynchronous.schedule import Assignment
from fedlight.federation.client import Client, State, Visit
from fedlight.flower.loops.replies import Arrived, Sent
from fedlight.flower.loops.server_data import ABSENT, DROPPED
from fedlight.flower.nodes import Letter

STOPPED = f"{DROPPED}: the server stopped while it was at work"
"""Reason of a client whose answer no server waits for any more."""


class Arrivals(Buffered):
    """Server steps of `FedBuff` with updates that arrive from nodes.

    The ``loop`` is the `ServerLoop`, whose module imports this one.

    Attributes:
        outcomes: client whose work has ended in the round -> this work, or why there is none.
        sent: client that was asked and has no outcome of an earlier round -> its visits.
    """

    on_real_devices = True

    def __init__(self, loop: Any) -> None:
        super().__init__(loop.fleet.buffered, loop.clients_per_round, loop.seed)
        self._loop = loop
        self.outcomes: dict[str, Arrived | str] = {}
        self.sent: dict[str, Sent] = {}
        self._letters: dict[str, Letter] = {}
        self._waiting: dict[str, Arrived | str] = {}

    @property
    def round_end_seconds(self) -> float:
        """Seconds of the run's work until the last server step."""
        return self._planned.end_seconds

    def attach(self, run: Run) -> None:
        """Start the clock, which goes on from a checkpoint's time."""
        self._zero = time.monotonic() - self._loop.virtual_seconds

    def plan(self, *_: Any) -> list[Visit]:
        """Return no visits: whose updates arrive is known when the round is over."""
        return []

    def collect(self, state: State) -> None:
        """Have nodes work until a server step can be made, from the newest model; put its clients into the planner."""
        loop, planner, round_idx = self._loop, self._loop._rounds, self._loop.rounds_done
        self.sent = {job.client_id: self.sent[job.client_id] for job in self._at_work}

        def ask(names: list[str], at: float) -> Iterator[Assignment]:
            homes = {name: node for node, there in loop.nodes.homes(names).items() for name in there}
            planned = planner.visits_of(round_idx, [self._clients[name] for name in names])
            for name in dict.fromkeys(visit.client_id for visit in planned):
                if name not in homes:
                    yield Assignment(name, round_idx, at, at, ABSENT)
                    continue
                visits = [replace(visit, asked=round_idx) for visit in planned if visit.client_id == name]
                sent, parcel = loop.message_to([name], visits, state)
                self.sent |= sent
                self._letters[name] = loop.nodes.send("visit", homes[name], parcel)
                yield Assignment(name, round_idx, at, inf)

        begun, at_work = self._ended([*self._at_work], wait=False)  # they have gone on since the last step
        step = self._step = self._next_step(
            round_idx, begun, at_work, ask=ask, idle_seconds=0.0, wait=self._ended
        )
        ended = (*step.dropouts, *step.arrivals)
        self.outcomes = {job.client_id: self._waiting.pop(job.client_id, job.reason) for job in ended}
        arrived = [self.sent[job.client_id] for job in step.arrivals]
        groups = [(visiting.visit,) for sent in arrived for visiting in sent.visitings]
        planner.everything = RoundSchedule(groups, planner.accumulation(round_idx))
        planner.cohort = sorted((self._clients[sent.client.id] for sent in arrived), key=lambda c: c.id)

    def _ended(self, busy: list[Assignment], wait: bool = True) -> tuple[float, list[Assignment]]:
        """Return the time, and the assignments as they are now; with ``wait``, at the next answer."""
        letters = {job.client_id: self._letters[job.client_id] for job in busy if job.end_seconds == inf}
        answers = self._loop.nodes.answers(letters, wait)
        now = time.monotonic() - self._zero
        for name, answer in answers.items():
            del self._letters[name]
            self._waiting |= self._loop.read(answer, {name: self.sent[name]})

        def as_it_is(job: Assignment) -> Assignment:
            if job.client_id not in answers:
                return job
            outcome = self._waiting[job.client_id]
            return replace(job, end_seconds=now, reason=outcome if isinstance(outcome, str) else "")

        return now, [as_it_is(job) for job in busy]

    def columns(self, client_id: str) -> Record:
        """Return the further columns of a client's rows in the round."""
        step = self._planned
        return next(
            columns_of(job, step) for job in (*step.dropouts, *step.arrivals) if job.client_id == client_id
        )

    def _spent(self) -> dict[str, float]:
        at_work = [job.client_id for job in self._planned.at_work]
        there = [outcome for name in at_work if isinstance(outcome := self._waiting.get(name), Arrived)]
        return {
            "bytes_down": float(sum(sum(self.sent[name].bytes_down) for name in at_work)),
            "bytes_up": float(sum(sum(arrived.bytes_up) for arrived in there)),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the clients at work with the bytes that they have received; no answer of theirs reaches another server."""
        bytes_down = {job.client_id: sum(self.sent[job.client_id].bytes_down) for job in self._at_work}
        return super().state_dict() | {"models": {}, "bytes_down": bytes_down}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Count the clients at work as dropped."""
        super().load_state_dict(state)
        self._waiting = {}
        self._at_work = tuple(replace(job, end_seconds=0.0, reason=STOPPED) for job in self._at_work)
        for name, num_bytes in state.get("bytes_down", {}).items():
            self.sent[name] = Sent(Client(name, 1, 1.0), [], bytes_down=[num_bytes])
