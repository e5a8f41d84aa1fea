"""Flower's ServerApp: the server of a deployment, and its transport over Flower's grid, with replies of a bounded size.

Flower's client holds a reply in memory before an app sees it: each object of it, and then arrays, which may name one chunk
many times. `Meter` looks at each response of the SuperLink before its body is read.
"""

import importlib.metadata
import json
import threading
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from flwr.app import Context, Message, MessageType
from flwr.serverapp import Grid, ServerApp

from fedlight.flower.messages import Bounds, Parcel, Refused
from fedlight.flower.records import from_record, to_record
from fedlight.flower.server import serve
from fedlight.flower.settings import bounds_of, config_arguments, is_secure, number_of

POLL_SECONDS = 1.0
TESTED = "flwr>=1.41,<1.43"
"""Versions of Flower that the tests have run with."""
LEAST_BYTES = 256
"""What a response counts at least, so that a reply cannot have any number of empty objects."""
BROKEN = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, AssertionError, RuntimeError)
"""What Flower's readers raise for a broken object; a SuperLink that is gone raises an error of its HTTP client."""


class Meter:
    """Hook of Flower's HTTP client that refuses a reply which is too large.

    A simulation is not measured, since its grid has the replies in memory already.

    Raises:
        ValueError: Flower's HTTP client is not at the place where it was in the tested versions.
    """

    def __init__(self, grid: Grid) -> None:
        self._lock = threading.Lock()
        self.allow(0, Bounds())
        if type(grid).__name__ == "InMemoryGrid":
            return
        try:  # Flower has no public way to its HTTP client
            grid._runtime_client._client.event_hooks["response"].append(self)
        except (AttributeError, KeyError) as error:
            raise ValueError(
                f"replies cannot be measured over flwr {importlib.metadata.version('flwr')}: install {TESTED}"
            ) from error

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
            name, content = third_field(response.request.content).decode(), third_field(response.read())
            with self._lock:
                self._count(name, content)

    def _count(self, name: str, content: bytes) -> None:
        if not content:  # not there yet
            return
        kind, children, body = parts_of(content)
        if kind == "ArrayChunk":
            self._chunks[name] = len(content)
            self._whole += len(content) * self._used[name]
        elif kind == "Array":
            named = json.loads(body)["arraychunk_ids"]
            # Objects come in any order: a chunk counts when the later of the two, it or the array that names it, is there.
            for chunk, number in Counter(children[i] for i in named).items():
                self._used[chunk] += number
                self._whole += self._chunks.get(chunk, 0) * number
        self._bounds.refuse_larger(self._whole, self._due)


def third_field(message: bytes) -> bytes:
    """Return the bytes in field 3 of a message in protobuf's encoding, empty without it.

    Flower has the name of an object there in a request, and the object itself in the response. All other fields of both are
    whole numbers or bytes. Encoding: https://protobuf.dev/programming-guides/encoding.

    Raises:
        ValueError: a field is of another kind.
        IndexError: the message ends too early.

    Examples:
        >>> third_field(bytes([8, 1, 26, 3]) + b"abc" + bytes([16, 172, 2]))
        b'abc'
    """
    place, value = 0, b""

    def number() -> int:
        nonlocal place
        total, shift = 0, 0
        while True:  # seven bits a byte, the lowest first
            byte = message[place]
            place, total, shift = place + 1, total | (byte & 127) << shift, shift + 7
            if byte < 128:
                return total

    while place < len(message):
        key, size = number(), number()
        if key & 7 not in (0, 2):
            raise ValueError(f"a field has the kind {key & 7}")
        if key & 7 == 2:  # bytes after their length, else a number that is read
            value = message[place : place + size] if key >> 3 == 3 else value
            place += size
    return value


def parts_of(content: bytes) -> tuple[str, list[str], bytes]:
    """Return the kind of one of Flower's objects, the names of its children, and its body.

    Examples:
        >>> parts_of(b"Array 6a,7b 4" + bytes(1) + b"body")
        ('Array', ['6a', '7b'], b'body')
    """
    head, _, body = content.partition(b"\0")
    kind, children, _ = head.decode().split(" ")
    return kind, children.split(",") if children else [], body


class OverGrid:
    """Transport over Flower's grid, with bounds on what is taken of one node."""

    def __init__(self, grid: Grid, bounds: Bounds | None = None) -> None:
        self._grid, self._bounds, self._meter = grid, bounds or Bounds(), Meter(grid)

    def nodes(self) -> list[int]:
        """Return the nodes that are connected."""
        return sorted(self._grid.get_node_ids())

    def push(self, node: int, parcel: Parcel, timeout: float | None) -> str:
        """Send a node its parcel; return the message's id, empty if the SuperLink does not take it."""
        # One by one: replies are as well, each with its own bound.
        message = Message(to_record(parcel), node, MessageType.TRAIN, ttl=timeout)
        return next(iter(self._grid.push_messages([message])), None) or ""

    def pull(self, asked: Mapping[str, Parcel], seconds: float) -> dict[str, Parcel | Refused]:
        """Wait at most ``seconds`` for replies to some messages, and return those that are there."""
        end = time.monotonic() + seconds
        while True:
            pulled = {name: self._pull(name, parcel) for name, parcel in asked.items()}
            there = {name: reply for name, reply in pulled.items() if reply is not None}
            if there or (left := end - time.monotonic()) <= 0:
                return there
            time.sleep(min(POLL_SECONDS, left))

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


app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run all rounds, or go on from the newest checkpoint."""
    run: dict[str, Any] = dict(context.run_config)
    arguments, bounds = config_arguments(run), bounds_of(run)
    serve(
        arguments,
        OverGrid(grid, bounds),
        min_clients=int(number_of(run, "min-clients", 0, whole=True)),
        deadline_seconds=number_of(run, "deadline-seconds", 0) or None,  # an app's settings have no null
        wait_seconds=number_of(run, "wait-seconds", 600),
        secure=is_secure(run),
        bounds=bounds,
    )
