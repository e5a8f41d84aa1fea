"""Channel between server and client: what it does to a payload, and how many bytes it carries.

Bytes are those of a safetensors file with the payload, header included, which could really be sent, stored and read back.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache

import torch
from safetensors.torch import save

from fedlight.federation.client import Client
from fedlight.federation.state import State, movement


@dataclass(frozen=True)
class Payload:
    """State that arrives at the other end, and the bytes that were sent."""

    state: State
    num_bytes: int


class Channel(ABC):
    """Way from the server to a client and back; the number of bytes is known before anything is sent."""

    @abstractmethod
    def down(self, state: State, client: Client) -> Payload:
        """Return the server's state as the client receives it (fp32)."""

    @abstractmethod
    def up(
        self, received: State, trained: State, client: Client, without_feedback: Collection[str] = ()
    ) -> Payload:
        """Return what the server learns of the client's movement (fp64) from what the client sends.

        Args:
            received: what the client received.
            trained: what it sends back, under names that it received.
            client: with its memory, in which a channel may keep what a message has lost.
            without_feedback: names of which no loss is kept: tensors of an algorithm's own beside the parameters, such as
                control variates. Each message has them as a whole, so the next makes up for what this one loses.
        """

    @abstractmethod
    def down_bytes(self, state: State) -> int:
        """Return ``num_bytes`` of the payload of ``down`` for tensors of these names and shapes, whatever their values."""

    @abstractmethod
    def up_bytes(self, state: State) -> int:
        """Return ``num_bytes`` of the payload of ``up`` for tensors of these names and shapes, whatever their values."""


@lru_cache(maxsize=64)
def _safetensors_size(layout: tuple[tuple[str, torch.dtype, torch.Size], ...]) -> int:
    return len(save({name: torch.zeros(shape, dtype=dtype) for name, dtype, shape in layout}))


def serialized_bytes(state: State) -> int:
    """Return the length of ``state`` as a safetensors file in bytes, 0 if it is empty; measured once per layout.

    Example:
        >>> serialized_bytes({"w": torch.zeros(10)}) - serialized_bytes({"w": torch.ones(5)})
        20
    """
    if not state:
        return 0
    return _safetensors_size(tuple((name, value.dtype, value.shape) for name, value in state.items()))


class Identity(Channel):
    """Lossless fp32 channel: parameters go down, trained parameters come up.

    The server knows what it sent, so it takes the difference itself, in fp64 and without a loss.
    """

    def down(self, state: State, client: Client) -> Payload:
        """Return the state as it is."""
        return Payload(state, serialized_bytes(state))

    def up(
        self, received: State, trained: State, client: Client, without_feedback: Collection[str] = ()
    ) -> Payload:
        """Return the exact movement."""
        return Payload(movement(received, trained), serialized_bytes(trained))

    def down_bytes(self, state: State) -> int:
        """Return the bytes of the state as a safetensors file."""
        return serialized_bytes(state)

    def up_bytes(self, state: State) -> int:
        """Return the bytes of the trained tensors as a safetensors file."""
        return serialized_bytes(state)
