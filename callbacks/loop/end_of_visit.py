"""The end of a visit: what a project does when its last batch is over belongs to it, and nothing follows.

Lightning calls ``on_train_batch_end`` of the module behind that of all callbacks. There a critic's weights are clamped, a
moving average is updated, a schedule is stepped: of the last batch of a visit as of all others.
"""

from collections.abc import Mapping
from typing import Any

import lightning as L
import torch
from lightning.pytorch.trainer import call
from torch import Tensor

HOOK = "on_train_batch_end"


def call_modules_own(
    trainer: L.Trainer, module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
) -> None:
    """Calls the module's ``on_train_batch_end`` now; Lightning's call behind the callbacks does nothing this once."""
    call._call_lightning_module_hook(trainer, HOOK, outputs, batch, batch_idx)
    vars(module)[HOOK] = _Called(module, vars(module).get(HOOK))


def call_again(module: L.LightningModule) -> None:
    """Undoes that where Lightning's call has not come, because of an error."""
    called = vars(module).get(HOOK)
    if isinstance(called, _Called):
        called()


class _Called:
    """Takes the place of the hook for one call."""

    def __init__(self, module: L.LightningModule, own: Any) -> None:
        self._module, self._own = module, own

    def __call__(self, *_: object) -> None:
        if self._own is None:
            del vars(self._module)[HOOK]
        else:
            vars(self._module)[HOOK] = self._own


class LeftAs:
    """The parameters as a visit or a round left them, until the next hook behind its last batch.

    Args:
        parameters: the federated ones.
        client_id: whose visit it was.
    """

    def __init__(self, parameters: Mapping[str, Tensor], client_id: str) -> None:
        self._parameters, self._client_id = parameters, client_id
        self._values = {name: p.detach().clone() for name, p in parameters.items()}

    def refuse_changed(self) -> None:
        """Raises ``ValueError`` where they are others now."""
        changed = [name for name, p in self._parameters.items() if not torch.equal(p, self._values[name])]
        if changed:
            raise ValueError(
                f"{changed[0]} was changed by a callback when the visit to client {self._client_id} was over and its work "
                f"had been taken: a callback that changes weights in {HOOK} has to stand in front of FederatedLoop among "
                "the trainer's callbacks"
            )
