"""Base class of federated datamodules, whose training examples belong to clients.

Under a plain ``Trainer`` every loader gives pooled batches. The federated loop calls ``set_visits`` before each round;
then the training loader streams the round's batches, client after client. Batches depend on seed, round, client and visit
alone, not on the rest of the cohort, and a resumed run reads the same ones.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import lightning as L
import numpy as np
from torch.utils.data import DataLoader, Dataset, Sampler, Subset

from fedlight.datamodules.clients.splits import ClientCount, count_labels
from fedlight.datamodules.federated.client_positions import read_positions
from fedlight.datamodules.federated.rounds import ClientIndices, PooledSampler, RoundPlan
from fedlight.devices.shape import BatchShape
from fedlight.federation.client import Group, Visit
from fedlight.support.checks import Checked, refuse_below
from fedlight.support.settings_record import digest


class FederatedDataModule(Checked, L.LightningDataModule):
    """Base class of federated datamodules: subclasses fill the sets in ``setup`` and define ``collate``.

    Args:
        batch_size: examples per training batch.
        eval_batch_size: examples per validation, test and prediction batch.
        seed: seed of the order of the examples; ``Trainer`` seeds do not change it.
        num_workers: processes that load batches; 0: the training process loads them.

    Attributes:
        train_set: all clients' training examples, pooled.
        client_indices: client id -> indices into ``train_set``.
        examples_together: number of neighbours in ``client_indices`` that share a training batch; divides each client's
            number of examples, and ``batch_size``.
        train_lengths: tokens of each example of ``train_set``; examples of similar length share a batch, so that little is
            padded; None where examples have no length.
        train_labelled: number of these tokens that are scored one by one, such as those of a response.
        train_labels: category of each example of ``train_set``; None where the data have none.
        val_client_indices: client id -> positions in ``val_set``, in the order of its loader; None: not known.
        val_labels: category of each example of ``val_set``; None where the data have none.
        test_client_indices: client id -> positions in ``test_set``; None: not known.
        client_groups: client id -> known group of the client; None without such a column. Evaluation compares it with
            what an algorithm finds; no model sees it, and of the algorithms ``FedBiscuit(assignment=KnownGroups())`` alone.
        skip_predict_batches: prediction batches that an interrupted run has finished already.
    """

    train_set: Dataset
    client_indices: ClientIndices
    examples_together: int = 1
    train_lengths: np.ndarray | None = None
    train_labelled: np.ndarray | None = None
    train_labels: Sequence[str] | None = None
    val_set: Dataset | None = None
    val_client_indices: ClientIndices | None = None
    val_labels: Sequence[str] | None = None
    test_set: Dataset | None = None
    test_client_indices: ClientIndices | None = None
    client_groups: Mapping[str, str] | None = None
    predict_set: Dataset | None = None

    def __init__(
        self, batch_size: int = 32, eval_batch_size: int = 64, seed: int = 0, num_workers: int = 0
    ) -> None:
        super().__init__()
        refuse_below(1, batch_size=batch_size, eval_batch_size=eval_batch_size)
        self.batch_size, self.eval_batch_size = batch_size, eval_batch_size
        self.seed, self.num_workers = seed, num_workers
        self.skip_predict_batches = 0  # a resumed run sets it
        self._plan: RoundPlan | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what a worker does not need: the trainer, which cannot be pickled, and a round's visits."""
        return {**vars(self), "trainer": None, "_plan": None}

    def collate(self, examples: list[Any]) -> Any:
        """Return one batch from examples of any of the sets."""
        raise TypeError(f"{type(self).__name__} must define collate(examples)")

    @property
    def plan(self) -> RoundPlan:
        """Plan of the rounds, made when the training set is ready; ValueError for none, invalid or shared positions."""
        if not hasattr(self, "client_indices"):
            raise ValueError(
                f"{type(self).__name__} has no rows to train on: use `fedlight predict`, or other data"
            )
        if self._plan is None:
            clients = read_positions(self.client_indices, len(self.train_set))  # type: ignore[arg-type]
            self._plan = RoundPlan(
                clients, self.batch_size, self.seed, self.train_lengths, self.examples_together
            )
        return self._plan

    def client_sizes(self) -> dict[str, int]:
        """Return the number of training examples of each client."""
        return {client: len(positions) for client, positions in self.plan.client_indices.items()}

    def examples_digest(self) -> str:
        """Return a digest of the examples of each client, and of their lengths where these are known."""
        parts: list[Any] = []
        for client, indices in sorted(self.plan.client_indices.items()):
            parts += [client, indices, None if self.train_lengths is None else self.train_lengths[indices]]
        return digest(*parts)

    def client_counts(self) -> list[ClientCount]:
        """Return the number of examples of each client and label, for training and for validation."""
        sides = [("train", self.plan.client_indices, self.train_labels)]
        if self.val_client_indices is not None:
            sides.append(("val", self.val_client_indices, self.val_labels))
        return [count for side in sides for count in count_labels(*side)]

    def num_batches(self, client_id: str, split: str = "train") -> int:
        """Return the number of batches in one pass over the client's data."""
        return self.plan.num_batches(client_id)

    def set_visits(self, visits: Sequence[Visit], round_idx: int) -> None:
        """Make the next training loader stream these visits."""
        self.plan.set_visits(visits, round_idx)

    def set_groups(self, groups: Sequence[Group], round_idx: int) -> None:
        """Make the next training loader stream these groups of visits; see `fedlight.federation.protocols.StreamsGroups`."""
        self.plan.set_groups(groups, round_idx)

    def next_counts(self) -> list[int]:
        """Return the number of examples of each visit in the next batch of several visits."""
        return self.plan.counts.popleft()

    # Interface for fedlight.callbacks.loop.parts.dpsgd.DrawsByLot

    def draw_by_lot(self) -> None:
        """Draw batches by lot alone, not by the lengths of the examples, until the run ends."""
        self.plan.lengths = None

    def teardown(self, stage: str) -> None:
        """Forget the last round, so that a plain ``Trainer`` gets pooled batches, and draw by length again."""
        if stage == "fit" and self._plan is not None:
            self._plan.groups, self._plan.lengths = None, self.train_lengths

    def on_exception(self, exception: BaseException) -> None:
        """Do the same after an error, where Lightning calls no ``teardown``."""
        self.teardown("fit")

    def passes(self, visit: Visit) -> int:
        """Return the passes over its client's examples that a visit begins."""
        return self.plan.passes(visit)

    def batch_shapes(self, visit: Visit, round_idx: int) -> list[BatchShape]:
        """Return the shape of each batch of a visit, before it is read."""
        shapes = []
        for batch in self.plan.batches(visit, round_idx):
            # A batch is padded to its longest example.
            tokens = 0 if self.train_lengths is None else int(self.train_lengths[batch].max())
            labelled = 0 if self.train_labelled is None else int(self.train_labelled[batch].sum())
            shapes.append(BatchShape(len(batch), tokens, labelled))
        return shapes

    def example_batch(self, examples: int) -> Any:
        """Return the first ``examples`` training examples as a batch, to measure where lengths are not known."""
        return self.collate([self.train_set[i] for i in range(examples)])

    def own_examples(self) -> tuple[Iterable[Any], ClientIndices]:
        """Return batches of all training examples in the order of ``train_set``, and each client's positions there."""
        return self._sequential(self.train_set), self.plan.client_indices

    def first_examples(self) -> Any:
        """Return the first training examples as a batch, which processes compare; None with workers."""
        return None if self.num_workers else self.example_batch(min(2, len(self.train_set)))  # type: ignore[arg-type]

    def train_dataloader(self) -> DataLoader:
        """Return the loader of the round's batches, or without a federated loop of one shuffled pass over the pooled set."""
        if self.plan.groups is not None:
            return self._loader(self.train_set, self.plan.sampler())
        pooled = PooledSampler(
            len(self.train_set),  # type: ignore[arg-type]
            self.batch_size,
            self.seed,
            self.plan.lengths,
            self.examples_together,
        )
        if self.trainer is not None:
            # When a run is resumed Lightning opens the loader before it announces the epoch.
            pooled.set_epoch(self.trainer.fit_loop.epoch_progress.current.processed)  # type: ignore[attr-defined]
        return self._loader(self.train_set, pooled)

    def val_dataloader(self) -> DataLoader | list:
        return self._sequential(self.val_set)

    def test_dataloader(self) -> DataLoader | list:
        return self._sequential(self.test_set)

    def predict_dataloader(self) -> DataLoader | list:
        return self._sequential(self.predict_set, self.skip_predict_batches)

    def _sequential(self, dataset: Dataset | None, skip_batches: int = 0) -> DataLoader | list:
        if dataset is None:
            return []
        rest = range(skip_batches * self.eval_batch_size, len(dataset))  # type: ignore[arg-type]
        return DataLoader(
            Subset(dataset, rest),
            batch_size=self.eval_batch_size,
            collate_fn=self.collate,
            num_workers=self.num_workers,
        )

    def _loader(self, dataset: Dataset, batches: Sampler | list[list[int]]) -> DataLoader:
        return DataLoader(
            dataset, batch_sampler=batches, collate_fn=self.collate, num_workers=self.num_workers
        )
