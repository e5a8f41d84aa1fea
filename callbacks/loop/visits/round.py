"""Round under way: its groups of visits, from first to last batch, and their contributions.

`RoundSchedule` says when groups begin and end. `Contributions` and `TrainingMetrics` sum updates and metrics over the visits
of all processes. A client with several visits in a round contributes after the last one: if a visit diverges, no update of
the client has been aggregated. A client checks for NaN and Inf before it sends.
"""

import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain
from statistics import median
from typing import Any, Protocol, runtime_checkable

import lightning as L
import torch

from fedlight.callbacks.loop.parts.buffers import BufferPolicy, Buffers
from fedlight.callbacks.loop.parts.part import Part
from fedlight.callbacks.loop.run import Run, clear_gradients, seed_all, visit_row
from fedlight.callbacks.loop.visits.visit import (
    Exchange,
    LocalWork,
    OpenGroup,
    OpenVisit,
    call_on_visit_start,
    refuse_lost_model,
    use_adapter,
    use_first_adapter,
)
from fedlight.federation.algorithm import Aggregation, changes_gradients, pieces_of
from fedlight.federation.client import (
    DIVERGED,
    Client,
    Diverged,
    Group,
    State,
    Update,
    Visit,
    Visiting,
    Work,
    write,
)


class RoundSchedule:
    """Groups of visits of one round in training order, by the numbers of their batches.

    Args:
        accumulation: batches of an optimizer step.

    Attributes:
        begins: number of its first batch -> group of visits that are trained side by side.
        ends: numbers of the batches before which a group has ended.
        num_batches: batches of the round; of one optimizer step without visits.
        visits: visits of the groups, in their order.

    Raises:
        ValueError: a visit ends inside an optimizer step.

    Examples:
        >>> schedule = RoundSchedule([(Visit("a", 2), Visit("b", 2)), (Visit("c", 3),)], accumulation=1)
        >>> list(schedule.begins), sorted(schedule.ends), schedule.num_batches
        ([0, 2], [2, 5], 5)
    """

    def __init__(self, groups: Sequence[Group], accumulation: int) -> None:
        self.accumulation = accumulation
        visits = [visit for group in groups for visit in group]
        for visit in visits:
            if visit.num_batches % accumulation:
                raise ValueError(
                    f"a visit of {visit.num_batches} batches is no multiple of trainer.accumulate_grad_batches="
                    f"{accumulation}: one optimizer step would mix two clients"
                )
        # Visits of a group are equally long.
        ends = list(accumulate(group[0].num_batches for group in groups))
        self.begins = dict(zip([0, *ends[:-1]], groups, strict=True)) if groups else {}
        self.ends = set(ends)
        self.visits = visits
        self._last = {visit.client_id: visit for visit in visits}
        # The last entry of a key counts, here the first visit.
        self._first = {visit.client_id: visit for visit in reversed(visits)}
        self.num_batches = ends[-1] if ends else accumulation  # Lightning ends a run at an empty epoch

    @property
    def clients(self) -> list[str]:
        """Ids of the clients that are visited, in the order of their last visits."""
        return [*self._last]

    def is_first(self, visit: Visit) -> bool:
        """Return whether a visit is the first of its client in the round."""
        return self._first[visit.client_id] is visit

    def is_last(self, visit: Visit) -> bool:
        """Return whether a visit is the last of its client in the round."""
        return self._last[visit.client_id] is visit


def refuse_other_accumulation(now: int, planned: int) -> None:
    """Raise ``ValueError`` if a callback has changed the batches of an optimizer step after they were planned."""
    if now != planned:
        raise ValueError(
            f"trainer.accumulate_grad_batches is {now}, but the visits of this round were planned with {planned}: change it "
            "with Lightning's GradientAccumulationScheduler, which says beforehand what it will be"
        )


logger = logging.getLogger("fedlight")


