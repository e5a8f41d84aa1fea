"""Client's half of the loop: the visits of one round to the clients of a node, in a Lightning trainer of one epoch.

The loop makes a visit as in the emulator. Here are only its ends: the client's tensors come out of a message, and its reply
goes into one.
"""

import json
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Protocol, runtime_checkable

import lightning as L
import numpy as np

from fedlight.callbacks.loop.federated_loop import FederatedLoop
from fedlight.callbacks.loop.parts.optimizers import federated_parameters
from fedlight.callbacks.loop.plan import RoundPlanner
from fedlight.callbacks.loop.ranks.ranks import sum_of_bits
from fedlight.callbacks.loop.run import Run
from fedlight.callbacks.loop.visits.round import OpenRound
from fedlight.callbacks.loop.visits.visit import OpenGroup, RankedExchange, use_first_adapter
from fedlight.federation.client import (
    Channel,
    Client,
    Payload,
    State,
    Update,
    Visit,
    Visiting,
    Work,
    read,
    write,
)
from fedlight.federation.lora.ranks import pad_like, rank_of
from fedlight.federation.payloads import Payloads, predict_payloads
from fedlight.federation.protocols import LossesOn
from fedlight.flower.loops.validation import Validated, validate_clients
from fedlight.flower.messages import Refused, layout_of, read_payload, write_payload
from fedlight.support.settings_record import digest


@runtime_checkable
class TellsClients(Protocol):
    """Algorithm whose clients' hooks need something of its attributes at the server."""

    def tell(self, client_ids: Sequence[str]) -> dict[str, Any]:
        """Return the values (JSON) that the hooks of these clients need, once a round has begun; no other client's name."""

    def hear(self, told: Mapping[str, Any]) -> None:
        """Take what `tell` returned at the server, before the visits of a round are planned."""


class Answered(Exception):
    """The node has done its task, so nothing is trained."""


@dataclass(frozen=True)
class Task:
    """A server's task for a node in a round.

    Attributes:
        action: ``join``, ``prepare``, ``losses``, ``visit`` or ``validate``.
        round_idx: the round.
        num_rounds: rounds of the whole run.
        shares: client that takes part -> its share of all examples.
        model: payload of the whole global state, where it comes.
        received: client and visit's label -> payload that it receives; None for one that it has by then.
        algorithm: values of the server's algorithm for its clients' ends.
        rates: settings of optimizers and schedules at the beginning of the round.
        losses_on: examples that score clients, and names of adapters.
    """

    action: str
    round_idx: int = 0
    num_rounds: int = 1
    shares: Mapping[str, float] = field(default_factory=dict)
    model: bytes | None = None
    received: Mapping[tuple[str, str], bytes | None] = field(default_factory=dict)
    algorithm: Mapping[str, Any] = field(default_factory=dict)
    rates: Mapping[str, Any] | None = None
    losses_on: tuple[LossesOn, Sequence[str]] = ("val", ())


@dataclass(frozen=True)
class Reply:
    """Payload that a visit sends, and its tensors' names where these are not all that were due."""

    payload: bytes
    names: list[str] | None


class NodePlanner(RoundPlanner):
    """Plan of the clients that the server asks."""

    given: Sequence[str] = ()

    def asked(self, round_idx: int) -> list[Client]:
        return [self.clients[name] for name in self.given]


class NodeRun(Run):
    """Run whose global state has come over the channel already."""

    def broadcast(self, state: State) -> Payload:
        """Return the state, which is as the clients have received it."""
        return Payload(state, 0)


class NodeExchange(RankedExchange):
    """Messages of a node's clients: the loop has the task, and takes the replies; ``payloads``: by client and label."""

    def __init__(self, loop: "NodeLoop", payloads: Mapping[tuple[str, str], Payloads], state: State) -> None:
        super().__init__(loop.algorithm, loop.channel, loop.seed, loop.rounds_done, state)
        self._payloads, self._loop = payloads, loop

    def _receive(self, visit: Visit, client: Client) -> tuple[State | None, int]:
        key, given = (visit.client_id, visit.label), self._loop.task.received
        if key not in given:
            raise Refused(f"the server did not plan the visit {visit.label!r} to client {visit.client_id}")
        if (data := given[key]) is None:
            return None, 0
        received = _read_down(self.channel, data, self._payloads[key].down)
        return pad_like(received, self.state, rank_of(client)), len(data)

    def _carry_up(self, received: State, reply: State, client: Client, others: Set[str]) -> Payload:
        message = self.channel.message_up(received, reply, client, others)
        self._sent = Reply(write_payload(message), sorted(reply))
        shapes = {name: value.shape for name, value in reply.items()}
        return Payload(self.channel.read_up(message, received, shapes), len(self._sent.payload))

    def arrived(self, visiting: Visiting, movement: State, trained: State, work: Work) -> Update | None:
        # The server does the same with its copy of the client; this copy alone has the values that are remembered.
        update = self.algorithm.finish_visit(visiting, movement, work)
        if self._loop.secure and update is not None:
            # The elements of a masked sum have no names: all nodes put them in the order of the tensors' names.
            return replace(update, movement=dict(sorted(update.movement.items())))
        key = visiting.visit.client_id, visiting.visit.label
        all_due = self._sent.names == sorted(self._payloads[key].up)
        self._loop.replies[key] = replace(self._sent, names=None) if all_due else self._sent
        return None


