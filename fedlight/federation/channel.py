"""Channel between server and client: its effect on a payload, and how many bytes it carries.

Bytes are those of a safetensors file with the payload, header included, which could really be sent, stored and read back. A
lossy payload has a handful of tensors, whatever the number of tensors in the state: names and shapes are known at both ends,
so only the values and the codecs' side tensors are sent.
"""

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Size

from fedlight.federation.client import Client, Diverged, Identity, Payload, State, movement, serialized_bytes
from fedlight.federation.codecs import Codec, Quantize
from fedlight.federation.privacy import ClipAndNoise

LOST = "wire"
"""Key in a client's memory of what its messages have lost so far."""


class Wire(Identity):
    """Channel that encodes with a chain of codecs, left to right, and decodes at the other end.

    Error feedback is that of the whole chain: the client keeps ``meant - decoded`` of each tensor (fp32) in
    ``client.memory[LOST]`` and adds it to its next movement, but for the tensors that `up` is told to leave out.

    Args:
        up: codecs of the client's movement, such as ``[TopK(0.1), Quantize("nf4")]``; lossless without any.
        down: codecs of the server's parameters; lossless without any.

    Raises:
        ValueError: the codecs do not fit together; the message says why.

    Examples:
        >>> wire = Wire(up=Quantize("nf4"))
        >>> state = {"w": torch.zeros(64, 256)}
        >>> wire.down_bytes(state), wire.up_bytes(state)
        (65608, 9360)
    """

    def __init__(
        self, up: Codec | list[Codec] | None = None, down: Codec | list[Codec] | None = None
    ) -> None:
        self.up_codecs = _chain(up)
        self.down_codecs = _chain(down)
        _refuse("up", self.up_codecs)
        _refuse("down", self.down_codecs)
        for codec in self.down_codecs:
            if codec.movements_only:
                raise ValueError(
                    f"channel.down: {type(codec).__name__} is for movements and would ruin the parameters "
                    "that go down: give it to channel.up, and Quantize to channel.down"
                )
        self.error_feedback = any(codec.error_feedback for codec in self.up_codecs)
        self._last_down: tuple[State, Payload] | None = None
        self._measured: dict[tuple[str, tuple[tuple[str, Size], ...]], int] = {}

    def down(self, state: State, client: Client) -> Payload:
        """Return the parameters as they arrive, fp32; all clients share one payload of one state, so it must not be changed.

        Raises:
            Diverged: a parameter is not finite.
        """
        if not self.down_codecs:
            return super().down(state, client)
        if self._last_down is None or self._last_down[0] is not state:  # one state goes to many clients
            self._last_down = state, super().down(state, client)
        return self._last_down[1]

    def message_down(self, state: State) -> State:
        """Return the tensors that go down; raise Diverged if a parameter is not finite."""
        return _packed(state, self.down_codecs, "down", "the server") if self.down_codecs else state

    def read_down(self, message: State, shapes: Mapping[str, Size]) -> State:
        return unpack(message, shapes, self.down_codecs) if self.down_codecs else message

    def message_up(
        self, received: State, trained: State, client: Client, without_feedback: Collection[str] = ()
    ) -> State:
        """Return the tensors that go up, and keep their loss with the client; raise Diverged if a movement is not finite."""
        if not self.up_codecs:
            return trained
        lost: State = client.memory.get(LOST, {}) if self.error_feedback else {}
        meant = {
            name: (value + lost[name] if name in lost else value).to(torch.float32)
            for name, value in movement(received, trained).items()
        }
        packed = _packed(meant, self.up_codecs, "up", f"client {client.id!r}")
        if self.error_feedback:
            arrived = unpack(packed, {name: value.shape for name, value in meant.items()}, self.up_codecs)
            kept = [name for name in meant if name not in without_feedback]  # others come whole again
            client.memory[LOST] = lost | {name: meant[name] - arrived[name] for name in kept}
        return packed

    def read_up(self, message: State, received: State, shapes: Mapping[str, Size]) -> State:
        if not self.up_codecs:
            return super().read_up(message, received, shapes)
        return {name: value.double() for name, value in unpack(message, shapes, self.up_codecs).items()}

    def down_bytes(self, state: State) -> int:
        return self._bytes(state, self.down_codecs, "down")

    def up_bytes(self, state: State) -> int:
        return self._bytes(state, self.up_codecs, "up")

    @property
    def private(self) -> ClipAndNoise | None:
        """Clipping and noise on the way up; None without noise."""
        # They come first in a chain, see `_refuse`.
        first = self.up_codecs[0] if self.up_codecs else None
        return first if isinstance(first, ClipAndNoise) else None

    def _bytes(self, state: State, codecs: Sequence[Codec], way: str) -> int:
        if not codecs or not state:
            return serialized_bytes(state)
        layout = tuple((name, value.shape) for name, value in state.items())
        if (way, layout) not in self._measured:  # the bytes follow from names and shapes
            measured = [codec for codec in codecs if codec is not self.private]  # noise changes no size
            with torch.random.fork_rng(devices=[]):  # measuring a size must not change the client's draws
                packed = pack({name: torch.zeros(shape) for name, shape in layout}, measured)
            self._measured[way, layout] = serialized_bytes(packed)
        return self._measured[way, layout]


