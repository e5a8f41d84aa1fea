"""FedDCA*: a small encoder at the clients, a large one at the server, and a projector of centres between them.

Wang et al., "Federated Instruction Tuning of LLMs with Domain Coverage Augmentation" (FedDCA),
https://arxiv.org/abs/2409.20135, section 4.3. Centres are projected, then scaled to unit length, before the server selects;
all else is FedDCA. The projector is a checkpoint of `ProjectorModule` (``fedlight fit --config projector.yaml``).
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedlight.augmentation import retrieval
from fedlight.augmentation.feddca import FedDCA
from fedlight.datamodules.instructions.augmentation import Added
from fedlight.datamodules.vectors.clusters import Clusters
from fedlight.datamodules.vectors.encoders import Encoder
from fedlight.datamodules.vectors.selection import Selection
from fedlight.support.types import Fields

if TYPE_CHECKING:
    from fedlight.modules.projector import ProjectorModule


class FedDCAStar(FedDCA):
    """FedDCA with a small encoder at the clients, scored by the cosine to the client's selected and projected centre.

    Args:
        client_encoder: encoder of the clients.
        server_encoder: encoder of the server, usually of another dimension.
        projector: checkpoint of a `ProjectorModule` from the clients' space to the server's.
        number, clusters, alpha, index, selection, index_recall: as in `FedDCA`.
    """

    def __init__(
        self,
        client_encoder: Encoder,
        server_encoder: Encoder,
        projector: str,
        number: int,
        clusters: int = 10,
        alpha: float | None = 0.7,
        index: retrieval.IndexKind = "auto",
        selection: Selection = "drop_i",
        index_recall: float = 0.99,
    ) -> None:
        super().__init__(client_encoder, number, clusters, alpha, index, selection, index_recall)
        # Under the names of the arguments, which `settings` reads.
        self.client_encoder, self.server_encoder, self.projector = client_encoder, server_encoder, projector

    def augment(
        self, clients: Mapping[str, Sequence[Fields]], public: Sequence[Fields], seed: int
    ) -> dict[str, list[Added]]:
        self._loaded = self._load_projector()  # before any encoding
        return super().augment(clients, public, seed)

    def _projected(self, sent: dict[str, Clusters]) -> dict[str, Clusters]:
        self.client_encoder.release()  # before the server's is loaded
        return {
            client: Clusters(self._loaded.project(each.centers), each.sizes) for client, each in sent.items()
        }

    def settings(self) -> dict[str, object]:
        """Return the settings with a digest of the projector in place of its path."""
        digest = hashlib.blake2b(self._find_checkpoint().read_bytes(), digest_size=16).hexdigest()
        return {**super().settings(), "projector": digest}

    def _find_checkpoint(self) -> Path:
        file = Path(self.projector).expanduser()
        if not file.is_file():
            raise FileNotFoundError(
                f"projector={self.projector}: no such file. Make one with `fedlight fit --config projector.yaml` and set "
                "projector to its checkpoint."
            )
        return file

    def _load_projector(self) -> "ProjectorModule":
        from fedlight.modules.projector import ProjectorModule

        projector = ProjectorModule.load_from_checkpoint(self._find_checkpoint())
        dimensions = (self.client_encoder.dimension, self.server_encoder.dimension)
        if dimensions != projector.dimensions:
            raise ValueError(
                f"projector={self.projector} is for encoders of {projector.dimensions[0]} and {projector.dimensions[1]} "
                f"dimensions, but client_encoder has {dimensions[0]} and server_encoder {dimensions[1]}. Use the encoders "
                "that it was trained with, or train another."
            )
        return projector
