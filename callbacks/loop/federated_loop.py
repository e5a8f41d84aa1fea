"""Federated loop: a Lightning epoch becomes a communication round.

A round is a list of visits; a visit is one run of local training batches at one client. The datamodule streams the round's
batches client after client. This callback finds where visits begin and end, swaps parameters there, calls the algorithm and
lets the server step at the round's last batch. ``max_epochs`` counts rounds; checkpoints, schedulers, early stopping and
loggers keep their meaning.
"""

from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from fedlight.callbacks.loop import guard, optimizers, plan, ranks
from fedlight.callbacks.loop.buffers import Policy, buffer_policy
from fedlight.callbacks.loop.checkpoint import RoundStart, check_what_is_loaded, follow_what_is_saved
from fedlight.callbacks.loop.devices import DeviceEmulation, PayloadSizes
from fedlight.callbacks.loop.forward.forward_visits import ForwardVisits
from fedlight.callbacks.loop.groups.at_once import AtOnce, ClientsAtOnce
from fedlight.callbacks.loop.guard import SameFederation
from fedlight.callbacks.loop.limits import LimitedRounds, Limits
from fedlight.callbacks.loop.modes.buffered import Mode, make_mode
from fedlight.callbacks.loop.plan import RoundPlanner, RoundSchedule
from fedlight.callbacks.loop.round_table import Record
from fedlight.callbacks.loop.run import (
    NoDevices,
    OpensLater,
    PrivacyAccount,
    Run,
    clear_gradients,
    federated_data,
    log_round,
    round_metrics,
    seed_all,
    visit_row,
)
from fedlight.callbacks.loop.visits.contributions import Contributions
from fedlight.callbacks.loop.visits.local_work import LocalWork
from fedlight.callbacks.loop.visits.visit import (
    Exchange,
    OpenGroup,
    OpenRound,
    OpenVisit,
    ParametersLeft,
    adjust_gradients,
    call_again,
    call_modules_own,
    call_on_visit_start,
    refuse_lost_model,
    step_losses,
    use_adapter,
)
from fedlight.devices.fleet import Fleet
from fedlight.devices.memory import Train
from fedlight.federation.aggregation import Aggregation
from fedlight.federation.algorithm import Algorithm, changes_gradients
from fedlight.federation.algorithms.fedavg import FedAvg
from fedlight.federation.asynchronous.fedbuff import FedBuff
from fedlight.federation.channel import Channel, Identity
from fedlight.federation.client import OWN_STATE, Client, Group, Upload, Visit, Visiting, Work, build_clients
from fedlight.federation.client_state import ClientMemories
from fedlight.federation.forward.zeroth_order import ZerothOrder
from fedlight.federation.lora.product_error import ProductError, Setting
from fedlight.federation.lora.ranks import LoraRanks, check_lora_ranks
from fedlight.federation.server import Average, ServerOptimizer
from fedlight.federation.state import DIVERGED, Diverged, State, read, write
from fedlight.processes import strategy  # noqa: F401  Lightning knows client_parallel by name from here on
from fedlight.processes.core_watch import CoreWatch
from fedlight.processes.team import current_team
from fedlight.support.checks import Checked, refuse_below


