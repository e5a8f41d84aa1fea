"""A word to the user's own code at the start of each visit: attributes carried from batch to batch are to start anew.

The loop gives every client the global parameters, an optimizer that remembers nothing and random streams of its own, and it
watches buffers. What a module or a callback keeps in ordinary attributes, such as the hidden state of a recurrent network
between batches or a moving average of the weights, it cannot see. Whoever keeps such a thing resets it here.
"""

from typing import Protocol, runtime_checkable

import lightning as L


@runtime_checkable
class HearsOfVisits(Protocol):
    """A LightningModule or a callback of the trainer that is told when a client's visit begins."""

    def on_visit_start(self, client_id: str) -> None:
        """Before the first training step of a visit; parameters are those that the client starts from."""


def tell_of_visit(trainer: L.Trainer, module: L.LightningModule, client_id: str) -> None:
    """Calls ``on_visit_start`` of the module and then of the callbacks, in their order, where they have it."""
    for one in (module, *trainer.callbacks):  # type: ignore[attr-defined]
        if isinstance(one, HearsOfVisits):
            one.on_visit_start(client_id)
