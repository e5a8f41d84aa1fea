"""Federated loop: a Lightning epoch becomes a communication round.

A round is a list of visits; a visit is one run of local training batches at one client. The datamodule streams the round's
batches client after client. This callback finds where visits begin and end, swaps parameters there, calls the algorithm and
lets the server step at the round's last batch. ``max_epochs`` counts rounds; checkpoints, schedulers, early stopping and
loggers keep their meaning.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from fedlight.callbacks.loop import guard, plan
from fedlight.callbacks.loop.checkpoint import RoundStart, check_what_is_loaded, follow_what_is_saved
from fedlight.callbacks.loop.guard import SameFederation
from fedlight.callbacks.loop.parts import optimizers
from fedlight.callbacks.loop.parts.buffers import BufferPolicy
from fedlight.callbacks.loop.parts.limits import LimitedRounds, Limits
from fedlight.callbacks.loop.parts.order import (
    at_once_part,
    buffered_part,
    emulated_devices,
    forward_part,
    part_of_kind,
    parts_in_order,
    privacy_part,
)
from fedlight.callbacks.loop.parts.part import Part
from fedlight.callbacks.loop.plan import RoundPlanner
from fedlight.callbacks.loop.round_table import Record
from fedlight.callbacks.loop.run import (
    OpensLater,
    Run,
    StartsRounds,
    federated_data,
    log_round,
    round_metrics,
    seed_all,
)
from fedlight.callbacks.loop.visits.round import (
    Contributions,
    OpenRound,
    RoundSchedule,
    refuse_other_accumulation,
    wait_for,
)
from fedlight.callbacks.loop.visits.visit import (
    Exchange,
    OpenGroup,
    ParametersLeft,
    call_modules_own,
    exchange_of,
    skip_batches,
    step_losses,
)
from fedlight.devices.fleet import Fleet
from fedlight.devices.memory import Train
from fedlight.federation.algorithm import (
    Aggregation,
    Algorithm,
    Average,
    ServerOptimizer,
    aggregation_of,
    changes_gradients,
)
from fedlight.federation.algorithms.fedavg import FedAvg
from fedlight.federation.client import OWN_STATE, Channel, Client, Identity, State, Visit, build_clients, read
from fedlight.federation.client_state import ClientMemories, FollowingMemories
from fedlight.federation.forward.zeroth_order import ZerothOrder
from fedlight.processes import strategy  # noqa: F401  Lightning knows client_parallel by name from here on
from fedlight.processes.team import current_team
from fedlight.support.checks import Checked, refuse_below
from fedlight.support.pokes import forget_training_loader


class FederatedLoop(Checked, L.Callback):
    """Lightning callback that turns an epoch into a communication round over the clients that the data know.

    The federated parameters are those that the optimizer holds when a round begins. ``Trainer(max_epochs=R)`` trains R
    rounds.

    Args:
        algorithm: federated algorithm; FedAvg (unbiased) if not given.
        server: server optimizer; plain averaging if not given.
        clients_per_round: clients sampled in a round, at most the number of clients.
        local_steps: optimizer steps of a visit; None is one pass over all the client's examples.
        channel: compression of messages; lossless fp32 if not given.
        aggregation: robust (such as coordinate-wise median) or private combination of updates; None: the algorithm's own.
        seed: seed of the sampling of clients and of everything random inside a visit.
        fleet: emulated devices of the clients, and whether a round waits for them; without a fleet every client trains as
            this machine does.
        clients_at_once: most clients that are trained in one batch, each on its adapter; ``auto`` tries which number is
            fastest; see `fedlight.callbacks.loop.groups`.
        forward: training by forward passes alone, of all clients or of those whose device has no room for gradients; None
            trains by backpropagation.
        limits: bounds of one client's part in a round, and of rounds without a client; its defaults if not given.
        parts: further parts of each round, of your own (`fedlight.callbacks.loop.parts.part`), or `StepSchedules` with other
            settings; `AveragedBuffers` or `LocalBuffers` (FedBN) for a module with buffers that training changes, such as
            running statistics of a batch norm, which are refused otherwise.

    Attributes:
        rounds_done: number of rounds with a finished server step.
        visit_records: a row for each finished visit of the current round, and for each client that dropped out of it.
        virtual_seconds: duration of the rounds on the devices' clock; 0 without a fleet.
        memory: store of the clients' memories between rounds, in RAM up to 256 MiB and then on disk.

    Raises:
        ValueError: in ``setup``, before any work, for settings that would cut a round or clients that do not fit.
    """

    planner_type, run_type = RoundPlanner, Run  # others where clients are in other processes: fedlight.flower
    deployed = False  # whether clients report their numbers themselves, and may lie

    def __init__(
        self,
        algorithm: Algorithm | None = None,
        server: ServerOptimizer | None = None,
        clients_per_round: int = 10,
        local_steps: int | None = None,
        channel: Channel | None = None,
        aggregation: Aggregation | None = None,
        seed: int = 0,
        fleet: Fleet | None = None,
        clients_at_once: int | Literal["auto"] = 1,
        forward: ZerothOrder | None = None,
        limits: Limits | None = None,
        parts: Sequence[Part] = (),
    ) -> None:
        refuse_below(1, clients_per_round=clients_per_round, local_steps=local_steps)
        self.algorithm = algorithm or FedAvg()
        self.server = server or Average()
        self.clients_per_round, self.local_steps = clients_per_round, local_steps
        self.channel, self.aggregation = channel or Identity(), aggregation
        self.memory = ClientMemories()
        self.seed, self.fleet = seed, fleet
        self.buffers = part_of_kind(BufferPolicy, parts)
        self.clients_at_once = clients_at_once
        self.forward, self.limits, self.parts = forward, limits or Limits(), [*parts]
        self.rounds_done, self.virtual_seconds = 0, 0.0
        self._optimizers = optimizers.FreshOptimizers()
        self._limits = LimitedRounds(self.limits, self.deployed)
        self._buffered = buffered_part(fleet, clients_per_round, seed)
        self.privacy = privacy_part(aggregation, self.channel, parts)
        self._at_once = at_once_part(clients_at_once)
        self._forward = forward_part(forward, fleet, aggregation)
        self.clients: dict[str, Client] = {}
        self.left = ParametersLeft()
        self.visit_records: list[Record] = []
        self.group = OpenGroup()
        self._parameters: dict[str, Tensor] = {}
        self._trained_before: dict[str, bool] = {}
        self._round: OpenRound | None = None
        self._skipping = ExitStack()
        self._start, self._federation = RoundStart(self), SameFederation(self)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Check the settings and build the clients, now or when the training data are known."""
        self._federation.trains = stage == "fit"  # evaluation takes other settings
        check_what_is_loaded(trainer, self.memory)
        if stage != "fit":
            return
        self._round = None
        if current_team().rank > 0 and not isinstance(self.memory, FollowingMemories):
            self.memory = FollowingMemories(self.memory.folder, self.memory.limit_mib)
        self.check_run(trainer, pl_module)
        self.memory.open(str(Path(trainer.default_root_dir) / "clients"))
        follow_what_is_saved(trainer, self.memory, self.state_key)
        guard.refuse_other_data(trainer, isinstance(self._data, OpensLater))
        self._start.reload_in_each_round(trainer)  # else a round longer than the last would never end
        plan.plan_behind_checkpoints(trainer, self._plan_round)
        self._start.watch(trainer)
        if isinstance(self._data, OpensLater):
            self._data.when_open(partial(self._meet_clients, trainer))
        else:
            self._meet_clients(trainer)
            self._run.check_settings(self.algorithm)

    def check_run(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Raise ValueError for a trainer, module or datamodule that do not suit the settings; nothing needs to be set up."""
        guard.refuse_cut_rounds(trainer, self.rounds_done)
        guard.refuse_own_iteration(module)
        guard.refuse_kept(trainer, module)
        self._data = federated_data(trainer)
        self._parts = [*parts_in_order(self, trainer, current_team())]
        self._run = self.run_type(trainer, module, self)
        self._run.call(Part.check)
        self._run.check_settings(self.algorithm)

    def _meet_clients(self, trainer: L.Trainer) -> None:
        clients = build_clients(self._data.client_sizes())
        self.clients.clear()  # in place: the run has this dictionary
        self.clients.update(clients)
        if self._buffered is None:  # buffered rounds check their own numbers
            guard.check_cohort(len(self.clients), clients_per_round=self.clients_per_round)
        self._run.call(Part.meet)
        self._rounds = self._run.planned = self.planner_type(self, self._data, trainer)
        # The module may ask for trainer.estimated_stepping_batches, which reads a loader before round 0 is planned.
        self._rounds.outline(self.rounds_done, trainer.accumulate_grad_batches)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Read the optimizers' parameters and plan the first round; a checkpoint is loaded by now."""
        if isinstance(self._data, OpensLater):
            self._data.open()
        self._federation.meet(trainer, self._data)
        guard.refuse_used(trainer, self.rounds_done, self.algorithm, self.server)
        optimizers.train_again(pl_module, self._trained_before)
        self._read_parameters(trainer, pl_module)
        # The optimizers of a checkpoint are loaded later and stay as they were.
        optimizers.use_fused_kernels(trainer.optimizers)
        self._changes_gradients = changes_gradients(self.algorithm)
        self._run.check(self.algorithm)
        self._run.call(Part.attach)
        if self._run.has_fleet:
            self._run.devices = emulated_devices(self, self._run)
        plan.give_lora_ranks(self.algorithm, self._run, self._parameters)
        self._say_how_it_goes_on(trainer)
        self._plan_round(trainer)
        forget_training_loader(trainer)  # it may be that of the outline

    def _say_how_it_goes_on(self, trainer: L.Trainer) -> None:
        plan.say_if_over(trainer, self.rounds_done)

    def _read_parameters(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Read the federated parameters, which the module or callbacks may have changed."""
        named = optimizers.federated_parameters(trainer, module)
        states = (part.state_dict() for part in (self.algorithm, self.server))
        optimizers.refuse_renamed(self._parameters, named, chain(states, map(self.memory.load, self.clients)))
        self._parameters = self._run.parameters = named

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Close the epoch of a checkpoint that was taken when its round was over and the epoch was not."""
        if self.rounds_done == trainer.current_epoch + 1:
            plan.close_epoch(trainer)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Open the round; the module holds the global state."""
        plan.refuse_other_epoch(trainer.current_epoch, self.rounds_done, self._rounds.planned)
        seed_all(self.seed, "round", self.rounds_done)  # so that a resumed run draws the same numbers
        self.visit_records = self._run.records = self._run.devices.dropouts(self.rounds_done)
        # Lightning's finetuning callbacks add parameters when an epoch starts.
        self._read_parameters(trainer, pl_module)
        self._run.check(self.algorithm)
        self._open_round()
        self._start_algorithm()
        if not self._rounds.schedule.visits:
            self._skipping = skip_batches(pl_module, self.rounds_done, nobody_is_left=not self._rounds.cohort)

    def _start_algorithm(self) -> None:
        if isinstance(self.algorithm, StartsRounds):
            self.algorithm.start_round(self.rounds_done, self._rounds.cohort, self._run)

    def begin_batch(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        """Open the visits whose first batch this is, before ``on_train_batch_start`` of all callbacks."""
        if self._round is None:
            guard.refuse_middle_of_epoch(trainer.current_epoch, batch_idx)
        if batch_idx == 0:  # by now all callbacks have started their epoch
            self._take_in(trainer, module, self._round)
        schedule = self._rounds.schedule
        if batch_idx in schedule.begins:
            self.left.refuse_changed()  # a callback may have changed the weights since
            refuse_other_accumulation(trainer.accumulate_grad_batches, schedule.accumulation)
            # Set before it begins, so that an error on the way knows the group to undo.
            self.group = self._round.open_group(schedule.begins[batch_idx])
            self._round.begin_group(self.group, batch)
        elif self.group.beside is not None:
            self.group.beside.next_batch(batch)

    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Note that there are gradients for the next optimizer step."""
        self.group.work.backward()

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Let the algorithm change the gradients of the visits under way; a round without visits has none."""
        group = self.group
        group.work.announce(optimizer)
        if self._changes_gradients:
            # Lightning has unscaled the gradients by now, and clips them later.
            group.adjust_gradients(self.algorithm, self._parameters, optimizer)
        if group.visits:
            self._run.call(Part.before_step, group, optimizer)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Close the visit, and the round, whose last batch this was."""
        group, work, under_way = self.group, self.group.work, self._round
        assert under_way is not None
        if group.visits:
            work.add_losses(step_losses(trainer, outputs))
            self._run.call(Part.after_batch, group)
        if ended := [*group.visits] if batch_idx + 1 in self._rounds.schedule.ends else []:
            # The hook belongs to the visit, and Lightning calls it after those of all callbacks.
            call_modules_own(trainer, pl_module, outputs, batch, batch_idx)
            if not pl_module.automatic_optimization:
                work.refuse_unused_gradients(ended[0].visiting.visit)
            optimizers.refuse_joined(trainer, self._parameters, ended[0].visiting.visit.client_id)
            wait_for(pl_module.device)  # whose time is the visit's
            work.leave(len(ended))
            under_way.end_group(group)
        # Here, since Lightning validates before on_train_epoch_end.
        if batch_idx + 1 == self._rounds.schedule.num_batches:
            self._finish_round(trainer, pl_module, under_way)
        if ended:
            self.left.note(self._parameters, ended[-1].visiting.visit.client_id)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Close the epoch; the next round is planned once this one is saved."""
        self._skipping.close()
        if self._round is not None:  # its last batch would have closed it
            guard.refuse_cut_short(trainer, self.rounds_done, self._rounds.schedule.num_batches)

    def _plan_round(self, trainer: L.Trainer) -> None:
        self._run.call(Part.agree)  # also on values that on_train_epoch_end has logged
        trainer.should_stop = any(self._run.gather(trainer.should_stop, "stop"))  # each process decides alone
        if plan.takes_place(trainer, self.rounds_done):
            self._rounds.plan(self.rounds_done, self._run, self._parameters, self.virtual_seconds)

    def _open_round(self, before: OpenRound | None = None) -> None:
        """Begin with the parameters as they are; ``before`` is the same round before callbacks have changed them."""
        state = self._run.state = read(self._parameters)
        aggregation = self.aggregation or aggregation_of(self.algorithm, len(self.clients))
        clients = self._rounds.everything.clients
        for part in self._run.parts_with(Part.aggregation):
            aggregation = part.aggregation(self._run, aggregation, len(clients))
        factors = getattr(aggregation, "keeps_factors", False)
        exchange = self._make_exchange(self.buffers.shared(state), factors)
        contributions = Contributions(
            self.rounds_done, aggregation, self.buffers, self._schedule, clients, self.deployed
        )
        opened = state if before is None else before.opened_with(state)
        self._round = OpenRound(self._run, opened, state, exchange, contributions)

    def _make_exchange(self, state: State, keeps_factors: bool) -> Exchange:
        return exchange_of(self, state, keeps_factors)

    @property
    def _schedule(self) -> RoundSchedule:
        return self._rounds.schedule

    def _take_in(self, trainer: L.Trainer, module: L.LightningModule, before: OpenRound) -> None:
        """Read weights and optimizers again, which the module or later callbacks may have changed at the epoch start."""
        self._read_parameters(trainer, module)
        self._run.devices.check_parameters(self._parameters)
        self._start.also_trained(self._parameters.values())
        self._open_round(before)
        self._run.call(Part.start_round)
        if not self._rounds.schedule.visits:  # another process may have some
            self.buffers.start_visit({}, self._run.state, self._parameters)
            self.buffers.end_visit()

    def _finish_round(self, trainer: L.Trainer, module: L.LightningModule, under_way: OpenRound) -> None:
        run, module_lr = self._run, trainer.optimizers[0].param_groups[0]["lr"]
        run.devices.restore()
        hints = {"lr": module_lr, "trainer.gradient_clip_val": trainer.gradient_clip_val}
        metrics = under_way.finish(hints)
        self.group, self._round = OpenGroup(), None
        for part in (self.algorithm, self.server):
            vars(part)[guard.TRAINED] = True
        self.rounds_done += 1  # Lightning counts only after the checkpoint of a validation
        metrics |= round_metrics(self.visit_records, len(self._rounds.cohort), self.deployed) | run.logged
        run.logged = {}
        metrics |= run.devices.metrics(self.visit_records)
        self.virtual_seconds = run.devices.round_end_seconds
        log_round(trainer, module, metrics, under_way.training.means(self.deployed))
        run.call(Part.after_round, metrics)

    def remembered(self) -> dict[str, Any]:
        """Return the loop's state without its clients' memories."""
        return {
            "federation": self._federation.settings,
            "rounds_done": self.rounds_done,
            "virtual_seconds": self.virtual_seconds,
            "privacy": {} if self.privacy is None else self.privacy.state_dict(),
            "trained": {name: parameter.requires_grad for name, parameter in self._parameters.items()},
            "algorithm": self.algorithm.state_dict(),
            "server": self.server.state_dict(),
            "buffered": {} if self._buffered is None else self._buffered.state_dict(),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return rounds done and the states of algorithm, server and clients; inside a round, the states from before it."""
        held = self._start.remembered()
        return {**held, "memory": self.memory.state_dict(held["rounds_done"])}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state after the last round that was over when the checkpoint was made.

        Raises:
            ValueError: the run trains, and the checkpoint is of a deployment, or of a federation with other settings.
        """
        if "nodes" in state_dict and self._federation.trains and not self.deployed:
            raise ValueError(
                "the checkpoint is of a deployment, and what its clients remember is on their nodes: let the deployment go "
                "on, start anew, or load its weights"
            )
        self._federation.restore(state_dict["federation"])
        self._trained_before = state_dict.get("trained", {})
        self.rounds_done = state_dict["rounds_done"]
        self.virtual_seconds = state_dict.get("virtual_seconds", 0.0)
        if self.privacy is not None:
            self.privacy.load_state_dict(state_dict["privacy"])
        for name in ("algorithm", "server", "memory"):
            getattr(self, name).load_state_dict(state_dict[name])
        if self._buffered is not None:
            self._buffered.load_state_dict(state_dict.get("buffered", {}))
        rank_zero_info(f"resuming after round {self.rounds_done}")

    # View of the loop for other callbacks

    @property
    def train(self) -> Train:
        """How clients train: ``backprop``, ``forward``, or ``auto`` for the first of them that fits the device."""
        return "backprop" if self.forward is None else self.forward.train

    @property
    def visit(self) -> Visit | None:
        """First visit of the group under way, or None."""
        return self.group.visits[0].visiting.visit if self.group.visits else None

    @property
    def visits(self) -> list[Visit]:
        """Visits of the group under way; they stay until the next group begins or the round is over."""
        return [open_visit.visiting.visit for open_visit in self.group.visits]

    @property
    def device_name(self) -> str:
        """Device of the visit under way; empty between visits and without a fleet."""
        return self._run.devices.device_name(self.visit.client_id) if self.visit else ""

    def own_state(self, client_id: str) -> State | None:
        """Return parameters and buffers that a client would continue to train alone; None for the global ones."""
        memory = self.memory.load(client_id)
        return self.buffers.own_state(memory, memory.get(OWN_STATE))

    def holding(self, state: State) -> AbstractContextManager[None]:
        """Put ``state`` and the server's base into the module while the body runs; then restore it bit for bit."""
        return self._run.at_server(state)

    def before_round(self) -> AbstractContextManager[None]:
        """Put the global model from before the round into the module while the body runs."""
        self.group.unstack()  # the state is of one client, not of several stacked
        buffers = {name: b for name, b in self.buffers.round_start.items() if b is not None}
        assert self._round is not None
        return self.holding(self._round.opened | buffers)
