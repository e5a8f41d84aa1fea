"""Rows: samplers, data sets, loaders, datamodules, and how clients are said."""

from functools import partial

import lightning as L
import numpy as np
import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from matrix import Equals, Refused, Row, Works, kind
from probes import Watch
from project import Net, Project, Run, Validated, by_client, examples, loader, rows_of_clients
from torch.utils import data as torch_data
from torch.utils.data.datapipes.dataframe.datapipes import DFIterDataPipe
from torch.utils.data.datapipes.datapipe import IterDataPipe, MapDataPipe

from fedlight import ByClient, FederatedWrapper
from fedlight.datamodules.federated import GivenLoaders

sampler = kind("Samplers")
data_set = kind("Data sets")
loaders = kind("Loaders")
clients = kind("Datamodules, and whose example is whose")

ROW_OF = {tuple(x.tolist()): number for number, x in enumerate(examples().tensors[0])}
EVEN = {client: int((rows % 2 == 0).sum()) for client, rows in rows_of_clients().items()}


def positions(run):
    """Client and positions of each batch, for every visit of the run."""
    for visits in run.rounds:
        for client, batches in visits:
            yield client, [[ROW_OF[tuple(x.tolist())] for x in batch.content[0]] for batch in batches]


def own(client):
    return rows_of_clients()[client].tolist()


def sampled(make, **settings):
    """A loader with a sampler of this data set."""

    def data():
        made = examples()
        return torch_data.DataLoader(made, batch_size=2, sampler=make(made))

    return Equals(Project(data=data), **settings)


