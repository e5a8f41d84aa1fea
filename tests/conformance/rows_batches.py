"""Rows: what a batch may be."""

from collections import namedtuple
from dataclasses import dataclass
from functools import partial

import torch
from matrix import Equals, Row, kind
from project import Net, Project, examples, loader
from torch import nn
from torch.utils.data import Dataset

batch = kind("Batches")


class Items(Dataset):
    def __init__(self, made):
        self.pairs, self.made = examples(), made

    def __len__(self):
        return len(self.pairs)

    def __getitem__(self, index):
        return self.made(*self.pairs[index])


class Reads(Net):
    def __init__(self, read):
        super().__init__()
        self.read = read

    def loss(self, batch):
        return super().loss(self.read(batch))


def of(made, read, **settings):
    data = partial(torch.utils.data.DataLoader, Items(made), batch_size=2, shuffle=True, **settings)
    return Equals(Project(partial(Reads, read), data))


Pair = namedtuple("Pair", ["x", "y"])


@dataclass
class Example:
    x: torch.Tensor
    y: torch.Tensor


class Graphs:
    """Several small graphs as one, as PyTorch Geometric has them: nodes, edges, and whose node is whose."""

    def __init__(self, x, y, edge_index, batch):
        self.x, self.y, self.edge_index, self.batch = x, y, edge_index, batch

    def to(self, device, non_blocking=False):
        return Graphs(*(part.to(device) for part in (self.x, self.y, self.edge_index, self.batch)))

    @classmethod
    def collated(cls, pairs):
        """One graph for each example: three nodes in a line."""
        nodes = torch.cat([x.reshape(3, 1) for x, _ in pairs])
        edges = torch.cat(
            [torch.tensor([[0, 1], [1, 2]]) + 3 * number for number in range(len(pairs))], dim=1
        )
        return cls(
            nodes, torch.stack([y for _, y in pairs]), edges, torch.arange(len(pairs)).repeat_interleave(3)
        )


class GraphNet(Net):
    """One convolution over edges, then the mean of each graph."""

    def __init__(self):
        super().__init__()
        self.net = nn.ModuleDict({"own": nn.Linear(1, 4), "near": nn.Linear(1, 4), "out": nn.Linear(4, 1)})

    def loss(self, batch):
        near = torch.zeros_like(batch.x).index_add(0, batch.edge_index[1], batch.x[batch.edge_index[0]])
        nodes = (self.net["own"](batch.x) + self.net["near"](near)).tanh()
        graphs = torch.zeros(len(batch.y), 4).index_add(0, batch.batch, nodes) / 3
        return nn.functional.mse_loss(self.net["out"](graphs), batch.y)


def ragged(pairs):
    """Lists of different lengths beside the targets."""
    return [x[: 1 + number % 3] for number, (x, _) in enumerate(pairs)], torch.stack([y for _, y in pairs])


class Ragged(Net):
    def loss(self, batch):
        rows, y = batch
        full = torch.stack([nn.functional.pad(row, (0, 3 - len(row))) for row in rows])
        return nn.functional.mse_loss(self.net(full), y)


class Texts(Net):
    """Its batches have strings beside the tensors."""

    def loss(self, batch):
        assert all(isinstance(name, str) for name in batch["name"])
        return super().loss((batch["x"], batch["y"]))


def packed(pairs):
    """A packed sequence of the features, read one by one."""
    sequences = [x[: 3 - number % 2, None] for number, (x, _) in enumerate(pairs)]
    return nn.utils.rnn.pack_sequence(sequences, enforce_sorted=False), torch.stack([y for _, y in pairs])


class Recurrent(Net):
    def __init__(self):
        super().__init__()
        self.net = nn.ModuleDict({"gru": nn.GRU(1, 4), "out": nn.Linear(4, 1)})

    def loss(self, batch):
        _, last = self.net["gru"](batch[0])
        return nn.functional.mse_loss(self.net["out"](last[0]), batch[1])


def collated(function):
    return partial(loader, collate_fn=function)


ROWS: list[Row] = [
    batch("a tensor", of(lambda x, y: torch.cat([x, y]), lambda rows: (rows[:, :3], rows[:, 3:]))),
    batch.equals("a tuple or list of tensors", Project()),
    batch("a dict", of(lambda x, y: {"x": x, "y": y}, lambda parts: (parts["x"], parts["y"]))),
    batch(
        "dicts and lists inside of each other",
        of(
            lambda x, y: {"in": {"x": [x]}, "out": (y,)}, lambda parts: (parts["in"]["x"][0], parts["out"][0])
        ),
    ),
    batch("a namedtuple", of(Pair, lambda pair: (pair.x, pair.y))),
    batch.equals(
        "a dataclass",
        Project(
            partial(Reads, lambda one: (one.x, one.y)),
            collated(lambda pairs: Example(*(torch.stack(part) for part in zip(*pairs, strict=True)))),
        ),
    ),
    batch.equals("ragged rows, a list of tensors of different lengths", Project(Ragged, collated(ragged))),
    batch.equals("a PackedSequence", Project(Recurrent, collated(packed))),
    batch.equals(
        "an object with .to(device), as PyTorch Geometric's Batch",
        Project(GraphNet, collated(Graphs.collated)),
    ),
    batch.equals(
        "strings beside tensors",
        Project(
            Texts,
            partial(
                torch.utils.data.DataLoader, Items(lambda x, y: {"x": x, "y": y, "name": "row"}), 2, True
            ),
        ),
    ),
]
