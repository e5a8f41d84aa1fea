"""Batch of an epoch without training at this end, which no hook of a module sees."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L

TAKES_BATCH = ("on_train_batch_start", "on_train_batch_end")
"""Hooks of a training batch."""
GIVES_BATCH = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
"""Hooks that return the batch which they get."""


class PassedOver:
    """Batch that nobody trains on."""

    @classmethod
    def collate(cls, examples: list[Any]) -> "PassedOver":
        """Return such a batch, as the loader's ``collate_fn``."""
        return cls()


@contextmanager
def without_hooks(module: L.LightningModule) -> Iterator[None]:
    """Keep `PassedOver` from the hooks of a module while the body runs."""
    # Lightning warns about hooks of a transfer that a module has beside a datamodule.
    own = [
        name for name in GIVES_BATCH if getattr(type(module), name) is not getattr(L.LightningModule, name)
    ]
    names = [*TAKES_BATCH, *own]
    before = {name: vars(module)[name] for name in names if name in vars(module)}
    for name in names:
        vars(module)[name] = _hook(getattr(module, name), gives=name in GIVES_BATCH)
    try:
        yield
    finally:
        for name in names:
            del vars(module)[name]
        vars(module).update(before)


def _hook(own: Any, gives: bool) -> Any:
    def hook(*args: Any, **named: Any) -> Any:
        passed = [one for one in (*args, *named.values()) if isinstance(one, PassedOver)]
        if passed:
            return passed[0] if gives else None
        return own(*args, **named)

    return hook
