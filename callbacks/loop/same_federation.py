"""Whether a run goes on with the federation of its checkpoint: its settings, its clients and their examples."""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import lightning as L
from lightning.pytorch.utilities import rank_zero_info

from fedlight.federation.protocols import FederatedData
from fedlight.support.settings_record import (
    constructor_arguments,
    described,
    digest,
    refuse_other_settings,
)

MAY_CHANGE = ("memory",)
"""Arguments of the loop on which no result depends: where memories lie."""


@runtime_checkable
class TellsExamples(Protocol):
    """Data that know which examples their clients have, without reading them."""

    def examples_digest(self) -> str:
        """The same for the same examples of the same clients."""


class SameFederation:
    """Describes a federation for its checkpoints, and refuses to go on with another one.

    May change from one run to the next: ``max_epochs``, everything about logging, evaluation and folders, where clients'
    memories lie, loader processes. The settings of the optimizer are the module's matter
    (:func:`fedlight.modules.language.checkpoints.check_optimizer_settings`).

    Args:
        loop: the federated loop, which has each argument of its constructor as an attribute.

    Attributes:
        settings: name -> plain values, as they were when the loop was made; with those of the data, once they are known.
        trains: whether the run trains; evaluation does not ask how a checkpoint was trained.
    """

    def __init__(self, loop: object) -> None:
        names = [name for name in constructor_arguments(type(loop)) if name not in MAY_CHANGE]
        self.settings: dict[str, Any] = {
            f"federated.{name}": described(getattr(loop, name, None)) for name in names
        }
        self.trains = False
        self._saved: Mapping[str, Any] = {}

    def restore(self, saved: Mapping[str, Any] | None) -> None:
        """Takes the settings of a checkpoint; one of before they were recorded is gone on from as it is, and it is said.

        Raises:
            ValueError: the loop has others.
        """
        if saved is None:
            rank_zero_info(
                "the checkpoint does not say of which federation it is, so its settings are not compared"
            )
        self._saved = saved or {}
        self._refuse_others()

    def meet(self, trainer: L.Trainer, data: FederatedData) -> None:
        """Once the data are known, before anything is trained: adds them.

        Raises:
            ValueError: those of the checkpoint are others.
        """
        sizes = dict(sorted(data.client_sizes().items()))
        self.settings |= {
            "data.clients": len(sizes),
            "data.examples": sum(sizes.values()),
            "data.client_sizes": f"digest {digest(sizes)}",
            "data.batches_in_a_pass": sum(data.num_batches(client) for client in sizes),
            "trainer.accumulate_grad_batches": trainer.accumulate_grad_batches,
        }
        if isinstance(data, TellsExamples):
            self.settings["data.client_examples"] = f"digest {data.examples_digest()}"
        self._refuse_others()
        self._saved = {}

    def _refuse_others(self) -> None:
        if self.trains:
            refuse_other_settings(self._saved, self.settings, "start anew, without the checkpoint")
