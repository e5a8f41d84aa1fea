"""Isolated random streams, and the keys of texts that seed them.

Dropout and sampling draw from a stream that is seeded by its purpose and thrown away afterwards. Such draws neither
change the global stream nor depend on it. A resumed run, another order of the clients, or earlier draws leave them
unchanged.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def own_stream(seed: int, device: torch.device) -> Iterator[None]:
    """Run the body on a torch stream seeded with ``seed``, then restore the global stream.

    Args:
        seed: in [0, 2**64).
        device: device on which the body draws, besides the CPU.

    Examples:
        >>> with own_stream(7, torch.device("cpu")):
        ...     first = torch.rand(2)
        >>> with own_stream(7, torch.device("cpu")):
        ...     torch.equal(first, torch.rand(2))
        True
    """
    on_cuda = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if on_cuda else []):
        torch.default_generator.manual_seed(seed)
        if on_cuda:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


def text_keys(input_ids: Tensor, attention_mask: Tensor) -> list[int]:
    """Return a 63-bit key per text; equal texts have equal keys, however they are padded.

    Args:
        input_ids: ``(batch, tokens)``.
        attention_mask: ``(batch, tokens)``, 0 on padding.

    Examples:
        >>> ids = torch.tensor([[5, 6, 0], [0, 5, 6], [6, 5, 0]])
        >>> same, shifted, other = text_keys(ids, torch.tensor([[1, 1, 0], [0, 1, 1], [1, 1, 0]]))
        >>> same == shifted, same == other
        (True, False)
    """
    rows = zip(input_ids.to("cpu", torch.int64).numpy(), attention_mask.bool().cpu().numpy(), strict=True)
    return [joint_key(ids[used].tobytes()) for ids, used in rows]


def joint_key(*parts: bytes | int) -> int:
    """Return one 63-bit key for several, in order.

    Examples:
        >>> joint_key(1, 2) == joint_key(2, 1)
        False
    """
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part if isinstance(part, bytes) else part.to_bytes(8, "little"))
    return int.from_bytes(digest.digest(), "little") >> 1
