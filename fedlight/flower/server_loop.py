"""Server's half of the loop: rounds whose visits are made by nodes, in a Lightning trainer that validates, logs and saves.

An epoch of this trainer has one batch, which is passed over; behind it the nodes are asked for the visits of the round, and
the server steps. All else of a round is the loop's: sampling, algorithm, aggregation, server optimizer, privacy account,
uploads for attacks, metrics, checkpoints.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from fedlight.callbacks.loop.federated_loop import FederatedLoop
from fedlight.callbacks.loop.groups.bundles import Bundle
from fedlight.callbacks.loop.guard import SameFederation
from fedlight.callbacks.loop.plan import RoundPlanner, RoundSchedule
from fedlight.callbacks.loop.round_table import Record
from fedlight.callbacks.loop.run import NoDevices, Run, visit_row
from fedlight.callbacks.loop.visits.visit import OpenRound
from fedlight.federation.algorithm import Payloads, predict_payloads
from fedlight.federation.channel import Channel
from fedlight.federation.client import Client, Visit, Visiting, Work, build_clients
from fedlight.federation.protocols import FederatedData, LossesOn
from fedlight.federation.state import DIVERGED, Diverged, State, is_finite, read
from fedlight.flower.messages import Layout, Parcel, Refused, layout_of, read_payload, value_of, write_payload
from fedlight.flower.node_loop import base_digest, rates_of
from fedlight.flower.nodes import Failure, Nodes, Traffic
from fedlight.flower.passed_over import PassedOver

ABSENT, DROPPED = "absent", "dropped"
MOST_STEPS = 10**9
"""More optimizer steps of a visit, or examples of a metric, are no count."""


class ServerData(L.LightningDataModule):
    """Data of a server, which has no rows: the clients that nodes have named, and rows of its own to validate on.

    Args:
        nodes: the nodes.
        inner: datamodule of the config, whose validation rows are read if they have a source of their own.
        prepare: function that lets clients make candidates in a round; it returns how many each keeps.
    """

    def __init__(
        self,
        nodes: Nodes,
        inner: L.LightningDataModule,
        prepare: Callable[[int, Sequence[str]], Mapping[str, int]],
    ) -> None:
        super().__init__()
        self._nodes, self._inner, self._prepare = nodes, inner, prepare
        self._made: dict[str, int] = {}
        self.accumulation = 1
        self.validates = getattr(inner, "val_rows", None) is not None

    @property
    def client_groups(self) -> Mapping[str, str] | None:
        """Known group of each client; None without."""
        return self._nodes.groups or None

    def setup(self, stage: str) -> None:
        """Read the rows for validation."""
        if self.validates:
            self._inner.trainer = self.trainer
            self._inner.setup("validate")

    def client_sizes(self) -> dict[str, int]:
        """Return the number of examples of each client; 1 where the server need not know."""
        return dict(self._nodes.sizes)

    def num_batches(self, client_id: str, split: str = "train") -> int:
        """Return 1: how many batches a visit has is the node's."""
        return 1

    def set_visits(self, visits: Sequence[Visit], round_idx: int) -> None:
        """Do nothing: nodes read the batches."""

    def train_dataloader(self) -> DataLoader:
        """Return as many batches as Lightning needs for an epoch, which are passed over."""
        return DataLoader([0.0] * self.accumulation, batch_size=1, collate_fn=PassedOver.collate)  # type: ignore[arg-type]

    def val_dataloader(self) -> Any:
        return self._inner.val_dataloader() if self.validates else []

    # Interface for algorithms whose clients make training data: fedlight.federation.protocols.SynthesizesData

    def synthesize(self, round_idx: int, client_ids: Sequence[str], module: torch.nn.Module) -> None:
        """Let the clients make candidates on their nodes."""
        self._made |= self._prepare(round_idx, client_ids)

    def choose(self, client_id: str, module: torch.nn.Module) -> None:
        """Do nothing: nodes choose."""

    def num_synthetic(self, client_id: str) -> int:
        """Return how many examples a client keeps."""
        return self._made.get(client_id, 0)

    def synthesis_metrics(self) -> dict[str, float]:
        """Return nothing: counts stay with the nodes."""
        return {}

    def reset_synthesis(self) -> None:
        """Forget what clients have made."""
        self._made = {}


class ServerPlanner(RoundPlanner):
    """Plan of a round of which this process trains nothing."""

    def own_bundles(self, round_idx: int) -> list[Bundle]:
        return []


