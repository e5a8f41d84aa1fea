"""Seeds as pure functions of their purpose.

Python's ``hash`` of a string differs between processes, and with one global random stream a result depends on everything
drawn before it. Here every random choice has a separate seed, derived from the run's seed and the names of its subject
(round, client, ...), so a resumed run draws the same numbers as an uninterrupted one.
"""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Integral


def derive_seed(*parts: int | str) -> int:
    """Return a seed in [0, 2**32), stable over processes and machines.

    Args:
        parts: purpose of the seed, from general to special: ``(seed, "visit", round_idx, client_id)``.
    """
    # A whole number of numpy counts as Python's.
    whole = (
        int(part) if isinstance(part, Integral) and not isinstance(part, bool) else part for part in parts
    )
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in whole)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")


def seed_streams(seed: int) -> None:
    """Seed the global random streams of Python, numpy and torch."""
    import numpy as np  # here, since commands derive seeds without torch
    import torch

    random.seed(seed)
    np.random.seed(seed)
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:  # torch.manual_seed takes 0.2 ms to note the seed for devices that this machine does not have
        torch.default_generator.manual_seed(seed)


@contextmanager
def own_stream(seed: int) -> Iterator[None]:
    """Run the body on a torch stream of the CPU with this seed, in [0, 2**64); then restore the global stream.

    Examples:
        >>> import torch
        >>> with own_stream(7):
        ...     first = torch.rand(2)
        >>> with own_stream(7):
        ...     torch.equal(first, torch.rand(2))
        True
    """
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed other devices, too
        yield
