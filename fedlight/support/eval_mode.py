"""Evaluation mode for a while: dropout off, and every submodule gets its own mode back afterwards."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def eval_mode(module: nn.Module) -> Iterator[None]:
    """Run the body with every submodule in eval mode, then restore the mode of each.

    Example:
        >>> layer = nn.Dropout()
        >>> with eval_mode(layer):
        ...     layer.training
        False
        >>> layer.training
        True
    """
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode
