"""Server's half of the loop: rounds whose visits are made by nodes, in a Lightning trainer that validates, logs and saves.

An epoch of this trainer has one batch, which is passed over; behind it the nodes are asked for the visits of the round, and
the server steps. All else of a round is the loop's: sampling, algorithm, aggregation, server optimizer, privacy account,
uploads for attacks, metrics, checkpoints.
"""

import logging
import secrets
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import EarlyStopping

from fedlight.callbacks.logs.client_accuracy import ClientAccuracy
from fedlight.callbacks.loop import plan
from fedlight.callbacks.loop.federated_loop import FederatedLoop
from fedlight.callbacks.loop.guard import SameFederation
from fedlight.callbacks.loop.plan import Bundle, RoundPlanner
from fedlight.callbacks.loop.round_table import Record
from fedlight.callbacks.loop.run import Run, visit_row
from fedlight.callbacks.loop.visits.round import OpenRound, RoundSchedule
from fedlight.callbacks.loop.visits.visit import OpenGroup, exchange_of
from fedlight.federation.algorithms.assignments import scores_examples
from fedlight.federation.client import DIVERGED, OWN_STATE, Diverged, State, Visit, Visiting, read
from fedlight.federation.client_state import Memory
from fedlight.federation.payloads import predict_payloads
from fedlight.federation.privacy import Private
from fedlight.federation.protocols import FederatedData, LossesOn
from fedlight.flower.loops import replies, validation
from fedlight.flower.loops.arrivals import Arrivals
from fedlight.flower.loops.node_loop import TellsClients, base_digest, rates_of
from fedlight.flower.loops.replies import Arrived, Sent
from fedlight.flower.loops.server_data import ABSENT, DROPPED, AwayClients, ServerData, dropped_row
from fedlight.flower.messages import Parcel, Refused, write_payload
from fedlight.flower.nodes import Nodes, Traffic
from fedlight.flower.parts import clients_needed, refuse_loss_scale

T = TypeVar("T")
logger = logging.getLogger("fedlight")


class ServerPlanner(RoundPlanner):
    """Plan of a round that other processes train."""

    def __init__(self, loop: Any, data: FederatedData, trainer: L.Trainer) -> None:
        super().__init__(loop, data, trainer)
        if isinstance(loop.aggregation, Private) and loop.aggregation.secret_sampling:
            self.seed = loop.secret_seed  # the nodes know the run's seed

    def own_bundles(self, round_idx: int) -> list[Bundle]:
        return []


class ServerRun(Run):
    """Run whose clients are scored by their nodes."""

    def __init__(self, trainer: L.Trainer, module: L.LightningModule, loop: Any) -> None:
        super().__init__(trainer, module, loop)
        self.devices = AwayClients(loop.nodes, loop.train == "forward")

    def check_losses(self, on: LossesOn) -> None:
        """Do nothing: a node that cannot score its clients does not join."""

    def client_losses(self, on: LossesOn) -> dict[str, np.ndarray]:
        """Raise ValueError: nodes are asked by `adapter_losses`."""
        raise ValueError(
            f"{type(self._loop.algorithm).__name__} asks for the clients' losses by client_losses, which the server of a "
            "deployment has not: have it ask adapter_losses(on, adapters)"
        )

    def adapter_losses(self, on: LossesOn, adapters: Sequence[str]) -> list[dict[str, np.ndarray]]:
        losses: list[dict[str, np.ndarray]] = self._loop.ask_losses(on, adapters, self.state)
        return losses


class ServerFederation(SameFederation):
    """Description of a federation whose clients may change between two starts."""

    def meet(self, trainer: L.Trainer, data: FederatedData) -> None:
        """Add the settings that both starts need: of the data, sizes and batches are those of the nodes that are there."""
        self.settings |= {"trainer.accumulate_grad_batches": trainer.accumulate_grad_batches}
        self._refuse_others()
        self._saved = {}


