"""Replies of nodes as the server reads them: everything is checked before anything of a client is used.

Names, shapes, types and lengths are known beforehand, numbers have ranges, and all else is refused.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Size

from fedlight.federation.client import Channel, Client, State, Visiting, Work
from fedlight.federation.lora.ranks import cut_to_rank, pad_like
from fedlight.federation.payloads import Payloads
from fedlight.flower.messages import (
    Bounds,
    Layout,
    Parcel,
    Refused,
    layout_of,
    payload_bytes,
    read_payload,
    value_of,
)
from fedlight.flower.nodes import shown

MOST_STEPS = 10**9
"""More optimizer steps of a visit, examples or seconds are no count."""
MOST_VALUE = 2.0**63
"""Largest magnitude of a parameter or a movement: the sum of a round and its squares stay finite."""


@dataclass
class Sent:
    """Visits of one client that are under way at its node, in order, with the reply that is due from each.

    Attributes:
        client: the client, whose memory has names and shapes alone: values stay with its node.
        due: meta tensors that each visit receives, sends and leaves in the client's memory.
        visitings: its visits.
        bytes_down: bytes that each visit has received.
    """

    client: Client
    due: list[Payloads]
    visitings: list[Visiting] = field(default_factory=list)
    bytes_down: list[int] = field(default_factory=list)


@dataclass
class Arrived:
    """Work of a client as it has reached the server, all of it checked."""

    movements: list[State]
    works: list[Work]
    bytes_up: list[int]
    metrics: list[dict[str, tuple[float, int]]]
    diverged: str


def check_reply(answer: Parcel, asked: Collection[str]) -> dict[str, str]:
    """Return why clients could not be visited, by client.

    Raises:
        Refused: the reply has other clients than ``asked``, or other payloads than its visits name.
    """
    named: list[str] = []
    for entry in value_of(answer.header, "visits", list):
        if not isinstance(entry, dict) or not isinstance(entry.get("client"), str):
            raise Refused("its visits are no list of visits")
        if entry["client"] not in asked:
            raise Refused(f"it has a visit of client {entry['client']!r:.60}, which it was not asked for")
        if isinstance(entry.get("payload"), str):
            named.append(entry["payload"])
    if sorted(named) != sorted(answer.payloads):
        raise Refused("its payloads are not one for each visit that names one")
    lost = value_of(answer.header, "lost", dict, {})
    for name, reason in lost.items():
        if name not in asked or not isinstance(reason, str):
            raise Refused("what it says of lost clients is no reason by client")
    return {name: shown(reason) for name, reason in lost.items()}


def read_reply(
    answer: Parcel,
    sent: Sent,
    channel: Channel,
    state: State,
    most_metrics: int = Bounds.metrics,
    masked: bool = False,
) -> Arrived:
    """Return a client's work of the round, from a reply that `check_reply` has let through.

    If it is ``masked``, the node has sent the sum of its clients, and there is no movement of this one.

    Raises:
        Refused: something is not as due.
    """
    name = sent.client.id
    entries = [entry for entry in answer.header["visits"] if entry["client"] == name]
    if [entry.get("label") for entry in entries] != [each.visit.label for each in sent.visitings]:
        raise Refused(f"client {name} has made other visits than it was asked for")
    diverged = [shown(value_of(entry, "diverged", str)) for entry in entries]
    arrived = Arrived([], [], [], [], next(filter(None, diverged), ""))  # then none of its visits counts
    for entry, visiting, due in zip(entries, sent.visitings, sent.due, strict=True):
        steps, seconds = value_of(entry, "steps", int), value_of(entry, "seconds", (int, float))
        loss = None if entry.get("loss") is None else float(value_of(entry, "loss", (int, float)))
        if loss is not None and abs(loss) > MOST_VALUE:
            raise Refused(f"client {name} has a loss of {loss:g}")
        if not 0 <= steps < MOST_STEPS or not 0 <= seconds < MOST_STEPS:
            raise Refused(f"client {name} has made {steps} steps in {seconds} s")
        arrived.works.append(Work(steps, 0.0, loss, float(seconds)))
        arrived.metrics.append(sums_of(entry, "training", most_metrics))
        if arrived.diverged or masked:
            continue
        label = entry.get("payload")
        data = b"" if label is None else answer.payloads.get(label) if isinstance(label, str) else None
        if data is None:
            raise Refused(f"the payload of client {name} is missing")
        arrived.movements.append(_movement(data, entry, visiting, due, channel, state))
        arrived.bytes_up.append(len(data))
    return arrived


def _movement(
    data: bytes, entry: Mapping[str, Any], visiting: Visiting, due: Payloads, channel: Channel, state: State
) -> State:
    names = [*due.up]
    if entry.get("names") is not None:
        given = value_of(entry, "names", list)
        # An algorithm may leave out its own tensors, such as a control variate after a visit without a step.
        names = [name for name in due.up if name in given or name in state]
        if len(names) != len(given):
            raise Refused("it sends other tensors than are due")
    shapes = {name: due.up[name].shape for name in names}
    received = {name: visiting.received[name] for name in names if name in visiting.received}
    received = cut_to_rank(received, visiting.lora_rank)
    message = read_payload(data, _layout(names, visiting, due, channel))
    _refuse_odd_values(message)  # before a codec computes with them
    try:
        movement = channel.read_up(message, received, shapes)
    except (ValueError, RuntimeError, IndexError, KeyError) as error:
        raise Refused(f"what it sends cannot be decoded: {error}") from error
    _refuse_odd_values(movement)
    return pad_like(movement, state, visiting.lora_rank)


def due_bytes(sent: Sent, channel: Channel) -> int:
    """Return the bytes of the payloads that a client is due to send."""
    visits = zip(sent.visitings, sent.due, strict=True)
    layouts = [_layout([*due.up], visiting, due, channel) for visiting, due in visits]
    return sum(payload_bytes(layout) for layout in layouts)


def _layout(names: Sequence[str], visiting: Visiting, due: Payloads, channel: Channel) -> Layout:
    return _up_layout(channel, tuple((n, due.up[n].shape, n in visiting.received) for n in names))


def _refuse_odd_values(tensors: State) -> None:
    """Raise Refused for a number that is not finite, or too large for the sum of a round."""
    for value in tensors.values():
        if value.is_floating_point() and value.numel():
            largest = value.abs().max().item()  # NaN if there is one
            if not largest <= MOST_VALUE:
                raise Refused(f"what it sends holds {largest:g}, which is no weight of a model")


@lru_cache(maxsize=64)  # clients send alike, and only encoding shows the layout
def _up_layout(channel: Channel, due: tuple[tuple[str, Size, bool], ...]) -> Layout:
    """Return names, shapes and types of a reply's message; ``due``: name, shape, and whether it was received."""
    reply = {name: torch.zeros(shape) for name, shape, _ in due}
    received = {name: reply[name] for name, _, known in due if known}
    with torch.random.fork_rng(devices=[]):  # a size must not change random numbers
        return layout_of(channel.message_up(received, reply, Client("", 1, 1.0)))