def a_pass_has_each_once(run):
    for client, batches in positions(run):
        of_pass = sum(batches[: -(-len(own(client)) // 2)], [])
        assert len(set(of_pass)) == len(of_pass)


def in_the_order_of_the_set(run, reverse=False):
    for client, batches in positions(run):
        rows = sorted(own(client), reverse=reverse)
        one_pass = [rows[start : start + 2] for start in range(0, len(rows), 2)]
        assert batches == (one_pass + one_pass)[:3]


def even_rows(run):
    assert all(row % 2 == 0 for _, batches in positions(run) for row in sum(batches, []))


def full_batches(run):
    assert all(len(batch) == 2 for _, batches in positions(run) for batch in batches)


def one_pass(run):
    for client, batches in positions(run):
        assert sorted(sum(batches, [])) == sorted(own(client))


def neighbours(run):
    """Pairs of neighbours in the client's own set."""
    for client, batches in positions(run):
        assert all(own(client).index(two) - own(client).index(one) == 1 for one, two in batches)


class Backwards(torch_data.Sampler):
    def __init__(self, source):
        self.source = source

    def __iter__(self):
        return iter(range(len(self.source) - 1, -1, -1))

    def __len__(self):
        return len(self.source)


class Neighbours(torch_data.Sampler):
    def __init__(self, source):
        self.source = source

    def __iter__(self):
        return iter([start, start + 1] for start in range(0, len(self.source) - 1, 2))

    def __len__(self):
        return len(self.source) // 2


def neighbouring(**settings):
    return lambda: torch_data.DataLoader(examples(), batch_sampler=Neighbours(examples()))


def with_batch_sampler(loop):
    return [ByClient(by_client, batch_sampler=Neighbours), loop]


def replicas(number):
    return lambda made: torch_data.DistributedSampler(made, num_replicas=number, rank=0)


class Rows(torch_data.Dataset):
    def __init__(self):
        self.pairs = examples()

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return self.pairs[index]


class Pipe(MapDataPipe, Rows):
    """The same as a data pipe."""

    def __init__(self):
        self.pairs = examples()


class Stream(torch_data.IterableDataset):
    def __iter__(self):
        return iter(examples())


class StreamPipe(IterDataPipe):
    def __iter__(self):
        return iter(examples())


class FramePipe(DFIterDataPipe):
    def __iter__(self):
        return iter(examples())


def over(make):
    return Equals(Project(data=lambda: torch_data.DataLoader(make(), batch_size=2, shuffle=True)))


def in_two_pieces():
    x, y = examples().tensors
    return torch_data.ConcatDataset(
        [torch_data.TensorDataset(x[:10], y[:10]), torch_data.TensorDataset(x[10:], y[10:])]
    )


def backwards_subset():
    return torch_data.Subset(torch_data.Subset(examples(), range(23, -1, -1)), range(23, -1, -1))


def split():
    """The two parts of a split, behind each other: every row, in another order."""
    first, second = torch_data.random_split(examples(), [20, 4], torch.Generator().manual_seed(0))
    return torch_data.DataLoader(torch_data.ConcatDataset([first, second]), batch_size=2, shuffle=True)


def clients_of_split(dataset):
    order = [row for part in dataset.datasets for row in part.indices]
    return {name: [order.index(row) for row in rows] for name, rows in rows_of_clients().items()}


def refused_set(make, says):
    return Refused(
        Project(data=lambda: torch_data.DataLoader(make(), batch_size=2)),
        says,
        "give the trainer a DataLoader over a map-style",
    )


def single_rows():
    """Every item of the set is a batch already."""
    return torch_data.DataLoader([[x[None], y[None]] for x, y in examples()], batch_size=None, shuffle=True)


class Hooked(L.LightningDataModule):
    def train_dataloader(self):
        return loader()

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return (2 * batch[0], batch[1])


class InSetup(Net):
    def setup(self, stage):
        self.rows = examples()

    def train_dataloader(self):
        return torch_data.DataLoader(self.rows, batch_size=2, shuffle=True)


def validation_may_stream(folder):
    """rounds are validated on it as epochs are"""
    run = Run(Project(Validated), folder).fit(val_dataloaders=torch_data.DataLoader(Stream(), batch_size=4))
    assert run.loop.rounds_done == 2


def several_validation_loaders(folder):
    """each is logged by its number"""

    class Two(Net):
        def validation_step(self, batch, batch_idx, dataloader_idx):
            self.log("val/loss", self.loss(batch))

    seen = Watch("on_validation_end", lambda trainer, module: sorted(trainer.callback_metrics))
    Run(Project(Two), folder, [seen]).fit(val_dataloaders=[loader(shuffle=False), loader(shuffle=False)])
    assert {"val/loss/dataloader_idx_0", "val/loss/dataloader_idx_1"} <= set(seen.seen[-1])


def said_as(change):
    """Clients whose positions are said otherwise."""
    return Equals(
        Project(clients=lambda dataset: {name: change(rows) for name, rows in rows_of_clients().items()})
    )


def mask(rows):
    made = np.zeros(24, dtype=bool)
    made[rows] = True
    return made


def with_row(client, row):
    changed = {name: rows.tolist() for name, rows in rows_of_clients().items()}
    changed[client] = [*changed[client], row]
    return Project(clients=lambda dataset: changed)


ROWS: list[Row] = [
    sampler(
        "RandomSampler",
        sampled(torch_data.RandomSampler, also=a_pass_has_each_once),
        "each client's examples, shuffled anew in each pass",
    ),
    sampler(
        "SequentialSampler",
        sampled(torch_data.SequentialSampler, also=in_the_order_of_the_set),
        "each client's examples in the order of the data set",
    ),
    sampler(
        "SubsetRandomSampler",
        sampled(lambda made: torch_data.SubsetRandomSampler(range(0, 24, 2)), sizes=EVEN, also=even_rows),
        "only examples of the subset count as the client's",
    ),
    sampler(
        "WeightedRandomSampler",
        sampled(
            lambda made: torch_data.WeightedRandomSampler([1.0 - row % 2 for row in range(24)], 24),
            sizes=EVEN,
            also=even_rows,
        ),
        "a client draws by the weights of its own examples; those of weight 0 do not count",
    ),
    sampler.equals(
        "BatchSampler",
        Project(
            data=lambda: torch_data.DataLoader(
                examples(),
                batch_sampler=torch_data.BatchSampler(torch_data.RandomSampler(examples()), 2, True),
            )
        ),
        means="batches of each client's examples, with the sampler, size and drop_last that it was given",
        also=full_batches,
    ),
    sampler(
        "a Sampler of one's own",
        sampled(Backwards, also=partial(in_the_order_of_the_set, reverse=True)),
        "each client's examples in the order in which they come",
        covers="Sampler",
    ),
    sampler.refused(
        "a batch sampler of one's own",
        Project(data=neighbouring()),
        "batch_sampler=Neighbours, which batches the examples of all clients together",
        "ByClient(clients, batch_sampler=lambda own_set: Neighbours(...))",
    ),
    sampler.equals(
        "a batch sampler of one's own, ByClient(..., batch_sampler=...)",
        Project(data=neighbouring(), federation=with_batch_sampler),
        means="each client's own set is batched by it",
        also=neighbours,
    ),
    sampler(
        "DistributedSampler, num_replicas=1",
        sampled(replicas(1), also=a_pass_has_each_once),
        covers="DistributedSampler",
    ),
    sampler.refused(
        "DistributedSampler, num_replicas=2",
        Project(
            data=lambda: torch_data.DataLoader(examples(), batch_size=2, sampler=replicas(2)(examples()))
        ),
        "DistributedSampler has num_replicas=2",
        "take it out, or set num_replicas=1",
    ),
    data_set("TensorDataset", over(examples)),
    data_set("a Dataset of one's own", over(Rows), covers="Dataset"),
    data_set("Subset", over(backwards_subset)),
    data_set.equals("what random_split gives", Project(data=split, clients=clients_of_split)),
    data_set("ConcatDataset", over(in_two_pieces)),
    data_set("StackDataset", over(lambda: torch_data.StackDataset(*examples().tensors))),
    data_set("MapDataPipe", over(Pipe)),
    data_set("a list of examples", over(lambda: [*examples()])),
    data_set("IterableDataset", refused_set(Stream, "the iterable data set Stream")),
    data_set(
        "ChainDataset",
        refused_set(lambda: torch_data.ChainDataset([Stream()]), "the iterable data set ChainDataset"),
    ),
    data_set("IterDataPipe", refused_set(StreamPipe, "the iterable data set")),
    data_set("DFIterDataPipe", refused_set(FramePipe, "the iterable data set")),
    loaders.equals(
        "local_steps=None",
        Project(loop={"local_steps": None}, data=partial(loader, batch_size=4)),
        means="one pass over each client's examples",
        also=one_pass,
    ),
    loaders.equals("DataLoader", Project(data=partial(loader, shuffle=True))),
    loaders.equals("drop_last=True", Project(data=partial(loader, drop_last=True)), also=full_batches),
    loaders.equals(
        "batch_size=None", Project(data=single_rows), means="every item of the data set is a batch"
    ),
    loaders.equals(
        "num_workers, persistent_workers",
        Project(data=partial(loader, num_workers=1, persistent_workers=True)),
    ),
    loaders.equals(
        "generator",
        Project(data=lambda: loader(generator=torch.Generator().manual_seed(3))),
        means="its seed counts beside that of ByClient",
    ),
    loaders.refused(
        "several loaders, CombinedLoader",
        Project(data=lambda: CombinedLoader([loader(), loader()])),
        "a list of 2 loaders",
        "give one DataLoader over one data set, such as a torch StackDataset",
    ),
    loaders.refused(
        "a list of batches",
        Project(data=lambda: [torch.zeros(2, 3)]),
        "the training data are a list",
        "give a torch DataLoader over a map-style",
    ),
    loaders("validation over an IterableDataset", Works(validation_may_stream), covers=""),
    loaders("several validation loaders", Works(several_validation_loaders)),
    clients.equals(
        "a LightningDataModule",
        Project(data=Hooked, module=Net),
        means="its hooks are used, also on_after_batch_transfer",
    ),
    clients.equals(
        "FederatedWrapper in the place of ByClient",
        Project(
            data=lambda: FederatedWrapper(GivenLoaders(loader()), by_client), federation=lambda loop: [loop]
        ),
    ),
    clients.equals("data made in LightningModule.setup", Project(InSetup, data=lambda: None)),
    clients.equals(
        "ByClient behind FederatedLoop", Project(federation=lambda loop: [loop, ByClient(by_client)])
    ),
    clients("positions as lists", said_as(lambda rows: rows.tolist())),
    clients("positions as tensors", said_as(torch.as_tensor)),
    clients("positions as masks", said_as(mask)),
    clients.refused("a position that is none", with_row("ann", 24), "client 'ann'", "24 examples"),
    clients.refused(
        "an example at two clients", with_row("ann", int(rows_of_clients()["ben"][0])), "'ann'", "'ben'"
    ),
    clients.refused(
        "a client without examples",
        Project(clients=lambda dataset: rows_of_clients() | {"eve": []}),
        "'eve'",
        "leave them out of the partition",
    ),
    clients.refused(
        "FederatedLoop without ByClient",
        Project(federation=lambda loop: [loop]),
        "does not say whose example is whose",
        "add ByClient",
    ),
    clients.refused(
        "more clients in a round than there are",
        Project(loop={"clients_per_round": 5}),
        "clients_per_round=5",
        "set clients_per_round=4 or less",
    ),
]
