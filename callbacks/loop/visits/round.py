"""Round under way: its groups of visits, from the first batch of each to the last, and their results.

A client with several visits in a round contributes after the last one: if a visit diverges, no update of the client has been
aggregated. A client checks for NaN and Inf before it sends.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fedlight.callbacks.loop.parts.part import Part
from fedlight.callbacks.loop.run import Run, clear_gradients, seed_all, visit_row
from fedlight.callbacks.loop.visits.contributions import Contributions, TrainingMetrics
from fedlight.callbacks.loop.visits.local_work import LocalWork
from fedlight.callbacks.loop.visits.visit import (
    Exchange,
    OpenGroup,
    OpenVisit,
    call_on_visit_start,
    refuse_lost_model,
    use_adapter,
)
from fedlight.federation.algorithm import changes_gradients
from fedlight.federation.client import Client, Group, Visit, Visiting, Work
from fedlight.federation.state import DIVERGED, Diverged, State, write


@dataclass
class OpenRound:
    """Round under way as the loop keeps it.

    Attributes:
        run: the run, with the module and the parts.
        opened: federated parameters before the round.
        state: federated parameters at the first visit; callbacks may have changed them when the epoch started.
        last: client id -> its last visit so far, of clients that have more visits in the round.
        memories: client id -> its memory before the round, of clients with several visits.
        saved: ids of the clients whose memories the visits have saved, in their order.
    """

    run: Run
    opened: State
    state: State
    exchange: Exchange
    contributions: Contributions
    training: TrainingMetrics = field(default_factory=TrainingMetrics)
    last: dict[str, Visiting] = field(default_factory=dict)
    memories: dict[str, dict[str, Any]] = field(default_factory=dict)
    saved: dict[str, None] = field(default_factory=dict)

    def opened_with(self, state: State) -> State:
        """Return ``state``, read after the callbacks of the epoch start, without their changes."""
        return {
            name: value
            if name not in self.state or torch.equal(value, self.state[name])
            else self.state[name]
            for name, value in state.items()
        }

    def open_group(self, visits: Group) -> OpenGroup:
        """Send their messages to the clients of a group, whose visits `begin_group` begins."""
        return OpenGroup([self._receive(visit) for visit in visits], LocalWork(()))

    def begin_group(self, group: OpenGroup, batch: Any) -> None:
        """Put the start parameters of a group's clients into the module."""
        run, module = self.run, self.run.lightning_module
        visits = [open_visit.visiting.visit for open_visit in group.visits]
        first = group.visits[0].visiting
        use_adapter(module, first)
        buffers = run.buffers.start_visit(first.client.memory, self.state, run.parameters)
        write(first.start | buffers, run.parameters)
        clear_gradients(module)
        run.devices.enter(visits[0])
        for part in run.parts_with(Part.enter):
            part.enter(run, group, batch)
        seed_all(
            run.seed, "visit", run.round_idx, *(purpose for visit in visits for purpose in visit.purpose)
        )
        group.work = LocalWork(run.optimizers, changes_gradients(run.algorithm), group.forward)
        self.training.start(module)
        for visit in visits:
            call_on_visit_start(run.trainer, module, visit.client_id)

    def _receive(self, visit: Visit) -> OpenVisit:
        """Send the algorithm's message at the start of a visit."""
        run, name = self.run, visit.client_id
        schedule = run.planned.schedule
        client = replace(run.clients[name], memory=run.memory.load(name))
        if schedule.is_first(visit) and not schedule.is_last(visit):
            self.memories[name] = run.memory.load(name)
        visiting, bytes_down = self.exchange.down(visit, client, self.last.get(name))
        return OpenVisit(visiting, {name: run.parameters[name] for name in visiting.start}, bytes_down)

    def end_group(self, group: OpenGroup) -> None:
        """Send the clients' replies after the last batch of a group, whose work has ended."""
        run, module = self.run, self.run.lightning_module
        trained = group.unstack()
        if trained:
            run.buffers.trained()  # none of a group's has changed, or this is refused
        metrics = self.training.take(module, len(group.visits))
        for place, open_visit in enumerate(group.visits):
            if trained:  # as if the client had trained alone
                use_adapter(module, open_visit.visiting)
                write(trained[place], run.parameters)
                open_visit.trained = trained[place]
            self.training.add(open_visit.visiting.client.id, metrics[place])
            self._finish_visit(group, open_visit, group.work.done(place, open_visit.parameters))
            self.exchange.call_on_upload(run.trainer.callbacks)  # type: ignore[attr-defined]

    def _finish_visit(self, group: OpenGroup, open_visit: OpenVisit, work: Work) -> None:
        run, visiting, visit, reason = self.run, open_visit.visiting, open_visit.visiting.visit, ""
        num_examples = run.num_examples(visit)
        for part in run.parts_with(Part.leave):
            part.leave(run, group, open_visit)
        self.last[visit.client_id] = visiting
        try:
            self._contribute(group, open_visit, work, num_examples)
        except Diverged as error:
            self._leave_out(visiting, work, error)
            reason = DIVERGED
        if run.planned.schedule.is_last(visit):
            del self.last[visit.client_id]
        sent = open_visit.bytes_down, open_visit.bytes_up
        row = visit_row(run.round_idx, visit, num_examples, work, *sent, reason, visiting.lora_rank)
        run.records.append(run.devices.visited(visit, row))
        for part in run.parts_with(Part.visited):
            part.visited(run)

    def _contribute(self, group: OpenGroup, open_visit: OpenVisit, work: Work, num_examples: int) -> None:
        run, visiting = self.run, open_visit.visiting
        self.contributions.refuse_left_out(visiting.client.id)
        buffers = run.buffers.trained() if open_visit.trained is None else {}
        update, open_visit.bytes_up = self.exchange.up(visiting, open_visit.read(), work)
        for part in run.parts_with(Part.weighed):
            update = None if update is None else part.weighed(group, visiting.visit, update)
        self.contributions.add(visiting.visit, update, buffers, num_examples)
        run.buffers.keep(visiting.client.memory, buffers)
        run.buffers.end_visit()
        self._save(visiting.client)

    def _leave_out(self, visiting: Visiting, work: Work, error: Diverged) -> None:
        """Leave a client out of the round; its memory is that from before the round."""
        run, name = self.run, visiting.client.id
        self.training.leave_out(name)
        run.buffers.end_visit()
        write(self.state, run.parameters)
        run.algorithm.reply(visiting, visiting.start, work)  # its further visits may need the effect
        if name in self.contributions.diverged:
            return
        self.contributions.leave_out(name, error)
        if name in self.memories:
            self._save(replace(run.clients[name], memory=self.memories[name]))
        for row in run.records:
            if row["client"] == name:
                row.update(reason=DIVERGED, loss="")

    def finish(self, hints: Mapping[str, Any]) -> dict[str, float]:
        """Combine the visits' updates, step the server, and write the new model; return the parts' metrics."""
        run = self.run
        for part in run.parts_with(Part.end_visits):
            part.end_visits(run, self)
        seed_all(run.seed, "server", run.round_idx)
        movement = run.algorithm.finish_round(self.contributions.result(hints))
        metrics: dict[str, float] = {}
        for part in run.parts_with(Part.finish_round):
            metrics |= part.finish_round(run, self, movement)
        state = run.server.step(self.state, movement)
        refuse_lost_model(state, run.round_idx, run.server)
        for part in run.parts_with(Part.after_step):
            part.after_step(run, state)
        write(state, run.parameters)
        run.buffers.close_round()
        return metrics

    def _save(self, client: Client) -> None:
        self.run.memory.save(client.id, client.memory, self.run.round_idx)
        self.saved[client.id] = None