class Contributions:
    """Contributions of a round's clients, each as a whole.

    Attributes:
        aggregation: combination of their updates.
        diverged: client that is left out -> the reason.

    Args:
        schedule: visits of this process.
        clients: clients with visits in any process.
        reported: whether clients that may lie say that they have diverged: a round of such clients alone is an empty one.
    """

    def __init__(
        self,
        round_idx: int,
        aggregation: Aggregation,
        buffers: BufferPolicy,
        schedule: RoundSchedule,
        clients: Sequence[str],
        reported: bool = False,
    ) -> None:
        self.diverged: dict[str, str] = {}
        self._clients, self._reported = clients, reported
        self._round_idx = round_idx
        self.aggregation = aggregation
        self._buffers = buffers
        self._schedule = schedule
        self._waiting: dict[str, list[tuple[Update, Buffers, int]]] = {}

    def refuse_left_out(self, client_id: str) -> None:
        """Raise `Diverged` for a client with an earlier visit in the round that diverged."""
        if client_id in self.diverged:
            raise Diverged(self.diverged[client_id])

    def add(self, visit: Visit, update: Update | None, buffers: Buffers, num_examples: int) -> None:
        """Add a visit's update and buffers; they count once the client's last visit of the round is done."""
        if update is not None:
            self._waiting.setdefault(visit.client_id, []).append((update, buffers, num_examples))
        # A later visit may still diverge, and then none of the client counts.
        if self._schedule.is_last(visit):
            for each, changed, examples in self._waiting.pop(visit.client_id, []):
                self.aggregation.add(each)
                self._buffers.add(changed, examples)

    def leave_out(self, client_id: str, error: Diverged) -> None:
        """Leave a client out of the round, with the updates of all its visits."""
        self.diverged.setdefault(client_id, str(error))
        self._waiting.pop(client_id, None)

    def pieces(self) -> Iterator[dict[str, Any]]:
        """Start anew, and return the contributions in this process so far in pieces, as tensors and plain values."""
        diverged, self.diverged = self.diverged, {}
        updates = enumerate(pieces_of(self.aggregation))
        return ({"updates": update, "diverged": {} if number else diverged} for number, update in updates)

    def merge(self, partials: Sequence[Mapping[str, Any]]) -> None:
        """Add `pieces` of any of the processes."""
        diverged = dict(self.diverged)
        for partial in partials:
            self.aggregation.merge(partial["updates"])
            diverged |= partial["diverged"]
        # In the order of the plan, whatever the order of the processes.
        self.diverged = {name: diverged[name] for name in self._clients if name in diverged}

    def result(self, hints: Mapping[str, object]) -> State:
        """Return the combined update of the remaining clients; name the others and the settings in ``hints`` in a warning.

        Raises ValueError if all clients have diverged, unless that is `reported`.
        """
        if self.diverged:
            clients = self._clients
            client_id, first = next(iter(self.diverged.items()))
            settings = ", ".join(f"{name}={value}" for name, value in hints.items())
            reason = f"NaN or Inf in what they trained; {client_id}: {first}"
            remedy = (
                f"With {settings}: lower the learning rate, or set trainer.gradient_clip_val to 1.0 or less"
            )
            if len(self.diverged) == len(clients) and not self._reported:
                raise ValueError(
                    f"round {self._round_idx + 1}: all {len(clients)} clients diverged ({reason}), so the run ends with "
                    f"the global model of the round before. {remedy}"
                )
            logger.warning(
                f"round {self._round_idx + 1}: {len(self.diverged)} of {len(clients)} clients diverged and are left out: "
                f"{', '.join(self.diverged)} ({reason}). {remedy}"
            )
        return self.aggregation.result()


@runtime_checkable
class SumsTraining(Protocol):
    """LightningModule that can sum its training metrics over visits, so that nothing is read from the device by batch."""

    def sum_training(self) -> None:
        """Sum the metrics of training batches until `training_sums`, instead of logging each batch."""

    def training_sums(self) -> list[Mapping[str, tuple[float, int]]]:
        """Return sum and number of examples of each metric since `sum_training`, client after client."""


