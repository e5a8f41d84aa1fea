"""Transport over Flower's grid, with replies of a bounded size.

Flower's client holds a reply in memory before an app sees it: each object of it, and then arrays, which may name one chunk
many times. `Meter` looks at each response of the SuperLink before its body is read.
"""

import json
import math
import threading
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from flwr.app import Array, Message, MessageType
from flwr.proto.message_pb2 import PullObjectRequest, PullObjectResponse
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import (
    get_object_body,
    get_object_head_values_from_object_content,
)

from fedlight.flower.messages import Bounds, Parcel, Refused
from fedlight.flower.records import from_record, to_record

POLL_SECONDS = 1.0
LEAST_BYTES = 256
"""What a response counts at least, so that a reply cannot have any number of empty objects."""

BROKEN = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, AssertionError, RuntimeError)
"""What Flower's readers raise for a broken object; a SuperLink that is gone raises an error of its HTTP client."""


class Meter:
    """Hook of Flower's HTTP client that refuses a reply which is too large.

    Args:
        grid: Flower's grid; one without HTTP, that of a simulation, has its replies in memory already.
    """

    def __init__(self, grid: Grid) -> None:
        self._lock = threading.Lock()
        self.allow(0, Bounds())
        # Flower has no public way to its HTTP client; tests notice where these names change.
        if (client := getattr(grid, "_runtime_client", None)) is not None:
            client._client.event_hooks["response"].append(self)

    def allow(self, due: int, bounds: Bounds) -> None:
        """Start counting a reply; tensors of ``due`` bytes are expected in it."""
        self._read, self._whole, self._due, self._bounds = 0, 0, due, bounds
        self._chunks: dict[str, int] = {}
        self._used: Counter[str] = Counter()

    def __call__(self, response: Any) -> None:
        """Count a response before its body is read, and then the memory of its object.

        Raises:
            Refused: it is too much.
        """
        action = response.request.url.path.rsplit("/", 1)[-1]
        if not response.is_success or action not in ("pull-messages", "pull-object"):
            return  # other threads send heartbeats and logs
        length = response.headers.get("content-length")  # a proxy may leave it out
        num_bytes = len(response.read()) if length is None else int(length)
        with self._lock:
            self._read += max(num_bytes, LEAST_BYTES)
            self._bounds.refuse_larger(self._read, self._due)
        if action == "pull-object":
            name = PullObjectRequest.FromString(response.request.content).object_id
            content = PullObjectResponse.FromString(response.read()).object_content
            with self._lock:
                self._count(name, content)

    def _count(self, name: str, content: bytes) -> None:
        if not content:  # not there yet
            return
        kind, children, _ = get_object_head_values_from_object_content(content)
        if kind == "ArrayChunk":
            self._chunks[name] = len(content)
            self._whole += len(content) * self._used[name]
        elif kind == "Array":
            named = json.loads(get_object_body(content, Array))["arraychunk_ids"]
            # Objects come in any order: a chunk counts when the later of the two, it or the array that names it, is there.
            for chunk, number in Counter(children[i] for i in named).items():
                self._used[chunk] += number
                self._whole += self._chunks.get(chunk, 0) * number
        self._bounds.refuse_larger(self._whole, self._due)


class OverGrid:
    """Transport over Flower's grid.

    Args:
        grid: Flower's grid.
        bounds: most that is taken of one node.
    """

    def __init__(self, grid: Grid, bounds: Bounds | None = None) -> None:
        self._grid, self._bounds, self._meter = grid, bounds or Bounds(), Meter(grid)

    def nodes(self) -> list[int]:
        """Return the nodes that are connected."""
        return sorted(self._grid.get_node_ids())

    def ask(self, parcels: Mapping[int, Parcel], timeout: float | None) -> dict[int, Parcel | Refused]:
        """Send each node its parcel, and return the replies within ``timeout`` seconds; then the messages expire."""
        waiting: dict[str, int] = {}
        for node, parcel in parcels.items():  # one by one: replies are as well, each with its own bound
            message = Message(to_record(parcel), node, MessageType.TRAIN, ttl=timeout)
            waiting |= {name: node for name in self._grid.push_messages([message]) if name}
        end = time.monotonic() + (math.inf if timeout is None else timeout)
        answers: dict[int, Parcel | Refused] = {}
        while waiting and time.monotonic() < end:
            for name, node in [*waiting.items()]:
                if (reply := self._pull(name, parcels[node])) is not None:
                    answers[node] = reply
                    del waiting[name]
            if waiting:
                time.sleep(POLL_SECONDS)
        return answers

    def _pull(self, message: str, asked: Parcel) -> Parcel | Refused | None:
        """Return the reply to a message, why it is not read, or None if there is none yet."""
        self._meter.allow(asked.due_bytes, self._bounds)
        try:
            reply = next(iter(self._grid.pull_messages([message])), None)
            if reply is None:
                return None
            if reply.has_error():
                return Refused(f"the node has failed: {reply.error.reason or reply.error.code}")
            parcel = from_record(reply.content, self._bounds.header_bytes)
        except Refused as error:
            return Refused(f"refused: {error}")
        except BROKEN as error:
            return Refused(f"refused: Flower cannot read it ({type(error).__name__}: {error})")
        refused: Any = parcel.header.get("refused")
        return parcel if refused is None else Refused(f"the node refuses: {str(refused)[:2000]}")