def sums_of(entry: Mapping[str, Any], key: str, most: int) -> dict[str, tuple[float, int]]:
    """Return sums over examples and counts of the metrics under a key; raise Refused for anything else, or too many."""
    metrics, given = {}, value_of(entry, key, dict)
    if len(given) > most:
        raise Refused(
            f"it has {len(given):,} {key} metrics, more than max-metrics={most} in the app's settings"
        )
    for name, pair in given.items():
        if not isinstance(pair, list) or len(pair) != 2 or not 0 < len(name) <= 100 or not name.isprintable():
            raise Refused(f"its {key} metrics are no sums and counts")
        if "/dataloader_idx_" in name:  # Lightning would end the run
            raise Refused(f"its {key} metrics have the name {name!r:.60}, which cannot be logged")
        values = {"its sum": pair[0], "its count": pair[1]}
        total, count = value_of(values, "its sum", (int, float)), value_of(values, "its count", int)
        if not 0 < count < MOST_STEPS or abs(total) > MOST_VALUE:
            raise Refused(f"its {key} metrics have the sum {total:g} over {count} examples")
        metrics[name] = (float(total), count)
    return metrics


def read_made(answer: Parcel, clients: Sequence[str]) -> dict[str, int]:
    """Return how many examples each client keeps of those that it made; raise Refused for anything else."""
    counts = value_of(answer.header, "made", dict)
    for name in clients:
        if not 0 <= value_of(counts, name, int) < MOST_STEPS:
            raise Refused(f"client {name} has made {counts[name]} examples")
    return {name: counts[name] for name in clients}


def read_losses(
    answer: Parcel, clients: Sequence[str], adapters: int, by_example: bool
) -> dict[str, list[np.ndarray]]:
    """Return the losses of each client under each adapter, one without ``by_example``; raise Refused for anything else.

    A client without losses is left out.
    """
    given = value_of(answer.header, "losses", dict)
    losses = {}
    for name in clients:
        if name not in given:
            continue
        lists = given[name]
        if not isinstance(lists, list) or len(lists) != adapters or {type(each) for each in lists} != {list}:
            raise Refused(f"the losses of client {name} are missing")
        sizes = {len(each) for each in lists}
        if len(sizes) != 1 or sizes == {0} or (not by_example and sizes != {1}):
            raise Refused(f"the losses of client {name} are of other numbers of examples")
        for value in chain.from_iterable(lists):
            if not isinstance(value, float) or not abs(value) < MOST_VALUE:  # also NaN
                raise Refused(f"the losses of client {name} are no numbers")
        losses[name] = [np.array(each, dtype=np.float64) for each in lists]
    return losses