def pack(state: State, codecs: Sequence[Codec]) -> State:
    """Return the tensors sent for a state: ``values``, and the side tensors of codec i as ``i.NAME``.

    Args:
        state: finite tensors, at least one; in the order of their names they become one fp32 vector.
        codecs: applied from left to right.

    Examples:
        >>> from fedlight.federation.codecs import TopK
        >>> packed = pack({"w": torch.tensor([[1.0, 0.0], [0.0, -2.0]])}, [TopK(0.25)])
        >>> {name: value.tolist() for name, value in packed.items()}
        {'0.positions': [3], 'values': [-2.0]}
    """
    names = sorted(state)  # an order that both ends know
    sizes = [state[name].numel() for name in names]
    values = torch.cat([state[name].to(torch.float32).reshape(-1) for name in names])
    packed: State = {}
    for place, codec in enumerate(codecs):
        values, side = codec.encode(values, sizes)
        sizes = codec.encoded_sizes(sizes)
        packed |= {f"{place}.{name}": value for name, value in side.items()}
    return packed | {"values": values}


def unpack(packed: State, shapes: Mapping[str, Size], codecs: Sequence[Codec]) -> State:
    """Return the state (fp32, of these shapes by name) that the codecs encoded in `pack`."""
    if not shapes:
        return {}
    names = sorted(shapes)
    first = [shapes[name].numel() for name in names]
    steps, sizes = [], first
    for place, codec in enumerate(codecs):
        steps.append((f"{place}.", codec, sizes))
        sizes = codec.encoded_sizes(sizes)
    values = packed["values"]
    for prefix, codec, before in reversed(steps):  # the last one is undone first
        side = {name.removeprefix(prefix): each for name, each in packed.items() if name.startswith(prefix)}
        values = codec.decode(values, side, before)
    parts = dict(zip(names, values.split(first), strict=True))
    return {name: parts[name].reshape(shape) for name, shape in shapes.items()}


def _packed(state: State, codecs: Sequence[Codec], way: str, whose: str) -> State:
    for name, value in state.items():
        if not value.isfinite().all():
            raise Diverged(
                f"channel.{way}: {name} of {whose} is not finite and "
                "cannot be encoded: training diverged, take a smaller learning rate or trainer.gradient_clip_val"
            )
    return pack(state, codecs) if state else {}


def _chain(codecs: Codec | list[Codec] | None) -> list[Codec]:
    if codecs is None:
        return []
    return [codecs] if isinstance(codecs, Codec) else list(codecs)


def _refuse(way: str, codecs: Sequence[Codec]) -> None:
    for codec in codecs[:-1]:
        if isinstance(codec, Quantize):
            raise ValueError(
                f"channel.{way}: Quantize must be last, since what follows it would have to work on codes instead of numbers"
            )
    for codec in codecs[1:]:
        if isinstance(codec, ClipAndNoise):
            raise ValueError(
                f"channel.{way}: ClipAndNoise must be first: its norm is that of the whole movement, "
                "and what comes before it is not covered by its epsilon"
            )
    if codecs and isinstance(codecs[0], ClipAndNoise) and any(codec.error_feedback for codec in codecs):
        raise ValueError(
            f"channel.{way}: ClipAndNoise cannot go with error feedback, which would send later what was clipped off now: "
            "set error_feedback: false in the other codecs"
        )