class ServerLoop(FederatedLoop):
    """Loop of a server; `connect` has to be called before the trainer's ``fit``.

    Attributes:
        nodes: the nodes.
        arrivals: buffered rounds; None without.
        last: client -> round that asked for the last work which the server has taken.
        secret_seed: seed of the sampling where an epsilon counts on secret cohorts; it is in no file.
        outlines: client -> its memory at the node, with meta tensors: an algorithm's ``send`` may depend on their names and
            shapes. The server computes them, and learns no value.
    """

    planner_type, run_type, deployed = ServerPlanner, ServerRun, True

    def connect(
        self, nodes: Nodes, secure: bool = False, judge: ClientAccuracy | None = None, every: int = 1
    ) -> None:
        """Take the nodes.

        With ``secure`` the nodes mask their replies, and the server learns the sum alone. With a ``judge`` they
        validate the global model on their own rows, once in ``every`` rounds, and it gets their results.
        """
        self.nodes, self._secure, self.judge, self._every = nodes, secure, judge, every
        self.secret_seed = secrets.randbits(128)
        self.last: dict[str, int] = {}
        self.outlines: dict[str, Memory] = {}
        self._saved: dict[str, int] = {}
        self._saved_before: dict[str, int] = {}
        self._global: State = {}
        self._cached: tuple[State, bytes] | None = None
        self._federation = ServerFederation(self)
        self._buffered = self.arrivals = None if self._buffered is None else Arrivals(self)

    @property
    def state_key(self) -> str:
        return FederatedLoop.__qualname__

    @property
    def _schedule(self) -> RoundSchedule:
        return self._rounds.everything  # visits of all nodes count here, though this process trains none

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Refuse schedules that would depend on what nodes report, and plan the first round."""
        by_step = [config for config in trainer.lr_scheduler_configs if config.interval == "step"]
        if by_step or (trainer.lr_scheduler_configs and not pl_module.automatic_optimization):
            raise ValueError(
                "a learning-rate schedule moves within a round, which the server of a deployment does not see: set its "
                "interval to epoch, which is a round"
            )
        refuse_loss_scale(trainer.precision)
        needed = clients_needed({"clients_per_round": self.clients_per_round, "fleet": self.fleet})
        self.nodes.compare_bases(base_digest(trainer, pl_module), needed)
        self._limits.say_what_is_not_limited(self.algorithm, self._secure)
        stops = [each for each in trainer.callbacks if isinstance(each, EarlyStopping)]  # type: ignore[attr-defined]
        if any(each.stopped_epoch == self.rounds_done - 1 > 0 for each in stops):
            trainer.should_stop = True  # Lightning would train one more round first
        super().on_fit_start(trainer, pl_module)

    def _plan_round(self, trainer: L.Trainer) -> None:
        """Take nodes that have come since, and plan the next round."""
        self._global = read(self._parameters)
        if plan.takes_place(trainer, self.rounds_done):
            self.nodes.wait_until_back()
        sizes = {name: client.num_examples for name, client in self.clients.items()}
        if self._data.client_sizes() != sizes:
            ready = self._rounds.planned
            self._meet_clients(trainer)  # the new planner does not know which round is prepared
            self._rounds.planned = ready
            plan.give_lora_ranks(self.algorithm, self._run, self._parameters)
        assert isinstance(self._data, ServerData)
        # A schedule without visits has the batches of one optimizer step.
        self._data.accumulation = self._rounds.accumulation(self.rounds_done)
        super()._plan_round(trainer)
        if self.arrivals is not None:
            self._rounds.cohort = [*self.clients.values()]  # any may arrive

    def _take_in(self, trainer: L.Trainer, module: L.LightningModule, before: OpenRound) -> None:
        """Take the rates at the beginning of the round's visits; in buffered rounds, wait for these."""
        self._rates = rates_of(trainer)  # Lightning moves them on before the round is finished
        if self.arrivals is not None:
            self._read_parameters(trainer, module)
            self.arrivals.collect(read(self._parameters))
        super()._take_in(trainer, module, before)
        if others := sorted(self._parameters.keys() ^ self._global.keys()):
            raise ValueError(
                f"{others[0]} and {len(others) - 1} others joined or left the optimizer after the start, which nodes cannot "
                "follow: let the optimizer hold from the start whatever will be trained"
            )

    def believe(self, claimed: Mapping[str, int]) -> dict[str, int]:
        """Return with how many examples clients count that claim so many."""
        buffered = self.arrivals
        return self._limits.believe(
            claimed, self.clients_per_round if buffered is None else buffered.fedbuff.buffer_size
        )

    # Requests to nodes

    def prepare(self, round_idx: int, client_ids: Sequence[str]) -> dict[str, int]:
        """Let clients make candidates; return how many each keeps. A client that makes none is left out of the round."""
        homes = self.nodes.homes(client_ids)
        parcels = self._parcels(homes, round_idx, self._global, {})
        made, reasons = self.nodes.collect("prepare", parcels, replies.read_made, homes)
        for node, reason in reasons.items():
            for name in homes[node]:
                self._run.devices.drop(name, f"{DROPPED}: {reason}")  # type: ignore[attr-defined]
        return dict.fromkeys(client_ids, 0) | _joined(made)

    def ask_losses(self, on: LossesOn, adapters: Sequence[str], state: State) -> list[dict[str, np.ndarray]]:
        """Return the losses of all clients under each adapter, as their nodes have found them.

        A client that is not scored has its losses of the last time, or else the mean of the others', which is counted.

        Raises:
            ValueError: no client is scored.
        """
        homes = self.nodes.homes([*self.clients])
        by_example = scores_examples(self.algorithm)
        fields = {"losses_on": on, "adapters": [*adapters], "by_example": by_example}
        parcels = self._parcels(homes, self.rounds_done, state, fields)
        take = partial(replies.read_losses, adapters=len(adapters), by_example=by_example)
        scored = _joined(self.collect("losses", parcels, take, homes))
        if not scored:
            raise ValueError(
                "no client was scored, without which nobody can be grouped: start their nodes, and run the app again; it "
                "goes on from the last checkpoint"
            )
        by_adapter = zip(*scored.values(), strict=True)
        means = [np.array([np.mean([losses.mean() for losses in each])]) for each in by_adapter]
        before: Mapping[str, Sequence[float]] = getattr(self.algorithm, "losses", {})
        missing = [name for name in self.clients if name not in scored]
        for name in missing:
            scored[name] = [np.array([loss]) for loss in before[name]] if name in before else means
        self._run.log({"unscored": float(len(missing))})
        return [{name: scored[name][u] for name in self.clients} for u in range(len(adapters))]

    def collect(self, action: str, parcels: Mapping[int, Parcel], take: Any, homes: Any) -> dict[int, Any]:
        """Ask nodes, and return their results; a line of the log names those without."""
        taken, reasons = self.nodes.collect(action, parcels, take, homes)
        for node, reason in reasons.items():
            logger.warning("node %s does not answer to %r: %s", node, action, reason)
        return taken

    def _parcels(
        self, homes: Mapping[int, Sequence[str]], round_idx: int, state: State, fields: Mapping[str, Any]
    ) -> dict[int, Parcel]:
        """Return a message with the whole state to each node."""
        model = {"model": self._message(state)}
        fields = {"model": "model", **fields}
        return {node: self._parcel(round_idx, names, fields, model) for node, names in homes.items()}

    def _parcel(
        self, round_idx: int, clients: Sequence[str], fields: Mapping[str, Any], payloads: dict[str, bytes]
    ) -> Parcel:
        """Return a message of a round to the node of some clients."""
        header = {
            "round": round_idx,
            "num_rounds": self._run.num_rounds,
            "shares": {name: self.clients[name].share for name in clients},
            "memories": {
                name: [self.last[name], self._saved_before.get(name)] for name in clients if name in self.last
            },
            **fields,
        }
        return Parcel(header, payloads)

    def _message(self, state: State) -> bytes:
        """Return the payload of a state that goes down; made once for one state, which goes to many."""
        # The state is held: Python gives its id to the next one.
        if self._cached is None or self._cached[0] is not state:
            self._cached = state, write_payload(self.channel.message_down(state))
        return self._cached[1]

    # The visits of a round

    def _finish_round(self, trainer: L.Trainer, module: L.LightningModule, under_way: OpenRound) -> None:
        """Have nodes make the visits of the round, unless these have arrived; then the server steps."""
        buffered = self.arrivals
        sent, outcomes = self._visit(under_way) if buffered is None else (buffered.sent, buffered.outcomes)
        # Rows of clients that were away or dropped while the round was planned.
        without_visits = len(self.visit_records)
        for name, arrived in outcomes.items():
            columns = {} if buffered is None else buffered.columns(name)
            if isinstance(arrived, str):
                down = sum(sent[name].bytes_down) if name in sent else 0
                rank = self.clients[name].lora_rank if name in self.clients else None  # a column of all rows
                self.visit_records.append(dropped_row(self.rounds_done, name, arrived, down, rank) | columns)
                continue
            self._take_work(trainer, under_way, sent[name], arrived, columns)
        took_part = {name for name, arrived in outcomes.items() if isinstance(arrived, Arrived)}
        self._rounds.cohort = [client for client in self._rounds.cohort if client.id in took_part]
        traffic, self.nodes.traffic = self.nodes.traffic, Traffic()
        self._run.log({"dropped": float(without_visits + len(outcomes) - len(took_part))})
        self._run.log({"wire_bytes_down": float(traffic.down), "wire_bytes_up": float(traffic.up)})
        super()._finish_round(trainer, module, under_way)
        if buffered is not None:
            self.virtual_seconds = buffered.round_end_seconds
        if self.judge is not None and (trainer.current_epoch + 1) % self._every == 0:
            self._validate(trainer, module, self.judge)

    def _visit(self, under_way: OpenRound) -> tuple[dict[str, Sent], dict[str, Arrived | str]]:
        """Have nodes make the visits of the round; return the visits sent, and their work or the reason for none."""
        homes: dict[int, dict[str, Sent]] = {}
        parcels: dict[int, Parcel] = {}
        planned = self._rounds.everything
        for node, names in self.nodes.homes([client.id for client in self._rounds.cohort]).items():
            homes[node], parcels[node] = self.message_to(names, planned.visits, under_way.exchange.state)
        outcomes: dict[str, Arrived | str] = {}
        if self._secure:
            from fedlight.flower.secure.server_side import visit_masked  # it needs the extra flower

            outcomes = visit_masked(self, under_way, homes, parcels)
        else:
            for node, answer in self.nodes.ask("visit", parcels).items():
                outcomes |= self.read(answer, homes[node])
        # Rows of visits.csv have the emulator's order.
        return _joined(homes), {name: outcomes.get(name, ABSENT) for name in planned.clients}

    def _validate(self, trainer: L.Trainer, module: L.LightningModule, judge: ClientAccuracy) -> None:
        """Have nodes validate the new global model on the rows of all their clients; log and write the results."""
        homes = self.nodes.homes([*self.clients])
        parcels = self._parcels(homes, self.rounds_done - 1, read(self._parameters), {})
        if self._secure:
            from fedlight.flower.secure.server_side import validate_masked  # it needs the extra flower

            self._log_validated(module, *validate_masked(self, homes, parcels))
            return
        take = partial(validation.read_validated, most_metrics=self.nodes.bounds.metrics)
        results = _joined(self.collect("validate", parcels, take, homes))
        ordered = {name: results[name] for name in self.clients if name in results}
        least = 1 + max(getattr(self.algorithm, "groups", {}).values(), default=0)
        means, tallies = validation.means_of(ordered, self.limits, least)
        counted = sum(name in tallies or not means.keys().isdisjoint(r.sums) for name, r in ordered.items())
        self._log_validated(module, means, counted)
        judge.take(trainer, module, tallies)

    def _log_validated(self, module: L.LightningModule, means: dict[str, float], clients: int) -> None:
        traffic, self.nodes.traffic = self.nodes.traffic, Traffic()
        counted = {
            "fed/not_validated": float(len(self.clients) - clients),
            "fed/validation_bytes_down": float(traffic.down),
            "fed/validation_bytes_up": float(traffic.up),
        }
        module.log_dict(means | counted, on_step=False, on_epoch=True, batch_size=1)

    def message_to(
        self, names: Sequence[str], planned: Sequence[Visit], state: State
    ) -> tuple[dict[str, Sent], Parcel]:
        """Return the visits to some clients of one node, of those ``planned``, by client, and the message for the node."""
        # By the tensors, which `states` holds: clients of a node that receive the same ones share a payload.
        labels: dict[frozenset[tuple[str, int]], str] = {}
        states: list[State] = []
        payloads: dict[str, bytes] = {}
        entries: list[dict[str, Any]] = []
        model, sent = None, dict[str, Sent]()
        exchange = exchange_of(self, state, keeps_factors=False)
        exchange.model_for = None  # it is the newest
        for name in sorted(names):
            client = replace(self.clients[name], memory=deepcopy(self.outlines.get(name, {})))
            visits = [visit for visit in planned if visit.client_id == name]
            sent[name] = Sent(client, predict_payloads(self.algorithm, visits, client, state))
            visiting: Visiting | None = None
            for visit in visits:
                visiting, num_bytes = exchange.down(visit, client, visiting)
                sent[name].visitings.append(visiting)
                label, message = None, exchange.message
                if message is not None:
                    states.append(message)
                    label = labels.setdefault(_identity(message), f"p{len(labels)}")
                    if _identity(message) == _identity(state):
                        payloads[label], model = self._message(state), label
                    elif label not in payloads:
                        payloads[label] = write_payload(self.channel.message_down(message))
                entries.append({"client": name, "label": visit.label, "payload": label})
                sent[name].bytes_down.append(num_bytes)
        fields = {
            "visits": entries,
            "model": model,
            "rates": self._rates,
            "algorithm": self.algorithm.tell(names) if isinstance(self.algorithm, TellsClients) else {},
        }
        due = sum(replies.due_bytes(each, self.channel) for each in sent.values())
        return sent, replace(self._parcel(self.rounds_done, sorted(names), fields, payloads), due_bytes=due)

    def read(self, answer: Parcel | Refused, sent: Mapping[str, Sent]) -> dict[str, Arrived | str]:
        """Return the work of a node's clients, or why there is none."""
        outcomes: dict[str, Arrived | str] = {}
        try:
            lost = self.nodes.read(answer, replies.check_reply, sent)
        except Refused as error:
            return dict.fromkeys(sent, f"{DROPPED}: {error}")
        for name, each in sent.items():
            if name in lost:
                self.nodes.count_refused(lost[name])  # the reply itself was taken
                outcomes[name] = f"{DROPPED}: {lost[name]}"
                continue
            due = each, self.channel, self._run.state, self.nodes.bounds.metrics
            try:
                outcomes[name] = self.nodes.read(answer, replies.read_reply, *due)
            except Refused as error:
                outcomes[name] = f"{DROPPED}: {error}"
        return outcomes

    def _take_work(
        self, trainer: L.Trainer, under_way: OpenRound, sent: Sent, arrived: Arrived, columns: Record
    ) -> None:
        """Add up a client's work of the round; ``columns`` are further ones of its rows."""
        name, contributions = sent.client.id, under_way.contributions
        group = OpenGroup(forward=self._forward)
        if arrived.diverged:
            contributions.leave_out(name, Diverged(arrived.diverged))
        for place, visiting in enumerate(sent.visitings):
            work, reason, bytes_down = arrived.works[place], "", sent.bytes_down[place]
            bytes_up = arrived.bytes_up[place] if arrived.bytes_up else 0
            examples = self._run.num_examples(visiting.visit)
            if self.arrivals is not None:
                self.arrivals.model_for(visiting.visit, under_way.state)  # refuses one of other parameters
            if arrived.movements and not arrived.diverged:
                # NaN, which equals no value that the server knows, for each parameter that a client keeps for itself.
                kept: State = sent.due[place].memory.get(OWN_STATE, {})
                trained = visiting.start | {n: torch.full(p.shape, torch.nan) for n, p in kept.items()}
                try:
                    update = under_way.exchange.arrived(visiting, arrived.movements[place], trained, work)
                    under_way.count(group, visiting.visit, update, {}, examples)
                    under_way.training.add(name, arrived.metrics[place])
                except (ValueError, ArithmeticError) as error:  # a weight may follow from the node's loss
                    contributions.leave_out(name, Diverged(str(error)))
            if name in contributions.diverged:
                under_way.training.leave_out(name)
                reason = DIVERGED
            visit, rank = visiting.visit, visiting.lora_rank
            row = visit_row(self.rounds_done, visit, examples, work, bytes_down, bytes_up, reason, rank)
            self.visit_records.append(row | columns)
            under_way.exchange.call_on_upload(trainer.callbacks)  # type: ignore[attr-defined]
        if name not in contributions.diverged:
            # The task's round: nodes keep memories by it.
            self.last[name] = sent.visitings[-1].visit.asked_in(self.rounds_done)
            # The server itself works out single values, such as a client's rank after pruning.
            single = (bool, int, float, str, type(None))
            known = {key: value for key, value in sent.client.memory.items() if isinstance(value, single)}
            self.outlines[name] = sent.due[-1].memory | known

    # Checkpoints

    def remembered(self) -> dict[str, Any]:
        """Return the loop's result, and the facts about its nodes that a server needs to go on."""
        nodes = {"run": self.nodes.run, "keys": dict(self.nodes.keys), "last": dict(self.last)}
        return super().remembered() | {"nodes": {**nodes, "outlines": dict(self.outlines)}}

    def recall(self, checkpoint: Path | None) -> None:
        """Take from a checkpoint which node serves which client, before nodes are asked to join."""
        if checkpoint is not None:
            # Mapped, since the weights in it are not needed here.
            saved = torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=True)
            self.nodes.keys.update(saved["callbacks"][self.state_key].get("nodes", {}).get("keys", {}))

    def state_dict(self) -> dict[str, Any]:
        """Return the loop's part of a checkpoint; nodes keep what this one and the one before it need."""
        state = super().state_dict()
        # This one is not on the disk yet: a server that is killed before goes on from the one before it.
        self._saved_before, self._saved = self._saved, dict(state["nodes"]["last"])
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state after the last round that was over when the checkpoint was made.

        Raises:
            ValueError: the checkpoint is of no deployment, or of another federation.
        """
        if "nodes" not in state_dict:
            raise ValueError(
                "the checkpoint is of an emulated run, whose clients' memories no node has: start anew, or load its weights"
            )
        super().load_state_dict(state_dict)
        kept = state_dict["nodes"]
        self.nodes.run, self.last, self.outlines = kept["run"], dict(kept["last"]), dict(kept["outlines"])
        self._saved = self._saved_before = dict(self.last)


def _joined(by_node: Mapping[int, Mapping[str, T]]) -> dict[str, T]:
    return {name: each for results in by_node.values() for name, each in results.items()}


def _identity(state: State) -> frozenset[tuple[str, int]]:
    return frozenset((name, id(value)) for name, value in state.items())
