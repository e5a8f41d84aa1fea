"""Isolated random streams.

Dropout and sampling draw from a stream that is seeded by its purpose and thrown away afterwards. Such draws neither
change the global stream nor depend on it. A resumed run, another order of the clients, or earlier draws leave them
unchanged.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def own_stream(seed: int, device: torch.device) -> Iterator[None]:
    """Run the body on a torch stream with this seed, in [0, 2**64), on CPU and device; then restore the global stream.

    Examples:
        >>> with own_stream(7, torch.device("cpu")):
        ...     first = torch.rand(2)
        >>> with own_stream(7, torch.device("cpu")):
        ...     torch.equal(first, torch.rand(2))
        True
    """
    on_cuda = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if on_cuda else []):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed other devices, too
        if on_cuda:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield
