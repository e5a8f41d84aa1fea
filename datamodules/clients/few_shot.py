"""Few-shot data: rows drawn from each k-means cluster of the instructions' embeddings.

Zhang et al., "FewFedPIT: Towards Privacy-preserving and Few-shot Federated Instruction Tuning",
https://arxiv.org/abs/2403.06131, section 4.1: 100 clusters, ten or five samples of each, divided among the clients by a
Dirichlet distribution with alpha 1.0 over the clusters; 400 of the other rows are MedAlpaca's test set. The clusters follow
M. Li et al., "From Quantity to Quality: Boosting LLM Performance with Self-Guided Data Selection for Instruction Tuning",
NAACL 2024, https://arxiv.org/abs/2308.12032.

Deviations, and points that the papers leave open: the embeddings are an `Encoder`'s, of instructions without responses
(FewFedPIT: a Longformer's, of instances); rows of a cluster are drawn at random by the seed, at any distance from the
centre; no test row repeats a chosen row's question.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedlight.datamodules.rows.fields import instruction_text, make_question_key
from fedlight.datamodules.rows.rows import RowsError
from fedlight.datamodules.vectors.clusters import assign_clusters, name_clusters
from fedlight.datamodules.vectors.encoders import Encoder
from fedlight.support.checks import Settings, refuse_below
from fedlight.support.seeding import derive_seed
from fedlight.support.types import Fields


@dataclass(frozen=True)
class FewShotRows:
    """Rows chosen to train and to test on; ``str`` gives a summary in one line."""

    chosen: np.ndarray  # indices of the rows to train on, in order, ``(chosen,)``
    labels: list[str]  # cluster of each chosen row, such as ``"k07"``
    test: np.ndarray  # indices of the rows to test on, in order, ``(test,)``
    num_rows: int  # number of rows to choose from
    num_small: int  # number of clusters with fewer rows than wanted

    def __str__(self) -> str:
        return (
            f"{len(self.chosen):,} of {self.num_rows:,} rows chosen from {len(set(self.labels)):,} clusters, of which "
            f"{self.num_small:,} are smaller than per_cluster and give all they have; {len(self.test):,} others to test on"
        )


@dataclass(frozen=True)
class FewShot(Settings):
    """Settings of few-shot data; in YAML ``few_shot: {encoder: {class_path: SentenceEncoder, ...}, per_cluster: 5}``.

    The clusters are the categories of ``partition: {by: dirichlet, alpha: 1.0}``.

    Args:
        encoder: encoder of the instructions, without their responses.
        clusters: number of clusters, >= 2; fewer where fewer distinct instructions exist.
        per_cluster: rows of each cluster, >= 1; a smaller cluster gives all its rows.
        rest_as_test: number of other rows, drawn at random, to test on; 0: none.
    """

    encoder: Encoder
    clusters: int = 100
    per_cluster: int = 10
    rest_as_test: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_below(2, "few_shot.", clusters=self.clusters)
        refuse_below(1, "few_shot.", per_cluster=self.per_cluster)
        refuse_below(0, "few_shot.", rest_as_test=self.rest_as_test)

    def choose(self, rows: Sequence[Fields], seed: int) -> FewShotRows:
        """Choose rows by the instructions and the seed alone.

        Raises:
            RowsError: too few rows are left to test on.

        Examples:
            >>> from fedlight.datamodules.vectors.encoders import HashedEncoder
            >>> rows = [{"prompt": f"{kind} {i}"} for kind in ("add these", "name a city") for i in range(4)]
            >>> few = FewShot(HashedEncoder(64), clusters=2, per_cluster=1, rest_as_test=3).choose(rows, seed=0)
            >>> len(few.chosen), len(set(few.labels)), len(few.test), set(few.chosen) & set(few.test)
            (2, 2, 3, set())
        """
        vectors = self.encoder.encode([instruction_text(row) for row in rows])  # [rows, dimension]
        labels = assign_clusters(vectors, self.clusters, derive_seed(seed, "few shot clusters"))  # [rows]
        members = [np.flatnonzero(labels == label) for label in np.unique(labels)]
        drawn = [_draw(group, self.per_cluster, seed, f"few shot {at}") for at, group in enumerate(members)]
        chosen = np.sort(np.concatenate(drawn))
        return FewShotRows(
            chosen,
            name_clusters(labels[chosen], self.clusters),
            self._draw_test(rows, chosen, seed),
            num_rows=len(rows),
            num_small=sum(len(group) < self.per_cluster for group in members),
        )

    def _draw_test(self, rows: Sequence[Fields], chosen: np.ndarray, seed: int) -> np.ndarray:
        asked = {make_question_key(rows[row]) for row in chosen}  # other rows may ask the same
        rest = np.array(
            [at for at, row in enumerate(rows) if make_question_key(row) not in asked], dtype=np.int64
        )
        if len(rest) < self.rest_as_test:
            raise RowsError(
                f"few_shot.rest_as_test={self.rest_as_test}, but of {len(rows):,} rows {len(rest):,} are left that ask "
                f"something else than the {len(chosen):,} chosen ones. Lower rest_as_test or per_cluster."
            )
        return np.sort(_draw(rest, self.rest_as_test, seed, "few shot test"))


def _draw(indices: np.ndarray, number: int, seed: int, purpose: str) -> np.ndarray:
    return np.random.default_rng(derive_seed(seed, purpose)).permutation(indices)[:number]