def _read_down(channel: Channel, data: bytes, due: State) -> State:
    """Return the state in a payload for a state of the shapes of ``due``."""
    # A codec's layout depends on shapes and types alone, so encoded zeros have that of the message.
    zeros = {name: value.new_zeros(value.shape, device="cpu") for name, value in due.items()}
    message = read_payload(data, layout_of(channel.message_down(zeros)))
    return channel.read_down(message, {name: value.shape for name, value in due.items()})


class NodeLoop(FederatedLoop):
    """Loop of a node for one round; `give` has to be called before the trainer's ``fit``.

    Attributes:
        replies: client and visit's label -> reply of the visit.
        losses: client -> losses under each adapter that was asked for.
        validated: client -> results of its validation rows.
        sums: client -> sums and counts of its training metrics, for each visit.
        diverged: client -> why its work of the round is left out.
        lost: client -> why it cannot be visited: its memory is gone or damaged.
        summed: with secure aggregation, the weighted sum over the node's clients, as `WeightedSum.partial` gives it.
        shapes: of its tensors, by name.
    """

    planner_type, run_type = NodePlanner, NodeRun

    def give(self, task: Task, memory: Any, secure: bool = False) -> None:
        """Take the task, and the store of the clients' memories; ``secure``: whether their replies are summed here."""
        self.task, self.memory, self.secure = task, memory, secure
        self.privacy = None  # the server counts the rounds
        self.summed: dict[str, list[Any]] = {"sums": [], "divisors": []}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.rounds_done = task.round_idx
        self.replies: dict[tuple[str, str], Reply] = {}
        self.losses: dict[str, list[np.ndarray]] = {}
        self.validated: dict[str, Validated] = {}
        self.sums: dict[str, list[Any]] = {}
        self.diverged: dict[str, str] = {}
        self.lost: dict[str, str] = {}
        try:
            if isinstance(self.algorithm, TellsClients):
                self.algorithm.hear(task.algorithm)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise Refused(
                f"what the server's algorithm tells its clients is not understood: {error}"
            ) from error

    @property
    def state_key(self) -> str:
        return FederatedLoop.__qualname__  # the parts of a checkpoint have the same names in the emulator

    def _meet_clients(self, trainer: L.Trainer) -> None:
        super()._meet_clients(trainer)
        unknown = [name for name in self.task.shares if name not in self.clients]
        if unknown:
            raise Refused(f"client {unknown[0]} has no rows on this node")
        # A node has a part of the examples, so it cannot work out a client's share of all.
        for name, share in self.task.shares.items():
            self.clients[name] = replace(self.clients[name], share=share)
        for name in self.task.shares if self.task.action == "visit" else ():
            try:
                self.memory.load(name)
            except Refused as error:
                self.lost[name] = str(error)
        assert isinstance(self._rounds, NodePlanner)
        self._rounds.given = sorted(name for name in self.task.shares if name not in self.lost)
        if self.lost and not self._rounds.given:  # there is nothing to train
            raise Answered

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Take the model and the rates, and plan the round; end here if nothing is to be trained."""
        super().on_fit_start(trainer, pl_module)
        if self.task.action == "losses":
            losses = self._run.adapter_losses(*self.task.losses_on)
            self.losses = {client: [by_client[client] for by_client in losses] for client in self.clients}
        if self.task.action == "validate":
            use_first_adapter(pl_module)  # as in the emulator; visits may have left another one
            self.validated = validate_clients(trainer, pl_module, [*self.task.shares])
        if self.task.action != "visit":
            raise Answered

    def _plan_round(self, trainer: L.Trainer) -> None:
        if self.rounds_done != self.task.round_idx:  # the round is over: the loop would plan the next one
            return
        if self.task.model is not None:
            write(_read_down(self.channel, self.task.model, read(self._parameters)), self._parameters)
        if self.task.action in ("prepare", "visit"):
            super()._plan_round(trainer)
            put_rates(trainer, self.task.rates)

    def _say_how_it_goes_on(self, trainer: L.Trainer) -> None:
        """Say nothing: rounds and rates are the server's."""

    def _start_algorithm(self) -> None:
        """Do nothing: the round is begun by the server."""

    def _make_exchange(self, state: State, keeps_factors: bool) -> NodeExchange:
        payloads: dict[tuple[str, str], Payloads] = {}
        for client in self._rounds.cohort:
            visits = [visit for visit in self._rounds.schedule.visits if visit.client_id == client.id]
            remembering = replace(client, memory=self.memory.load(client.id))
            due = predict_payloads(self.algorithm, visits, remembering, state)
            payloads |= {
                (visit.client_id, visit.label): each for visit, each in zip(visits, due, strict=True)
            }
        self.shapes = {name: tuple(value.shape) for name, value in sorted(state.items())}
        return NodeExchange(self, payloads, state)

    def _finish_round(self, trainer: L.Trainer, module: L.LightningModule, under_way: OpenRound) -> None:
        """Keep the results of the visits; the server's step is taken elsewhere."""
        self.sums = under_way.training.partial()
        self.diverged = dict(under_way.contributions.diverged)
        for piece in under_way.contributions.pieces() if self.secure else ():
            for name, parts in piece["updates"].items():
                self.summed[name] += parts
        write(under_way.opened, self._parameters)  # further messages must not find a client's weights
        self.buffers.close_round()
        self._optimizers.forget(trainer.optimizers)
        self.group, self._round = OpenGroup(), None
        self.rounds_done += 1
        trainer.should_stop = True  # by max_epochs it would train all rounds, a number that a module may read


