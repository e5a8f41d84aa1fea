"""Categories for rows that have none: k-means on the embeddings of their instructions.

Wang et al., "Federated Instruction Tuning of LLMs with Domain Coverage Augmentation" (FedDCA),
https://arxiv.org/abs/2409.20135, appendix A.2.1: 100 clusters are the labels over which a Dirichlet distribution makes
clients unlike each other, with alpha 0.01, 0.1, 1 and 10.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from fedlight.datamodules.clients.clusters import pseudo_labels
from fedlight.datamodules.instructions.augmentation import instruction_text
from fedlight.datamodules.vectors.encoders import Encoder
from fedlight.support.seeding import derive_seed
from fedlight.support.types import Fields


@dataclass(frozen=True)
class PseudoLabels:
    """Labels every row; in YAML ``pseudo_labels: {encoder: {class_path: SentenceEncoder, ...}, number: 100}``.

    Args:
        encoder: of the instructions.
        number: of labels, >= 2; fewer where there are fewer distinct instructions.
    """

    encoder: Encoder
    number: int = 100

    def __post_init__(self) -> None:
        if self.number < 2:
            raise ValueError(f"pseudo_labels.number={self.number}: one label says nothing. Set 2 or more.")

    def of(self, rows: Sequence[Fields], seed: int) -> list[str]:
        """A label such as ``"k07"`` for each row, a function of the instructions and the seed."""
        vectors = self.encoder.encode([instruction_text(row) for row in rows])
        labels = pseudo_labels(vectors, self.number, derive_seed(seed, "pseudo labels"))
        width = len(str(self.number - 1))
        return [f"k{label:0{width}d}" for label in labels]