class TrainingMetrics:
    """Training metrics of a round, from modules that sum them over each visit.

    Attributes:
        visits: client id -> metrics of each of its visits: name -> sum over examples and their number.
    """

    def __init__(self) -> None:
        self.visits: dict[str, list[Mapping[str, tuple[float, int]]]] = {}

    def start(self, module: L.LightningModule) -> None:
        """Let the module sum the metrics of the visits that begin."""
        if isinstance(module, SumsTraining):
            module.sum_training()

    def take(self, module: L.LightningModule, num_visits: int) -> list[Mapping[str, tuple[float, int]]]:
        """Return the metrics of each visit that is over, empty ones where the module has none."""
        sums = module.training_sums() if isinstance(module, SumsTraining) else []
        return sums or [{}] * num_visits

    def add(self, client_id: str, metrics: Mapping[str, tuple[float, int]]) -> None:
        """Add the metrics of a visit."""
        self.visits.setdefault(client_id, []).append(metrics)

    def leave_out(self, client_id: str) -> None:
        """Forget the visits of a client that diverged."""
        self.visits.pop(client_id, None)

    def partial(self) -> dict[str, list[Mapping[str, tuple[float, int]]]]:
        """Return the metrics of this process's visits, and start anew."""
        visits, self.visits = self.visits, {}
        return visits

    def merge(self, partials: Sequence[Mapping[str, list[Mapping[str, tuple[float, int]]]]]) -> None:
        """Add the `partial` of all processes: of different clients, or of other rows of the same visits."""
        for partial in partials:
            for client, visits in partial.items():
                self.visits.setdefault(client, []).extend(visits)

    def means(self, reported: bool = False) -> dict[str, float]:
        """Return the mean of each metric over the examples of all visits.

        Where clients that may lie have ``reported`` it, the median of the visits' means, if more than half of the clients
        have it: others could be made up.
        """
        parts: dict[str, list[tuple[float, int]]] = {}
        for metrics in (metrics for visits in self.visits.values() for metrics in visits):
            for name, part in metrics.items():
                parts.setdefault(name, []).append(part)
        if reported:
            senders = Counter(name for each in self.visits.values() for name in {*chain.from_iterable(each)})
            return {
                name: median(total / count for total, count in each)
                for name, each in parts.items()
                if 2 * senders[name] > len(self.visits)
            }
        return {
            # fsum: the order of the visits changes no bit.
            name: math.fsum(total for total, _ in each) / sum(count for _, count in each)
            for name, each in parts.items()
        }


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
        same = {name for name, value in self.state.items() if torch.equal(value, state.get(name, value))}
        return {name: value if name in same else self.state.get(name, value) for name, value in state.items()}

    def open_group(self, visits: Group) -> OpenGroup:
        """Send their messages to the clients of a group, whose visits `begin_group` begins."""
        return OpenGroup([self._receive(visit) for visit in visits])

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
        run.call(Part.enter, group, batch)
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
        client = replace(run.clients[name], memory=run.memory.load(name) if run.memory.in_use else {})
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
        self.last[visit.client_id] = visiting
        try:
            run.call(Part.leave, group, open_visit)
            self._contribute(group, open_visit, work, num_examples)
        except Diverged as error:
            self._leave_out(visiting, work, error)
            reason = DIVERGED
        if run.planned.schedule.is_last(visit):
            del self.last[visit.client_id]
        sent = open_visit.bytes_down, open_visit.bytes_up
        row = visit_row(run.round_idx, visit, num_examples, work, *sent, reason, visiting.lora_rank)
        run.records.append(run.devices.visited(visit, row))
        run.call(Part.visited)

    def _contribute(self, group: OpenGroup, open_visit: OpenVisit, work: Work, num_examples: int) -> None:
        run, visiting = self.run, open_visit.visiting
        self.contributions.refuse_left_out(visiting.client.id)
        buffers = run.buffers.trained() if open_visit.trained is None else {}
        update, open_visit.bytes_up = self.exchange.up(visiting, open_visit.read(), work)
        self.count(group, visiting.visit, update, buffers, num_examples)
        run.buffers.keep(visiting.client.memory, buffers)
        run.buffers.end_visit()
        self._save(visiting.client)

    def count(
        self, group: OpenGroup, visit: Visit, update: Update | None, buffers: Buffers, num_examples: int
    ) -> None:
        """Add what a visit contributes to the round, as the parts weigh it."""
        for part in self.run.parts_with(Part.weighed):
            update = None if update is None else part.weighed(group, visit, update)
        self.contributions.add(visit, update, buffers, num_examples)

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
        use_first_adapter(run.lightning_module)  # which validation meets
        run.call(Part.end_visits, self)
        seed_all(run.seed, "server", run.round_idx)
        movement = run.algorithm.finish_round(self.contributions.result(hints))
        # A layer that was frozen after it had been trained must not follow the momentum of earlier rounds.
        frozen = {name for name, p in run.parameters.items() if not p.requires_grad}
        movement = {n: value for n, value in movement.items() if n not in frozen or bool(value.any())}
        metrics: dict[str, float] = {}
        for part in run.parts_with(Part.finish_round):
            metrics |= part.finish_round(run, self, movement)
        state = run.server.step(self.state, movement)
        refuse_lost_model(state, run.round_idx, run.server)
        run.call(Part.after_step, state)
        write(state, run.parameters)
        run.buffers.close_round()
        return metrics

    def _save(self, client: Client) -> None:
        if client.memory or self.run.memory.in_use:
            self.run.memory.save(client.id, client.memory, self.run.round_idx)
            self.saved[client.id] = None


def wait_for(device: torch.device) -> None:
    """Wait until a device has done all its work: a call returns before a GPU has computed its result."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