def base_digest(trainer: L.Trainer, module: L.LightningModule) -> str:
    """Return a digest of what both ends need alike: weights that are not sent, shapes of others, dropout, the tokenizer."""
    sent = federated_parameters(trainer, module)
    base = {name: p for name, p in module.named_parameters() if name not in sent and not p.is_meta}
    layers = [*module.named_modules()]
    scales = {name: getattr(layer, "scaling", None) for name, layer in layers}
    scales = {name: scale for name, scale in scales.items() if isinstance(scale, dict)}  # of LoRA, by adapter
    dropout = {name: layer.extra_repr() for name, layer in layers if "Dropout" in type(layer).__name__}
    tokenizer: Any = getattr(module, "tokenizer", None)
    words = sorted(tokenizer.get_vocab().items()) if hasattr(tokenizer, "get_vocab") else None
    return digest(
        {name: sum_of_bits(value) for name, value in sorted(base.items())},
        {name: tuple(value.shape) for name, value in sorted(sent.items())},
        *(scales, dropout, words, getattr(tokenizer, "chat_template", None)),
    )


def rates_of(trainer: L.Trainer) -> dict[str, Any]:
    """Return the settings of the optimizers' groups and the states of schedules, as plain values."""
    groups = [
        [{name: value for name, value in group.items() if name != "params"} for group in each.param_groups]
        for each in trainer.optimizers
    ]
    states = [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs]
    return {"groups": _plain(groups), "schedules": _plain(states)}


def put_rates(trainer: L.Trainer, rates: Mapping[str, Any] | None) -> None:
    """Give optimizers and schedules what `rates_of` found at the server.

    Raises:
        Refused: the server has other optimizers or schedules, or other settings of them.
    """
    if rates is None:
        return
    here = rates_of(trainer)
    for group in chain(*here["groups"]):
        group.pop("fused", None)  # `use_fused_kernels` sets it on a CPU, and the server may have a GPU
    if not _is_alike(rates, here):
        raise Refused("the server has other optimizers or schedules than the node: give both the same config")
    for optimizer, groups, known in zip(trainer.optimizers, rates["groups"], here["groups"], strict=True):
        for group, values, names in zip(optimizer.param_groups, groups, known, strict=True):
            # JSON has no tuples. Nothing that the node itself does not have is taken, such as parameters.
            group |= {n: tuple(values[n]) if isinstance(group[n], tuple) else values[n] for n in names}
    for config, state in zip(trainer.lr_scheduler_configs, rates["schedules"], strict=True):
        # Keys of a dictionary, such as the milestones of a schedule, would come back as texts; they do not change either.
        kept = config.scheduler.state_dict().items()
        names = [name for name, value in kept if not isinstance(value, (dict, tuple))]
        config.scheduler.load_state_dict({name: state[name] for name in names})


def _is_alike(given: Any, here: Any) -> bool:
    """Return whether a value has all that ``here`` has, with values of the same types."""
    if isinstance(here, dict):
        return isinstance(given, dict) and all(n in given and _is_alike(given[n], v) for n, v in here.items())
    if isinstance(here, list):
        pairs = zip(given, here, strict=False) if isinstance(given, list) else ()
        return isinstance(given, list) and len(given) == len(here) and all(_is_alike(*pair) for pair in pairs)
    numbers = isinstance(given, (int, float)) and isinstance(here, (int, float))
    return numbers or type(given) is type(here)


def _plain(value: Any) -> Any:
    """Return a value as JSON carries it; raise ValueError for one that it cannot."""
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"a setting of the optimizers or schedules is not sent to nodes ({error}): take plain numbers, such as "
            "capturable=false, and a schedule that keeps finite numbers alone, which ReduceLROnPlateau does not"
        ) from error