class AwayClients(NoDevices):
    """Clients that cannot be asked in a round, as their node is not there.

    Args:
        nodes: the nodes.
        forward_only: see `NoDevices`.
    """

    def __init__(self, nodes: Nodes, forward_only: bool) -> None:
        super().__init__(forward_only)
        self._nodes = nodes
        self._without: dict[str, str] = {}
        self._away: list[Visit] = []

    def present(self, round_idx: int, now_seconds: float, clients: Sequence[Client]) -> list[Client]:
        there = {name for own in self._nodes.homes([one.id for one in clients]).values() for name in own}
        self._without = {one.id: ABSENT for one in clients if one.id not in there}
        return [one for one in clients if one.id in there]

    def drop(self, client_id: str, reason: str) -> None:
        """Leave a client out of the round that is planned."""
        self._without[client_id] = reason

    def admit(
        self, round_idx: int, now_seconds: float, visits: Sequence[Visit], parameters: Mapping[str, Tensor]
    ) -> list[Visit]:
        self._away = [one for one in visits if one.client_id in self._without]
        return [one for one in visits if one.client_id not in self._without]

    def dropouts(self, round_idx: int) -> list[Record]:
        reasons = {one.client_id: self._without[one.client_id] for one in self._away}
        return [dropped_row(round_idx, name, why, 0, 0) for name, why in reasons.items()]


class ServerRun(Run):
    """Run whose clients are scored by their nodes."""

    def __init__(
        self, trainer: L.Trainer, module: L.LightningModule, clients: Mapping[str, Client], loop: Any
    ) -> None:
        super().__init__(trainer, module, clients, loop)
        self._loop = loop
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
        found: list[dict[str, np.ndarray]] = self._loop.ask_losses(on, adapters, self.state)
        return found


class ServerFederation(SameFederation):
    """Description of a federation whose clients may change between two starts."""

    def meet(self, trainer: L.Trainer, data: FederatedData) -> None:
        """Add the settings that both starts need."""
        self.settings |= {"trainer.accumulate_grad_batches": trainer.accumulate_grad_batches}
        self._refuse_others()
        self._saved = {}


@dataclass
class _Sent:
    """Visits of one client that are under way at its node, in order, with what each is due to send."""

    client: Client
    visitings: list[Visiting]
    due: list[Payloads]
    bytes_down: list[int]


@dataclass
class _Arrived:
    """Work of a client as it has reached the server, all of it checked."""

    movements: list[State]
    works: list[Work]
    bytes_up: list[int]
    metrics: list[dict[str, tuple[float, int]]]
    diverged: str


