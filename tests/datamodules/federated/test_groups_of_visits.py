import pickle

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from fedlight import FederatedDataModule, Visit
from fedlight.datamodules.federated.loader_by_client import JoinedBatch, LoaderByClient, SeededBatch
from fedlight.federation.protocols import StreamsGroups

CLIENTS = {"a": [*range(6)], "b": [*range(6, 9)], "c": [*range(9, 20)]}
A, B, C = (Visit(name, 2) for name in "abc")


class Rows(FederatedDataModule):
    def setup(self, stage=None):
        self.train_set = list(range(20))
        self.client_indices = CLIENTS

    def collate(self, examples):
        return torch.tensor(examples)


class Noisy(torch.utils.data.Dataset):
    """Examples that are drawn anew whenever they are read."""

    def __len__(self):
        return 20

    def __getitem__(self, i):
        return i + torch.rand(1, dtype=torch.float64)


class Trainer:
    """As much of a trainer as a loader by client needs."""

    def __init__(self, loader):
        self.fit_loop = type("FitLoop", (), {})()
        source = type("Source", (), {"name": "train_dataloader", "dataloader": lambda self: loader})()
        self.fit_loop._data_source = source


def by_client(loader):
    source = LoaderByClient(Trainer(loader), lambda _: CLIENTS)
    source.open()
    return source


def read(source, loader, groups):
    """Return for each batch of the groups the examples of each visit."""
    source.set_groups(groups, 3)
    sizes = iter([len(group) for group in groups for _ in range(group[0].num_batches)])
    found = []
    for batch in loader():
        counts = source.next_counts() if next(sizes) > 1 else [len(batch)]
        assert sum(counts) == len(batch)
        found.append([part.flatten().tolist() for part in batch.split(counts)])
    return found


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("way", ["datamodule", "loader"])
def test_each_client_gets_the_batches_that_it_has_alone(way, num_workers):
    if way == "datamodule":
        source = Rows(batch_size=4, num_workers=num_workers)
        source.setup()
        loader = source.train_dataloader
    else:
        numbers = DataLoader(range(20), batch_size=4, shuffle=True, num_workers=num_workers)
        source = by_client(numbers)
        loader = source.dataloader
    assert isinstance(source, StreamsGroups)
    together = read(source, loader, [(A, C), (B,)])
    alone = {visit: [part for (part,) in read(source, loader, [(visit,)])] for visit in (A, B, C)}
    assert together == [*([a, c] for a, c in zip(alone[A], alone[C], strict=True)), *([b] for b in alone[B])]
    assert all(set(part) <= set(CLIENTS["c"]) for _, part in together[:2])


@pytest.mark.parametrize("num_workers", [0, 1])
def test_random_transforms_depend_on_no_other_client_of_the_group(num_workers):
    source = by_client(DataLoader(Noisy(), batch_size=4, num_workers=num_workers))
    both = read(source, source.dataloader, [(A, C)])
    others = read(source, source.dataloader, [(B, C)])
    assert [c for _, c in both] == [c for _, c in others]
    assert both == read(source, source.dataloader, [(A, C)])
    values = [value % 1 for batch in both for part in batch for value in part]
    assert len({*values}) == len(values) == 4 + 4 + 2 + 4
    if num_workers:  # in workers a client alone has seeded transforms, too
        assert [[c] for _, c in both] == read(source, source.dataloader, [(C,)])


def test_a_joined_batch_reaches_a_worker_once():
    joined = JoinedBatch([SeededBatch([1, 2], 5), SeededBatch([3], 6)])
    again = pickle.loads(pickle.dumps(joined))
    assert [*again] == [*joined] == [1, 2, 3]
    assert [part.seed for part in again.batches] == [5, 6]


def test_a_loader_without_batches_is_refused():
    source = by_client(DataLoader(TensorDataset(torch.zeros(20)), batch_size=None))
    source.set_groups([(A,), (B,)], 0)
    with pytest.raises(ValueError, match=r"clients_at_once above 1 collates .* batch_size=None"):
        source.set_groups([(A, B)], 0)