class FederatedLoop(Checked, L.Callback):
    """Lightning callback that turns an epoch into a communication round over the clients that the data know.

    The federated parameters are those that the optimizer holds when a round begins. ``Trainer(max_epochs=R)`` trains R
    rounds.

    Args:
        algorithm: what clients and server do; FedAvg (unbiased) if not given.
        server: server optimizer; plain averaging if not given.
        clients_per_round: clients sampled in a round, at most the number of clients.
        local_steps: optimizer steps of a visit; None is one pass over all the client's examples.
        channel: compression of what is sent; lossless fp32 if not given.
        aggregation: robust (such as coordinate-wise median) or private combination of updates; None: the algorithm's own.
        memory: store of the clients' memories between rounds; if not given, in RAM up to 256 MiB, then on disk.
        seed: seed of the sampling of clients and of everything random inside a visit.
        fleet: emulated devices of the clients; without a fleet every client trains as this machine does.
        deadline_seconds: end of a round on the devices' virtual clock; clients that finish later are left out.
        over_selection: factor on ``clients_per_round``: so many are asked, and the fastest ``clients_per_round`` count.
        buffers: treatment of buffers that training changes, such as running statistics of a batch norm: ``refuse``,
            ``average`` over the clients of a round, or ``local`` (FedBN); see `fedlight.callbacks.loop.buffers`.
        step_schedule: treatment of learning-rate schedules that step within a round. Every visit starts them where the round
            began; the next round begins where the furthest visit left them (``continue``), or where this one began
            (``restart``); see `fedlight.callbacks.loop.optimizers`.
        clients_at_once: most clients that are trained in one batch, each on an adapter of its own; ``auto`` tries which
            number is fastest; see `fedlight.callbacks.loop.groups`.
        product_error: ``auto``, true or false: log ``fed/product_error``; see `fedlight.federation.lora.product_error`.
        lora_ranks: client or device -> rank of its LoRA adapters, else that of the module; or ranks of which each client has
            the largest that fits its device. For `HetLoRA` and `FlexLoRA`; see `fedlight.federation.lora.ranks`.
        train: ``backprop``; ``forward``, without gradients by ``zeroth_order``; ``auto``, by the first that fits the device.
        zeroth_order: settings of forward-only visits; its defaults if not given.
        mode: ``sync``: a round asks a cohort and waits for it; ``buffered``: a round is a server step with the updates that
            arrive first on the devices' virtual clock, each from the model that its client received; it needs a fleet.
        fedbuff: size of the buffer, clients at a time and weights of stale updates in the mode ``buffered``.
        limits: bounds of one client's part in a round, and of rounds without a client; its defaults if not given.

    Attributes:
        rounds_done: number of rounds with a finished server step.
        visit_records: a row for each finished visit of the current round, and for each client that dropped out of it.
        group: visits under way, side by side; an ended group stays until the next begins or the round is over.
        virtual_seconds: duration of the rounds on the devices' clock; 0 without a fleet.

    Raises:
        ValueError: in ``setup``, before any work, for settings that would cut a round or clients that do not fit.
    """

    planner_type, run_type = RoundPlanner, Run  # others where clients are in other processes: fedlight.flower
    deployed = False  # whether numbers of clients are their words, so that one of them may lie

    def __init__(
        self,
        algorithm: Algorithm | None = None,
        server: ServerOptimizer | None = None,
        clients_per_round: int = 10,
        local_steps: int | None = None,
        channel: Channel | None = None,
        aggregation: Aggregation | None = None,
        memory: ClientMemories | None = None,
        seed: int = 0,
        fleet: Fleet | None = None,
        deadline_seconds: float | None = None,
        over_selection: float = 1.0,
        buffers: Policy = "refuse",
        step_schedule: optimizers.StepSchedule = "continue",
        clients_at_once: ClientsAtOnce = 1,
        product_error: Setting = "auto",
        lora_ranks: LoraRanks | None = None,
        train: Train = "backprop",
        zeroth_order: ZerothOrder | None = None,
        mode: Mode = "sync",
        fedbuff: FedBuff | None = None,
        limits: Limits | None = None,
    ) -> None:
        refuse_below(1, clients_per_round=clients_per_round, local_steps=local_steps)
        self.algorithm = algorithm or FedAvg()
        self.server = server or Average()
        self.clients_per_round, self.local_steps = clients_per_round, local_steps
        self.channel, self.aggregation = channel or Identity(), aggregation
        self.memory = memory or ClientMemories()
        self.seed, self.fleet = seed, fleet
        self.deadline_seconds, self.over_selection = deadline_seconds, over_selection
        self.buffers, self.step_schedule = buffer_policy(buffers), step_schedule
        self.clients_at_once, self.product_error = clients_at_once, product_error
        self.lora_ranks = check_lora_ranks(lora_ranks, self.algorithm, fleet is not None)
        self.train, self.zeroth_order = train, zeroth_order
        self._forward = ForwardVisits(train, zeroth_order, fleet, aggregation)
        self.mode, self.fedbuff, self.limits = mode, fedbuff, limits or Limits()
        self._limits = LimitedRounds(self.limits, self.deployed)
        clock = (fleet, deadline_seconds, over_selection)
        self._mode = make_mode(mode, fedbuff, clients_per_round, seed, *clock)
        self._schedules = optimizers.StepSchedules(step_schedule)
        self._cores, self._loss_scale = CoreWatch(), optimizers.LossScale()
        self._at_once = AtOnce(clients_at_once)
        self._product_error = ProductError(self._mode.product_error(product_error))
        self._left: ParametersLeft | None = None
        self.rounds_done, self.virtual_seconds = 0, 0.0
        self.privacy = PrivacyAccount(aggregation, self.channel)
        self.clients: dict[str, Client] = {}
        self.visit_records: list[Record] = []
        self.group = OpenGroup([], LocalWork(()))
        self._devices = NoDevices()
        self._parameters: dict[str, Tensor] = {}
        self._trained_before: dict[str, bool] = {}
        self._round: OpenRound | None = None
        self._exchange: Exchange | None = None
        self._start, self._federation = RoundStart(self), SameFederation(self)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Check the settings and build the clients, now or when the training data are known."""
        self._federation.trains = stage == "fit"
        check_what_is_loaded(trainer)
        if stage != "fit":
            return
        self._round = None
        guard.refuse_cut_rounds(trainer, self.rounds_done)
        ranks.refuse_uneven(current_team(), trainer)
        self.memory = ranks.own_memories(current_team(), self.memory)
        guard.refuse_own_iteration(pl_module)
        self._forward.check(trainer, pl_module)
        self.buffers.check(self.algorithm, self.aggregation, self.privacy.is_private)
        self._mode.check(trainer, self.algorithm, self.buffers.name, self.privacy.is_private)
        self._data = federated_data(trainer)
        self._at_once.check(trainer, pl_module, self._data, self.buffers.name)
        self.memory.open(str(Path(trainer.default_root_dir) / "clients"))
        follow_what_is_saved(trainer, self.memory, self.state_key)
        guard.refuse_other_data(trainer, isinstance(self._data, OpensLater))
        self._start.reload_in_each_round(trainer)
        plan.plan_behind_checkpoints(trainer, self._plan_round)
        self._start.watch(trainer)
        if isinstance(self._data, OpensLater):
            self._data.when_open(partial(self._meet_clients, trainer))
        else:
            self._meet_clients(trainer)
            self.algorithm.check_settings(self.run_type(trainer, pl_module, self.clients, self))

    def _meet_clients(self, trainer: L.Trainer) -> None:
        self.clients = build_clients(self._data.client_sizes())
        self._mode.meet(self.clients)
        self.privacy.check(number := len(self.clients))
        ranks.refuse_unmergeable(current_team(), self.aggregation or self.algorithm.aggregation(number))
        self._rounds = self.planner_type(
            *(self.algorithm, self._data, self.clients, self.clients_per_round, self.over_selection),
            *(self.local_steps, partial(plan.batches_per_step, trainer), self.seed, self._at_once.number),
            *(self._mode, current_team()),
        )
        self._rounds.outline(self.rounds_done, trainer.accumulate_grad_batches)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Read the optimizers' parameters and plan the first round; a checkpoint is loaded by now."""
        if isinstance(self._data, OpensLater):
            self._data.open()
        self._federation.meet(trainer, self._data)
        team = current_team()
        ranks.same_start(
            team, pl_module, self._federation.settings | ranks.own_settings(team, trainer, self._data)
        )
        optimizers.train_again(pl_module, self._trained_before)
        self._parameters = optimizers.federated_parameters(trainer, pl_module)
        # The optimizers of a checkpoint are loaded later and stay as they were.
        optimizers.use_fused_kernels(trainer.optimizers)
        self._run = self.run_type(trainer, pl_module, self.clients, self)
        self._changes_gradients = changes_gradients(self.algorithm)
        self._optimizers = optimizers.FreshOptimizers()
        self.buffers.attach(pl_module)
        self._run.check(self.algorithm)
        self._at_once.stack(trainer, pl_module, self._parameters, self._data, self.seed)
        self._ranks = ranks.Ranks(current_team(), trainer, self._run, self.memory, self.algorithm)
        if self.fleet is not None:
            steps = self._forward.perturbations, partial(plan.batches_per_step, trainer)
            parts = self.algorithm, self.channel, self.memory, self.clients, self.buffers, *steps
            of = self.fleet, self.deadline_seconds, self.clients_per_round, self.seed, PayloadSizes(*parts)
            self._run.devices = DeviceEmulation(*of, self._run, self.train, self._forward.perturbations)
        self._devices = self._run.devices
        plan.give_lora_ranks(self.algorithm, self.lora_ranks, self._run, self._parameters)
        plan.say_if_over(trainer, self.rounds_done)
        self._plan_round(trainer)
        # If the number of steps was asked for, Lightning has a loader of the visits that setup planned.
        trainer.fit_loop._combined_loader = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Close the epoch of a checkpoint that was taken when its round was over and the epoch was not."""
        if self.rounds_done == trainer.current_epoch + 1:
            plan.close_epoch(trainer)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Open the round; the module holds the global state."""
        plan.refuse_other_epoch(trainer.current_epoch, self.rounds_done, self._rounds.planned)
        seed_all(self.seed, "round", self.rounds_done)
        self.visit_records = self._devices.dropouts(self.rounds_done)
        self._parameters = optimizers.federated_parameters(trainer, pl_module)
        self._run.check(self.algorithm)
        state = read(self._parameters)
        self._round = self._open_round(state, state)
        self._start_algorithm()
        self._ranks.start_round(self.rounds_done, self._rounds, self.visit_records)
        if not self._rounds.schedule.visits:
            plan.skip_batches(pl_module, self.rounds_done, nobody_is_left=not self._rounds.cohort)

    def _start_algorithm(self) -> None:
        self.algorithm.start_round(self.rounds_done, self._rounds.cohort, self._run)

    def begin_batch(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        """Open the visits whose first batch this is, before ``on_train_batch_start`` of all callbacks."""
        if self._round is None:
            guard.refuse_middle_of_epoch(trainer.current_epoch, batch_idx)
        if batch_idx == 0:
            self._round = self._take_in(trainer, module, self._round)
            self._schedules.start_round(trainer, self._rounds.begins)
            if not self._rounds.schedule.visits:  # another process may have some
                self.buffers.enter({}, self._round.state, self._parameters)
                self.buffers.leave()
            self._loss_scale.start_round(trainer, self._changes_gradients)
        if batch_idx in self._rounds.schedule.begins:
            self.refuse_changed()
            self._begin_group(trainer, module, self._round, self._rounds.schedule.begins[batch_idx], batch)
        elif (stacked := self._at_once.under_way) is not None:
            stacked.next_batch(batch)

    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Note that there are gradients for the next optimizer step."""
        self.group.work.backward()

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Let the algorithm change the gradients of the visits under way; a round without visits has none."""
        self.group.work.announce(optimizer)
        if not self._changes_gradients or self.group.work.forward is not None:
            return
        if (stacked := self._at_once.under_way) is not None:
            stacked.adjust_gradients(self.algorithm, optimizer)
            return
        adjust_gradients(self.algorithm, self.group.visits, self._parameters, optimizer)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Close the visit, and the round, whose last batch this was."""
        self._cores.look()
        visits, work = self.group.visits, self.group.work
        ended = [*visits] if batch_idx + 1 in self._rounds.schedule.ends else []
        if visits:
            work.add_losses(step_losses(trainer, outputs))
            self.buffers.after_batch()
        if ended:
            call_modules_own(trainer, pl_module, outputs, batch, batch_idx)
            if not pl_module.automatic_optimization:
                work.refuse_unused_gradients(ended[0].visiting.visit)
            optimizers.refuse_joined(trainer, self._parameters, ended[0].visiting.visit.client_id)
            work.leave(len(ended))
        stacked = self._at_once.under_way if ended else None
        trained = [] if stacked is None else stacked.leave()
        if trained:
            self.buffers.trained()  # none of a group's has changed, or this is refused
        metrics = self._under_way.training.take(pl_module, len(ended)) if ended else []
        for place, one in enumerate(ended):
            if trained:  # as if the client had trained alone
                use_adapter(pl_module, one.visiting)
                write(trained[place], self._parameters)
                one.trained = trained[place]
            self._under_way.training.add(one.visiting.client.id, metrics[place])
            self._finish_visit(self._under_way, one, work.done(place, one.parameters))
            self._under_way.exchange.call_on_upload(trainer.callbacks)  # type: ignore[attr-defined]
        if batch_idx + 1 == self._rounds.schedule.num_batches:
            self._finish_round(trainer, pl_module, self._under_way)
        if ended:
            self._left = ParametersLeft(self._parameters, ended[-1].visiting.visit.client_id)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Close the epoch; the next round is planned once this one is saved."""
        plan.train_batches_again(pl_module)
        if self._round is not None:
            guard.refuse_cut_short(trainer, self.rounds_done, self._rounds.schedule.num_batches)

    def _plan_round(self, trainer: L.Trainer) -> None:
        ranks.agree_on_monitored(current_team(), trainer)  # also what on_train_epoch_end has logged
        trainer.should_stop = any(current_team().gather(trainer.should_stop, "stop"))
        if plan.takes_place(trainer, self.rounds_done):
            self._rounds.plan(self.rounds_done, self._run, self._parameters, self.virtual_seconds)

    @property
    def _under_way(self) -> OpenRound:
        assert self._round is not None
        return self._round

    def _open_round(self, opened: State, state: State) -> OpenRound:
        clients, self._run.state = self._rounds.everything.clients, state
        aggregation = self.aggregation or self.algorithm.aggregation(len(self.clients))
        watched = self._product_error.watch(aggregation, self.algorithm, self._run, len(clients))
        self._exchange = self._make_exchange(self.buffers.shared(state))
        of = self.rounds_done, self._limits.watch(watched), self.buffers, self._schedule, clients
        return OpenRound(opened, state, self._exchange, Contributions(*of))

    def _make_exchange(self, state: State) -> Exchange:
        of = self.algorithm, self.channel, self.seed, self.rounds_done
        return Exchange(*of, state, self.buffers.num_bytes, self._mode)

    @property
    def _schedule(self) -> RoundSchedule:
        return self._rounds.schedule

    def _take_in(self, trainer: L.Trainer, module: L.LightningModule, before: OpenRound) -> OpenRound:
        """Read weights and optimizers again, which the module or later callbacks may have changed at the epoch start."""
        self._parameters = optimizers.federated_parameters(trainer, module)
        self._devices.check_parameters(self._parameters)
        self._forward.check_optimizers(trainer.optimizers, self._parameters)
        self._at_once.stack(trainer, module, self._parameters, self._data, self.seed)
        self._start.also_trained(self._parameters.values())
        state = read(self._parameters)
        return self._open_round(before.opened_with(state), state)

    def _begin_group(
        self, trainer: L.Trainer, module: L.LightningModule, under_way: OpenRound, group: Group, batch: Any
    ) -> None:
        plan.refuse_other_accumulation(trainer.accumulate_grad_batches, self._rounds.schedule.accumulation)
        visits = [self._receive(under_way, visit) for visit in group]
        first = visits[0].visiting
        use_adapter(module, first)
        buffers = self.buffers.enter(first.client.memory, under_way.state, self._parameters)
        write(first.start | buffers, self._parameters)
        self._optimizers.forget(trainer.optimizers)
        clear_gradients(module)
        self._schedules.start_visit()
        self._loss_scale.start_visit()
        self._devices.enter(group[0])
        if len(group) > 1:
            self._at_once.groups.enter([one.visiting for one in visits], batch, self.rounds_done)
        forward = None
        if self._devices.trains_forward(group[0]):
            own = visits, self._at_once.under_way, (self.seed, self.rounds_done)
            forward = self._forward.enter(trainer, module, self.algorithm, *own)
        seed_all(self.seed, "visit", self.rounds_done, *(p for v in group for p in v.purpose))
        self.group = OpenGroup(visits, LocalWork(trainer.optimizers, self._changes_gradients, forward))
        under_way.training.start(module)
        for visit in group:
            call_on_visit_start(trainer, module, visit.client_id)

    def _receive(self, under_way: OpenRound, visit: Visit) -> OpenVisit:
        """Send the algorithm's message at the start of a visit."""
        schedule, name = self._rounds.schedule, visit.client_id
        client = replace(self.clients[name], memory=self.memory.load(name))
        if schedule.is_first(visit) and not schedule.is_last(visit):
            under_way.memories[name] = self.memory.load(name)
        visiting, bytes_down = under_way.exchange.down(visit, client, under_way.last.get(name))
        return OpenVisit(visiting, {name: self._parameters[name] for name in visiting.start}, bytes_down)

    def _finish_visit(self, under_way: OpenRound, one: OpenVisit, work: Work) -> None:
        visiting, visit, reason = one.visiting, one.visiting.visit, ""
        num_examples = self._run.num_examples(visit)
        # If a loss scale leaves steps out, the remaining steps have different rates for each client.
        settings = {} if self._loss_scale.is_used else self.group.work.settings
        self._schedules.finish_visit(visit, settings)
        self._loss_scale.finish_visit()
        under_way.last[visit.client_id] = visiting
        try:
            self._contribute(under_way, one, work, num_examples)
        except Diverged as why:
            self._leave_out(under_way, visiting, work, why)
            reason = DIVERGED
        if self._rounds.schedule.is_last(visit):
            del under_way.last[visit.client_id]
        sent = one.bytes_down, one.bytes_up
        row = visit_row(self.rounds_done, visit, num_examples, work, *sent, reason, visiting.lora_rank)
        self.visit_records.append(self._devices.visited(visit, row))
        self._ranks.visited()

    def _contribute(self, under_way: OpenRound, one: OpenVisit, work: Work, num_examples: int) -> None:
        visiting, contributions = one.visiting, under_way.contributions
        contributions.refuse_left_out(visiting.client.id)
        buffers = self.buffers.trained() if one.trained is None else {}
        update, one.bytes_up = under_way.exchange.up(visiting, one.read(), work)
        weighted = self._forward.weighted(update, self.group.work.forward is not None)
        contributions.add(visiting.visit, weighted, buffers, num_examples)
        self.buffers.keep(visiting.client.memory, buffers)
        self.buffers.leave()
        self._save_memory(visiting.client)

    def _leave_out(self, under_way: OpenRound, visiting: Visiting, work: Work, why: Diverged) -> None:
        """Leave a client out of the round; its memory is that from before the round."""
        name = visiting.client.id
        under_way.training.leave_out(name)
        self.buffers.leave()
        write(under_way.state, self._parameters)
        self.algorithm.reply(visiting, visiting.start, work)  # its further visits may need what it does there
        if name in under_way.contributions.diverged:
            return
        under_way.contributions.leave_out(name, why)
        if name in under_way.memories:
            self._save_memory(replace(self.clients[name], memory=under_way.memories[name]))
        for row in self.visit_records:
            if row["client"] == name:
                row.update(reason=DIVERGED, loss="")

    def _save_memory(self, client: Client) -> None:
        self.memory.save(client.id, client.memory, self.rounds_done)
        self._ranks.saved(client.id)

    def _finish_round(self, trainer: L.Trainer, module: L.LightningModule, under_way: OpenRound) -> None:
        self._devices.restore()
        hints = {
            "lr": trainer.optimizers[0].param_groups[0]["lr"],
            "trainer.gradient_clip_val": trainer.gradient_clip_val,
        }
        self._schedules.finish_round(module)
        self._limits.settle(self.rounds_done, self.visit_records, current_team())
        self._ranks.exchange(
            *(under_way.contributions, under_way.training, self.buffers, self._schedules, self._loss_scale)
        )
        seed_all(self.seed, "server", self.rounds_done)
        movement = self.algorithm.finish_round(under_way.contributions.result(hints))
        lost = self._product_error.metrics(under_way.state, movement)
        state = self.server.step(under_way.state, movement)
        refuse_lost_model(state, self.rounds_done, self.server)
        ranks.agree_on_model(current_team(), state)
        write(state, self._parameters)
        self.buffers.finish_round()
        self._loss_scale.finish_round()
        self._optimizers.forget(trainer.optimizers)  # or a checkpoint would carry the last client's moments
        self.group, self._round = OpenGroup([], LocalWork(())), None
        self.rounds_done += 1
        metrics = round_metrics(self.visit_records, len(self._rounds.cohort), self.deployed)
        metrics |= lost | self._run.logged
        self._run.logged = {}
        metrics |= self.privacy.after_round(self._rounds.num_asked, len(self.clients))
        metrics |= self._devices.metrics(self.visit_records)
        metrics |= self._mode.finish_round(under_way.exchange.state)
        self.virtual_seconds = self._devices.round_end_seconds
        log_round(trainer, module, metrics, under_way.training.means(self.deployed))
        self._limits.after_round(self.rounds_done, self.visit_records, metrics, self.virtual_seconds)

    def refuse_changed(self) -> None:
        """Raise ``ValueError`` if a callback has changed parameters since the last batch of a visit."""
        left, self._left = self._left, None
        if left is not None:
            left.refuse_changed()

    @property
    def visit(self) -> Visit | None:
        """First visit of the group under way, or None."""
        return self.group.visits[0].visiting.visit if self.group.visits else None

    @property
    def visits(self) -> list[Visit]:
        """Visits of the group under way; they stay until the next group begins or the round is over."""
        return [one.visiting.visit for one in self.group.visits]

    @property
    def device_name(self) -> str:
        """Device of the visit under way; empty between visits and without a fleet."""
        return self._devices.device_name(self.visit.client_id) if self.visit else ""

    def break_off(self, module: L.LightningModule) -> None:
        """Restore the global model when the trainer stops inside a round; the round does not count."""
        self.group.work.leave()
        self.group, self._left = OpenGroup([], LocalWork(())), None
        self._unstack()
        call_again(module)
        self._devices.restore()
        plan.train_batches_again(module)
        if self._round is not None:
            self._round.training.take(module, 0)
            write(self._round.opened, self._parameters)
            self.buffers.restore()

    def _unstack(self) -> None:
        """Give the module its own shapes back where the trainer stops inside a group, whose work is lost."""
        if (stacked := self._at_once.under_way) is not None:
            stacked.leave()

    def own_state(self, client_id: str) -> State | None:
        """Return parameters and buffers with which a client would go on alone; None for the global ones."""
        memory = self.memory.load(client_id)
        return self.buffers.own_state(memory, memory.get(OWN_STATE))

    @property
    def upload(self) -> Upload | None:
        """Last upload of a client that the server received; None in a round before the first."""
        return self._exchange.upload if self._exchange else None

    def holding(self, state: State) -> AbstractContextManager[None]:
        """Put ``state`` and the server's base into the module while the body runs; then restore it bit for bit."""
        return self._run.at_server(state)

    def before_round(self) -> AbstractContextManager[None]:
        """Put the global model from before the round into the module while the body runs."""
        self._unstack()
        buffers = {name: b for name, b in self.buffers.round_start.items() if b is not None}
        return self.holding(self._under_way.opened | buffers)

    def remembered(self) -> dict[str, Any]:
        """Return rounds done and the states of algorithm and server, whose tensors are replaced, never changed in place."""
        return {
            "federation": self._federation.settings,
            "rounds_done": self.rounds_done,
            "virtual_seconds": self.virtual_seconds,
            "private_rounds": dict(self.privacy.rounds),
            "trained": optimizers.which_are_trained(self._parameters),
            "algorithm": self.algorithm.state_dict(),
            "server": self.server.state_dict(),
            "mode": self._mode.state_dict(),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return rounds done and the states of algorithm, server and clients; inside a round, the states from before it."""
        own = self._start.remembered()
        return {**own, "memory": self.memory.state_dict(own["rounds_done"])}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state after the last round that was over when the checkpoint was made.

        Raises:
            ValueError: the run trains, and the checkpoint is of a federation with other settings.
        """
        self._federation.restore(state_dict["federation"])
        self.rounds_done = state_dict["rounds_done"]
        self.virtual_seconds = state_dict.get("virtual_seconds", 0.0)
        self._trained_before = state_dict.get("trained", {})
        self.privacy.rounds = dict(state_dict.get("private_rounds", {}))
        self.algorithm.load_state_dict(state_dict["algorithm"])
        self.server.load_state_dict(state_dict["server"])
        self.memory.load_state_dict(state_dict["memory"])
        self._mode.load_state_dict(state_dict.get("mode", {}))
        rank_zero_info(f"resuming after round {self.rounds_done}")
