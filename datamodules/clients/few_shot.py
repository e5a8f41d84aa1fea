"""A few rows of each kind: k-means on the embeddings of the instructions, then so many rows of each cluster.

Zhang et al., "FewFedPIT: Towards Privacy-preserving and Few-shot Federated Instruction Tuning",
https://arxiv.org/abs/2403.06131, section 4.1: 100 clusters, ten or five samples of each, which a Dirichlet distribution with
alpha 1.0 deals out to the clients by their clusters; 400 of the other rows are MedAlpaca's test set. The clusters follow
M. Li et al., "From Quantity to Quality: Boosting LLM Performance with Self-Guided Data Selection for Instruction Tuning",
NAACL 2024, https://arxiv.org/abs/2308.12032.

What the papers leave open or what differs: the embeddings are those of an `Encoder`, of instructions without responses
(FewFedPIT: a Longformer's, of instances); of a cluster rows are drawn at random by the seed, near the centre and far from it
alike; nothing that asks what a chosen row asks is tested on.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedlight.datamodules.clients.clusters import pseudo_labels
from fedlight.datamodules.instructions.augmentation import instruction_text
from fedlight.datamodules.rows.public_rows import question
from fedlight.datamodules.rows.rows import RowsError
from fedlight.datamodules.vectors.encoders import Encoder
from fedlight.support.checks import refuse_below
from fedlight.support.seeding import derive_seed
from fedlight.support.types import Fields


@dataclass(frozen=True)
class Few:
    """What was chosen of some rows; ``str`` gives it in one line.

    Attributes:
        chosen: indices of the rows to train on, in order, ``(chosen,)``.
        labels: the cluster of each, such as ``"k07"``.
        test: indices of the rows to test on, in order, ``(test,)``.
        num_rows: rows that were chosen from.
        num_small: clusters with fewer rows than were wanted of each.
    """

    chosen: np.ndarray
    labels: list[str]
    test: np.ndarray
    num_rows: int
    num_small: int

    def __str__(self) -> str:
        return (
            f"{len(self.chosen):,} of {self.num_rows:,} rows chosen from {len(set(self.labels)):,} clusters, of which "
            f"{self.num_small:,} are smaller than per_cluster and give all they have; {len(self.test):,} others to test on"
        )


@dataclass(frozen=True)
class FewShot:
    """Chooses few-shot data; in YAML ``few_shot: {encoder: {class_path: SentenceEncoder, ...}, per_cluster: 5}``.

    The clusters are the categories of ``partition: {by: dirichlet, alpha: 1.0}``.

    Args:
        encoder: of the instructions; responses are not looked at.
        clusters: their number, >= 2; fewer where there are fewer distinct instructions.
        per_cluster: rows of each cluster, >= 1; a smaller cluster gives all it has.
        rest_as_test: so many of the other rows, drawn at random, are what is tested on; 0: none.
    """

    encoder: Encoder
    clusters: int = 100
    per_cluster: int = 10
    rest_as_test: int = 0

    def __post_init__(self) -> None:
        refuse_below(2, "few_shot.", clusters=self.clusters)
        refuse_below(1, "few_shot.", per_cluster=self.per_cluster)
        refuse_below(0, "few_shot.", rest_as_test=self.rest_as_test)

    def choose(self, rows: Sequence[Fields], seed: int) -> Few:
        """Which rows, a function of the instructions and the seed.

        Raises:
            RowsError: too few rows are left to test on.

        Example:
            >>> from fedlight.datamodules.vectors.encoders import HashedEncoder
            >>> rows = [{"prompt": f"{kind} {i}"} for kind in ("add these", "name a city") for i in range(4)]
            >>> few = FewShot(HashedEncoder(64), clusters=2, per_cluster=1, rest_as_test=3).choose(rows, seed=0)
            >>> len(few.chosen), len(set(few.labels)), len(few.test), set(few.chosen) & set(few.test)
            (2, 2, 3, set())
        """
        vectors = self.encoder.encode([instruction_text(row) for row in rows])
        labels = pseudo_labels(vectors, self.clusters, derive_seed(seed, "few shot clusters"))
        members = [np.flatnonzero(labels == label) for label in np.unique(labels)]
        drawn = [_draw(own, self.per_cluster, seed, f"few shot {at}") for at, own in enumerate(members)]
        chosen = np.sort(np.concatenate(drawn))
        width = len(str(self.clusters - 1))
        return Few(
            chosen,
            [f"k{label:0{width}d}" for label in labels[chosen]],
            self._test(rows, chosen, seed),
            num_rows=len(rows),
            num_small=sum(len(own) < self.per_cluster for own in members),
        )

    def _test(self, rows: Sequence[Fields], chosen: np.ndarray, seed: int) -> np.ndarray:
        asked = {question(rows[row]) for row in chosen}
        rest = np.array([at for at, row in enumerate(rows) if question(row) not in asked], dtype=np.int64)
        if len(rest) < self.rest_as_test:
            raise RowsError(
                f"few_shot.rest_as_test={self.rest_as_test}, but of {len(rows):,} rows {len(rest):,} are left that ask "
                f"something else than the {len(chosen):,} chosen ones. Lower rest_as_test or per_cluster."
            )
        return np.sort(_draw(rest, self.rest_as_test, seed, "few shot test"))


def _draw(indices: np.ndarray, number: int, seed: int, purpose: str) -> np.ndarray:
    return np.random.default_rng(derive_seed(seed, purpose)).permutation(indices)[:number]