class ServerLoop(FederatedLoop):
    """Loop of a server; `connect` has to be called before the trainer's ``fit``.

    Attributes:
        nodes: the nodes.
        last: client -> last round whose work the server has taken.
    """

    planner_type, run_type = ServerPlanner, ServerRun

    def connect(self, nodes: Nodes, asks: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        """Take the nodes; ``asks`` and ``own`` are those of `Nodes.welcome`, for nodes that join later."""
        self.nodes, self._asks, self._own = nodes, asks, own
        self.last: dict[str, int] = {}
        self._saved: dict[str, int] = {}
        self._saved_before: dict[str, int] = {}
        self._global: State = {}
        self._cached: tuple[int, bytes] | None = None
        self._federation = ServerFederation(self)

    @property
    def state_key(self) -> str:
        return FederatedLoop.__qualname__

    @property
    def _schedule(self) -> RoundSchedule:
        return self._rounds.everything

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Refuse schedules that would depend on what nodes report, and plan the first round."""
        by_step = [one for one in trainer.lr_scheduler_configs if one.interval == "step"]
        if by_step or (trainer.lr_scheduler_configs and not pl_module.automatic_optimization):
            raise ValueError(
                "a learning-rate schedule moves within a round, which the server of a deployment does not see: set its interval "
                "to epoch, which is a round"
            )
        if trainer.precision == "16-mixed":
            raise ValueError(
                "trainer.precision=16-mixed has a loss scale, which is not sent: set bf16-mixed or 32-true"
            )
        self.nodes.compare_bases(base_digest(pl_module))
        assert isinstance(trainer.datamodule, ServerData)  # type: ignore[attr-defined]
        trainer.datamodule.accumulation = trainer.accumulate_grad_batches  # type: ignore[attr-defined]
        super().on_fit_start(trainer, pl_module)

    def _plan_round(self, trainer: L.Trainer) -> None:
        """Take nodes that have come since, and plan the next round."""
        self._global = read(self._parameters)
        before = dict(self.nodes.sizes)
        self.nodes.welcome(self._own, self._asks)
        if self.nodes.sizes != before:
            clients = build_clients(self._data.client_sizes())
            self.clients.clear()
            self.clients.update(clients)
            ready = self._rounds.planned
            self._meet_clients(trainer)
            self._rounds.planned = ready
        super()._plan_round(trainer)

    def begin_batch(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        """Take the rates with which the round's visits begin; Lightning has moved them on when the round is finished."""
        super().begin_batch(trainer, module, batch, batch_idx)
        if batch_idx == 0:
            self._rates = rates_of(trainer)

    # What is asked of nodes

    def prepare(self, round_idx: int, client_ids: Sequence[str]) -> dict[str, int]:
        """Let clients make candidates; return how many each keeps. Who does not is left out of the round."""
        model = {"model": "model"}
        made: dict[str, int] = {}
        homes = self.nodes.homes(client_ids)
        parcels = {
            node: self._parcel(round_idx, own, model, {"model": self._message(self._global)})
            for node, own in homes.items()
        }
        for node, answer in self.nodes.ask("prepare", parcels).items():
            try:
                if isinstance(answer, Failure):
                    raise Refused(answer.reason)
                counts = value_of(answer.header, "made", dict)
                for name in homes[node]:
                    if not 0 <= value_of(counts, name, int) < MOST_STEPS:
                        raise Refused(f"client {name} has made {counts[name]} examples")
                    made[name] = counts[name]
            except Refused as error:
                for name in homes[node]:
                    self._drop(name, str(error))
        return made | {name: 0 for name in client_ids if name not in made}

    def ask_losses(self, on: LossesOn, adapters: Sequence[str], state: State) -> list[dict[str, np.ndarray]]:
        """Return the losses of all clients under each adapter, as their nodes have found them."""
        homes = self.nodes.homes([*self.clients])
        by_example = getattr(self.algorithm, "assignment", "") == "soft"
        fields = {"model": "model", "losses_on": on, "adapters": [*adapters], "by_example": by_example}
        data = {"model": self._message(state)}
        parcels = {node: self._parcel(self.rounds_done, own, fields, data) for node, own in homes.items()}
        found: list[dict[str, np.ndarray]] = [{} for _ in adapters]
        for node, answer in self.nodes.ask("losses", parcels).items():
            if isinstance(answer, Failure):
                raise ValueError(
                    f"node {node} has not scored its clients, without whom nobody can be grouped: {answer.reason}"
                )
            try:
                for name in homes[node]:
                    for place, own in enumerate(_losses(answer.header, name, len(adapters))):
                        found[place][name] = own
            except Refused as error:
                raise ValueError(f"node {node} has not scored its clients: {error}") from error
        missing = [name for name in self.clients if name not in found[0]]
        if missing:
            raise ValueError(
                f"client {missing[0]} is not there to be scored, without which nobody can be grouped: start its node, and run "
                "the app again; it goes on from the last checkpoint"
            )
        return found

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
        if self._cached is None or self._cached[0] != id(state):
            self._cached = id(state), write_payload(self.channel.message_down(state))
        return self._cached[1]

    def _drop(self, client_id: str, reason: str) -> None:
        devices = self._run.devices
        assert isinstance(devices, AwayClients)
        devices.drop(client_id, reason)

    # The visits of a round

    def _finish_round(self, trainer: L.Trainer, module: L.LightningModule, under_way: OpenRound) -> None:
        """Have nodes make the visits of the round; then the server steps."""
        sent, parcels = self._send(under_way)
        answers = self.nodes.ask("visit", parcels)
        home = {name: node for node, parcel in parcels.items() for name in parcel.header["shares"]}
        took_part = []
        for name in self._rounds.everything.clients:  # in the order in which the emulator would have visited them
            if name not in home:
                self.visit_records.append(dropped_row(self.rounds_done, name, ABSENT, 0, 0))
                continue
            try:
                arrived = self._read(answers[home[name]], sent[name])
            except Refused as error:
                down = sum(sent[name].bytes_down)
                self.visit_records.append(dropped_row(self.rounds_done, name, f"{DROPPED}: {error}", down, 0))
                continue
            took_part.append(name)
            self._take_work(trainer, under_way, sent[name], arrived)
        dropped = len(self._rounds.cohort) - len(took_part)
        self._rounds.cohort = [one for one in self._rounds.cohort if one.id in took_part]
        traffic, self.nodes.traffic = self.nodes.traffic, Traffic()
        self._run.log(
            {
                "dropped": float(dropped),
                "wire_bytes_down": float(traffic.down),
                "wire_bytes_up": float(traffic.up),
            }
        )
        super()._finish_round(trainer, module, under_way)

    def _send(self, under_way: OpenRound) -> tuple[dict[str, _Sent], dict[int, Parcel]]:
        """Return what is under way for each client, and the message for each node."""
        state = under_way.exchange.state
        sent: dict[str, _Sent] = {}
        parcels: dict[int, Parcel] = {}
        for node, names in self.nodes.homes([one.id for one in self._rounds.cohort]).items():
            payloads: dict[str, bytes] = {}
            labels: dict[int, str] = {}
            entries: list[dict[str, Any]] = []
            model = None
            for name in sorted(names):
                client = replace(self.clients[name], memory={})
                visits = [one for one in self._rounds.everything.visits if one.client_id == name]
                due = predict_payloads(self.algorithm, visits, client, state)
                sent[name] = _Sent(client, [], due, [])
                for visit in visits:
                    message, num_bytes = self._down(sent[name], visit, state)
                    label = None
                    if message is not None:
                        label = labels.setdefault(id(message), f"p{len(labels)}")
                        payloads[label] = (
                            write_payload(self.channel.message_down(message))
                            if message is not state
                            else self._message(state)
                        )
                        model = label if message is state else model
                    entries.append({"client": name, "label": visit.label, "payload": label})
                    sent[name].bytes_down.append(num_bytes)
            fields = {
                "visits": entries,
                "model": model,
                "rates": self._rates,
                "algorithm": self.algorithm.tell(names),
            }
            parcels[node] = self._parcel(self.rounds_done, sorted(names), fields, payloads)
        return sent, parcels

    def _down(self, sent: _Sent, visit: Visit, state: State) -> tuple[State | None, int]:
        """Begin a visit at the server; return the state that goes down, None for nothing, and its bytes."""
        before = sent.visitings[-1] if sent.visitings else None
        message = self.algorithm.send(visit, sent.client, state)
        received: State = before.received if before else {}
        num_bytes = 0
        if message is not None:
            payload = self.channel.down(message, sent.client)
            received, num_bytes = payload.state, payload.num_bytes
        visiting = self.algorithm.start_visit(visit, sent.client, received)
        visiting.before = before
        sent.visitings.append(visiting)
        return message, num_bytes

    def _read(self, answer: Parcel | Failure, sent: _Sent) -> _Arrived:
        """Return a client's work of the round; raise Refused for anything that is not what was due, and count it."""
        if isinstance(answer, Failure):
            raise Refused(answer.reason)
        try:
            return self._checked(answer, sent)
        except Refused as error:
            self.nodes.count_refused(str(error))
            raise

    def _checked(self, answer: Parcel, sent: _Sent) -> _Arrived:
        """Return a client's work of the round; raise Refused for anything that is not what was due."""
        entries = [one for one in value_of(answer.header, "visits", list) if isinstance(one, dict)]
        own = [one for one in entries if one.get("client") == sent.client.id]
        if [one.get("label") for one in own] != [one.visit.label for one in sent.visitings]:
            raise Refused(f"client {sent.client.id} has made other visits than it was asked for")
        found = _Arrived([], [], [], [], "")
        for entry, visiting, due in zip(own, sent.visitings, sent.due, strict=True):
            found.diverged = found.diverged or value_of(entry, "diverged", str)[:1000]
            steps, seconds = value_of(entry, "steps", int), value_of(entry, "seconds", (int, float))
            loss = None if entry.get("loss") is None else float(value_of(entry, "loss", (int, float)))
            if not 0 <= steps < MOST_STEPS or seconds < 0:
                raise Refused(f"client {sent.client.id} has made {steps} steps in {seconds} s")
            found.works.append(Work(steps, 0.0, loss, float(seconds)))
            found.metrics.append(_metrics(entry))
            if found.diverged:
                continue
            name = entry.get("payload")
            data = b"" if name is None else answer.payloads.get(name) if isinstance(name, str) else None
            if data is None:
                raise Refused(f"the payload of client {sent.client.id} is missing")
            found.movements.append(self._movement(data, entry, visiting, due))
            found.bytes_up.append(len(data))
        return found

    def _movement(self, data: bytes, entry: Mapping[str, Any], visiting: Visiting, due: Payloads) -> State:
        """Return the movement in a payload."""
        names = [*due.up]
        if entry.get("names") is not None:
            given = value_of(entry, "names", list)
            names = [name for name in due.up if name in given]
            if len(names) != len(given):
                raise Refused("it sends tensors that are not due")
        shapes = {name: due.up[name].shape for name in names}
        received = {name: visiting.received[name] for name in names if name in visiting.received}
        layout = _up_layout(self.channel, tuple((n, s, n in received) for n, s in shapes.items()))
        message = read_payload(data, layout)
        if not all(is_finite(value) for value in message.values() if value.is_floating_point()):
            raise Refused("what it sends is not finite")
        try:
            movement = self.channel.read_up(message, received, shapes)
        except (ValueError, RuntimeError, IndexError, KeyError) as error:
            raise Refused(f"what it sends cannot be decoded: {error}") from error
        if not all(is_finite(value) for value in movement.values()):
            raise Refused("what it sends is not finite")
        return movement

    def _take_work(self, trainer: L.Trainer, under_way: OpenRound, sent: _Sent, arrived: _Arrived) -> None:
        """Add up a client's work of the round."""
        name, contributions = sent.client.id, under_way.contributions
        examples = self.clients[name].num_examples
        if arrived.diverged:
            contributions.leave_out(name, Diverged(arrived.diverged))
        for place, visiting in enumerate(sent.visitings):
            work, reason, up = arrived.works[place], "", 0
            if not arrived.diverged:
                up = arrived.bytes_up[place]
                try:
                    movement = arrived.movements[place]
                    update = under_way.exchange.arrived(visiting, movement, visiting.start, work)
                    contributions.add(visiting.visit, update, {}, examples)
                    under_way.training.add(name, arrived.metrics[place])
                except Diverged as why:
                    contributions.leave_out(name, why)
            if name in contributions.diverged:
                under_way.training.leave_out(name)
                reason = DIVERGED
            row = visit_row(self.rounds_done, visiting, examples, work, sent.bytes_down[place], up, reason)
            self.visit_records.append(row)
            under_way.exchange.call_on_upload(trainer.callbacks)  # type: ignore[attr-defined]
        if name not in contributions.diverged:
            self.last[name] = self.rounds_done

    # Checkpoints

    def remembered(self) -> dict[str, Any]:
        """Return what the loop returns, and what a server that goes on has to know of its nodes."""
        return super().remembered() | {"nodes": {"run": self.nodes.run, "last": dict(self.last)}}

    def state_dict(self) -> dict[str, Any]:
        """Return the loop's part of a checkpoint; nodes keep what this one and the one before it need."""
        state = super().state_dict()
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
        self.nodes.run, self.last = state_dict["nodes"]["run"], dict(state_dict["nodes"]["last"])
        self._saved = self._saved_before = dict(self.last)


def dropped_row(round_idx: int, client_id: str, reason: str, bytes_down: int, bytes_up: int) -> Record:
    """Return the row of a client that was asked and did not get through."""
    return {
        **{"round": round_idx, "client": client_id, "split": "train", "steps": 0, "examples": 0, "loss": ""},
        **{"bytes_down": bytes_down, "bytes_up": bytes_up, "seconds": 0.0, "reason": reason},
    }


@lru_cache(maxsize=64)
def _up_layout(channel: Channel, due: tuple[tuple[str, torch.Size, bool], ...]) -> Layout:
    """Return names, shapes and types of what a reply is sent as; ``due``: name, shape, and whether it was received."""
    reply = {name: torch.zeros(shape) for name, shape, _ in due}
    received = {name: reply[name] for name, _, known in due if known}
    with torch.random.fork_rng(devices=[]):  # a size must not change what is drawn
        return layout_of(channel.message_up(received, reply, Client("", 1, 1.0)))


def _metrics(entry: Mapping[str, Any]) -> dict[str, tuple[float, int]]:
    """Return sums and counts of a visit's training metrics."""
    found = {}
    for name, pair in value_of(entry, "training", dict).items():
        if not isinstance(pair, list) or len(pair) != 2 or len(name) > 100:
            raise Refused("its training metrics are no sums and counts")
        total, count = pair
        fine = isinstance(total, (int, float)) and isinstance(count, int) and not isinstance(count, bool)
        if not fine or not math.isfinite(total) or not 0 < count < MOST_STEPS:
            raise Refused("its training metrics are no sums and counts")
        found[name] = (float(total), count)
    return found


def _losses(header: Mapping[str, Any], client_id: str, adapters: int) -> list[np.ndarray]:
    """Return a client's losses under each adapter."""
    own = value_of(header, "losses", dict).get(client_id)
    if not isinstance(own, list) or len(own) != adapters:
        raise Refused(f"the losses of client {client_id} are missing")
    for each in own:
        if (
            not isinstance(each, list)
            or not each
            or not all(isinstance(one, float) and math.isfinite(one) for one in each)
        ):
            raise Refused(f"the losses of client {client_id} are no numbers")
    return [np.array(each, dtype=np.float64) for each in own]
