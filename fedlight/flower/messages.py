"""Messages between server and nodes: a header of plain values and payloads of tensors, neither of them pickled.

A payload is a safetensors file of the channel's tensors. The receiver knows names, shapes and types of each one beforehand,
and so its length: anything else is refused before it is read.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Size

from fedlight.federation.client import State, serialized_bytes

FORMAT = 1
"""Version of the messages; both ends must have the same."""
MOST_NUMBER = 2**63
"""Integers of this magnitude or above are refused: not all of them are numbers of a float."""
Layout = Mapping[str, tuple[Size, torch.dtype]]
"""Tensor name -> its shape and type."""


class Refused(ValueError):
    """A message that is not used, with the reason."""


@dataclass(frozen=True)
class Bounds:
    """Most that the server takes of one node: settings of the app.

    Attributes:
        clients: clients of a node.
        metrics: training metrics of a visit.
        header_mib: MiB of a message beside the tensors that are due in it.
    """

    clients: int = 10_000
    metrics: int = 100
    header_mib: int = 16

    @property
    def header_bytes(self) -> int:
        """Bytes of a message beside its tensors."""
        return self.header_mib * 2**20

    def refuse_larger(self, num_bytes: int, due: int) -> None:
        """Raise Refused for a message with more bytes than ``due`` bytes of tensors and a header have."""
        if num_bytes > due + self.header_bytes:
            raise Refused(
                f"it has {num_bytes:,} bytes or more, of which {due:,} are due: the rest is more than "
                f"max-header-mib={self.header_mib} in the app's settings"
            )


@dataclass(frozen=True)
class Parcel:
    """A message: a header of JSON's values, and payloads by name.

    Attributes:
        header: the header.
        payloads: safetensors files.
        due_bytes: bytes of the payloads expected in the answer; not sent.
    """

    header: dict[str, Any]
    payloads: dict[str, bytes] = field(default_factory=dict)
    due_bytes: int = field(default=0, compare=False)

    @property
    def num_bytes(self) -> int:
        """Bytes of header and payloads, without those of the transport."""
        return len(write_header(self.header)) + sum(map(len, self.payloads.values()))


def write_header(header: Mapping[str, Any]) -> bytes:
    """Return a header as UTF-8 JSON; floats come back with the same bits.

    Raises:
        ValueError: a value is no value of JSON, or not finite.
    """
    try:
        return json.dumps(header, allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode()
    except TypeError as error:
        raise ValueError(f"a message holds plain values alone: {error}") from error


def read_header(text: bytes, most_bytes: int = Bounds().header_bytes) -> dict[str, Any]:
    """Return the header that `write_header` wrote, of at most ``most_bytes``.

    Raises:
        Refused: it is no JSON object, too long or too deep, holds a number that is not finite, or has another version.
    """

    def refuse(constant: str) -> None:
        raise Refused(f"the header holds {constant}")

    if len(text) > most_bytes:
        raise Refused(f"the header has {len(text):,} bytes, more than {most_bytes:,}")
    try:
        header = json.loads(text.decode(), parse_constant=refuse)  # Python reads NaN, which is no JSON
        if b"\\u" in text:  # half a character would pass, and could not be written anywhere
            json.dumps(header, ensure_ascii=False).encode()
    except Refused:
        raise
    except (ValueError, RecursionError) as error:
        raise Refused("the header is no JSON") from error
    if not isinstance(header, dict):
        raise Refused("the header is no JSON object")
    if header.get("format") != FORMAT:
        raise Refused(f"the message has format {header.get('format')!r:.40}, this end format {FORMAT}")
    return header


def value_of(header: Mapping[str, Any], key: str, kind: type | tuple[type, ...], *default: Any) -> Any:
    """Return ``header[key]``, or the default where there is no such key.

    Raises:
        Refused: the key is missing, its value has another type, it is an integer beyond `MOST_NUMBER`, or not finite.
    """
    if default and key not in header:
        return default[0]
    value = header.get(key)
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if isinstance(value, bool) and bool not in kinds:  # True is an int
        raise Refused(f"{key} in the header is a truth value")
    too_large = isinstance(value, int) and not abs(value) < MOST_NUMBER
    if not isinstance(value, kind) or too_large or (isinstance(value, float) and not math.isfinite(value)):
        raise Refused(f"{key} in the header is {value!r:.40}")
    return value


def hex_of(header: Mapping[str, Any], key: str, size: int) -> bytes:
    """Return the bytes of a text of hexadecimal digits; raise Refused for other texts and lengths."""
    text = value_of(header, key, str)
    try:
        data = bytes.fromhex(text) if len(text) == 2 * size else b""
    except ValueError:
        data = b""
    if len(data) != size:  # fromhex passes over blanks, so the length of the text says too little
        raise Refused(f"{key:.40} in the header is no text of {2 * size} hexadecimal digits")
    return data


def write_payload(tensors: State) -> bytes:
    """Return tensors as a safetensors file; empty for none."""
    return save({name: value.contiguous() for name, value in tensors.items()}) if tensors else b""


def read_payload(data: bytes, layout: Layout) -> State:
    """Return the tensors of a payload.

    Raises:
        Refused: names, shapes, types or the length are others than those of ``layout``.
    """
    if not layout:
        if data:
            raise Refused(f"a payload of {len(data):,} bytes came where none was due")
        return {}
    if len(data) != (expected := payload_bytes(layout)):
        raise Refused(f"a payload has {len(data):,} bytes instead of {expected:,}")
    try:
        tensors = load(data)
    except (SafetensorError, ValueError, KeyError, RuntimeError, MemoryError) as error:
        raise Refused("a payload is no safetensors file") from error
    if tensors.keys() != layout.keys():
        raise Refused("a payload has other names than were due")
    for name, (shape, dtype) in layout.items():  # of the right length, it may still hold others
        value = tensors[name]
        if value.shape != shape or value.dtype != dtype:
            raise Refused(
                f"{name} of a payload is {value.dtype} {tuple(value.shape)} instead of {dtype} {tuple(shape)}"
            )
    # safetensors gives them in any order, and a norm of all adds up in this one.
    return {name: tensors[name] for name in layout}


def payload_bytes(layout: Layout) -> int:
    """Return the bytes of a payload of a layout."""
    return serialized_bytes({n: torch.empty(s, dtype=t, device="meta") for n, (s, t) in layout.items()})


def layout_of(tensors: State) -> dict[str, tuple[Size, torch.dtype]]:
    """Return names, shapes and types of tensors."""
    return {name: (value.shape, value.dtype) for name, value in tensors.items()}
