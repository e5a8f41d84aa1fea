"""Calls of a function in another process, with plain values only: a returned value cannot execute code.

Both ends are inside the sandbox, where fedlight cannot be imported: the text of this file is sent there, so it imports only
the standard library. Numbers, strings, bytes, None, lists, tuples, dictionaries and sets keep their type (subclasses
arrive as their base); any other type is an error.
"""

import json
import os
import struct
from collections.abc import Callable, Mapping, Set
from decimal import Decimal
from fractions import Fraction
from typing import Any


class Remote:
    """Function in another process, by file descriptors for its calls and its answers."""

    def __init__(self, requests: int, answers: int) -> None:
        self.requests, self.answers = requests, answers

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Call the function and wait for its result; raise EOFError if its process ended.

        Raises:
            RuntimeError: the function raised, or returned a value that cannot be sent.
        """
        send(self.requests, [pack(list(arguments)), pack(named)])
        kind, value = receive(self.answers)
        if kind != "value":
            raise RuntimeError(f"the function failed: {value}")
        return unpack(value)


def serve(function: Callable[..., Any], requests: int, answers: int) -> None:
    """Answer calls until the other end is closed."""
    while True:
        try:
            arguments, named = receive(requests)
        except EOFError:
            return
        try:
            answer = ["value", pack(function(*unpack(arguments), **unpack(named)))]
        except Exception as error:
            answer = ["error", f"{type(error).__name__}: {error}"]
        send(answers, answer)


def pack(value: Any) -> Any:
    """Return a value in JSON types, containers with the name of their type; raise TypeError if a part is not a plain value.

    Examples:
        >>> pack((1, [2.5, None], {"a": {True}}))
        {'tuple': [1, {'list': [2.5, None]}, {'dict': [['a', {'set': [True]}]]}]}
    """
    if value is None or isinstance(value, bool):  # before int, which bool is derived from
        return value
    if isinstance(value, int):
        # Python's JSON stops at 4,300 digits.
        return int(value) if -(1 << 63) <= value < 1 << 63 else {"int": hex(value)}
    for kind in (float, str):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, bytes | bytearray):
        return {"bytes": value.hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, Fraction | Decimal):
        return {type(value).__name__: str(value)}
    for name, container in (("list", list), ("tuple", tuple), ("set", Set)):
        if isinstance(value, container):
            return {name: [pack(part) for part in value]}
    if isinstance(value, Mapping):
        return {"dict": [[pack(key), pack(part)] for key, part in value.items()]}
    raise TypeError(f"a {type(value).__name__} is no plain value")


def unpack(packed: Any) -> Any:
    """Return the value that was packed."""
    if not isinstance(packed, dict):
        return packed
    [(kind, parts)] = packed.items()
    if kind == "dict":
        return {unpack(key): unpack(value) for key, value in parts}
    if kind in CONTAINERS:
        return CONTAINERS[kind](unpack(part) for part in parts)
    return OTHERS[kind](parts)


CONTAINERS: dict[str, Callable[..., Any]] = {"list": list, "tuple": tuple, "set": set}
OTHERS: dict[str, Callable[[Any], Any]] = {
    "int": lambda text: int(text, 16),
    "bytes": bytes.fromhex,
    "complex": lambda parts: complex(*parts),
    "Fraction": Fraction,
    "Decimal": Decimal,
}


def send(pipe: int, message: Any) -> None:
    """Write a message after its length."""
    text = json.dumps(message).encode()
    data = memoryview(struct.pack("=Q", len(text)) + text)
    while data:
        data = data[os.write(pipe, data) :]  # a pipe may take a part


def receive(pipe: int) -> Any:
    """Read a message; raise EOFError if the other end is closed."""
    (length,) = struct.unpack("=Q", _read_exactly(pipe, 8))
    return json.loads(_read_exactly(pipe, length))


def _read_exactly(pipe: int, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        part = os.read(pipe, min(length - len(data), 1 << 16))
        if not part:
            raise EOFError("the other process ended")
        data += part
    return bytes(data)
