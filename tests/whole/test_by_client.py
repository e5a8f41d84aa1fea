import lightning as L
import pytest
import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from plain_lightning import trainer
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from fedlight import ByClient, FederatedLoop, FederatedWrapper
from fedlight.datamodules.federated import GivenLoaders
from fedlight.datamodules.federated.datamodule import FederatedDataModule

X = torch.arange(1.0, 9.0)[:, None]
Y = 3 * X.flip(0)
LR = 0.01
HALVES = {"a": [0, 1, 2, 3], "b": range(4, 8)}


def halves(train_set):
    return HALVES


class Line(L.LightningModule):
    """y = w x, whose gradient is written out below."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen = []

    def training_step(self, batch, batch_idx):
        return (self.weight * batch[0] - batch[1]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=LR)


class Validated(Line):
    def validation_step(self, batch, batch_idx):
        self.seen.append((0, batch[0].sum().item()))


class ValidatedOnTwo(Line):
    def validation_step(self, batch, batch_idx, dataloader_idx):
        self.seen.append((dataloader_idx, batch[0].sum().item()))


def by_hand(rounds, factor=1.0, weight=0.0, clients=HALVES):
    """The weight after rounds of FedAvg with one step over all examples of each client, x times ``factor``."""
    for _ in range(rounds):
        ends = []
        for own in clients.values():
            x, y = factor * X[list(own)], Y[list(own)]
            ends.append(weight - LR * (2 * (weight * x - y) * x).mean().item())
        weight = sum(ends) / len(ends)
    return weight


def train_loader(**settings):
    return DataLoader(TensorDataset(X, Y), **{"batch_size": 4, "shuffle": True, **settings})


class Data(L.LightningDataModule):
    """Every hook that a datamodule can have; ``calls`` says which were called."""

    def __init__(self, num_classes=5, factor=2.0):
        super().__init__()
        self.save_hyperparameters()
        self.num_classes, self.counter, self.calls = num_classes, 0, []
        self.batch_size = self.train_set = self.seed = self.client_sizes = "my own"

    def prepare_data(self):
        self.calls.append("prepare_data")

    def setup(self, stage):
        self.calls.append("setup " + stage)

    def train_dataloader(self):
        return train_loader()

    def on_before_batch_transfer(self, batch, dataloader_idx):
        self.calls.append("before")
        return batch

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        self.calls.append("transfer")
        return [part.to(device) for part in batch]

    def on_after_batch_transfer(self, batch, dataloader_idx):
        self.calls.append("after")
        return [self.hparams.factor * batch[0], batch[1]]

    def state_dict(self):
        return {"counter": self.counter}

    def load_state_dict(self, state_dict):
        self.counter = state_dict["counter"]

    def on_exception(self, exception):
        self.calls.append(str(exception))

    def teardown(self, stage):
        self.calls.append("teardown " + stage)


WAYS = ["before", "behind", "wrapper"]


def fitted(way, model, rounds=2, data=None, ckpt_path=None, clients=halves, **given):
    """A federated fit: ``ByClient`` before or behind the loop, or the datamodule wrapped."""
    loop = FederatedLoop(clients_per_round=2, local_steps=1)
    sharing = [] if way == "wrapper" else [ByClient(clients)]
    callbacks = [loop, *sharing] if way == "behind" else [*sharing, loop]
    if way == "wrapper":
        given = {"datamodule": FederatedWrapper(data or GivenLoaders(**given), clients)}
    elif data is not None:
        given = {"datamodule": data}
    else:
        given = {f"{name}_dataloaders": loaders for name, loaders in given.items()}
    t = trainer(rounds, callbacks, num_sanity_val_steps=0)
    t.fit(model, **given, ckpt_path=ckpt_path, weights_only=True if ckpt_path else None)
    return t, loop


class Reads(Line):
    """A module that asks the trainer's datamodule, as many do."""

    def training_step(self, batch, batch_idx):
        data = self.trainer.datamodule
        assert isinstance(data, Data)
        assert (data.num_classes, data.hparams.factor) == (5, 2.0)
        assert {data.batch_size, data.train_set, data.seed, data.client_sizes} == {"my own"}
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("way", WAYS)
def test_the_datamodule_is_the_users_own_in_all_but_the_training_loader(way, tmp_path):
    data, model = Data(), Reads()
    t, _ = fitted(way, model, data=data)
    assert model.weight.item() == pytest.approx(by_hand(2, factor=2.0), rel=1e-5)
    assert t.datamodule is data
    assert data.trainer is t
    batch = ["before", "transfer", "after"]
    assert data.calls == ["prepare_data", "setup fit", *(4 * batch), "teardown fit"]

    data.counter = 7
    t.save_checkpoint(tmp_path / "two.ckpt")
    kept = torch.load(tmp_path / "two.ckpt", weights_only=True)
    assert kept["Data"] == {"counter": 7}
    assert kept["datamodule_hyper_parameters"] == {"num_classes": 5, "factor": 2.0}
    resumed, again = Data(), Reads()
    fitted(way, again, rounds=3, data=resumed, ckpt_path=tmp_path / "two.ckpt")
    assert resumed.counter == 7
    assert again.weight.item() == pytest.approx(by_hand(3, factor=2.0), rel=1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_the_datamodule_hears_of_exceptions_and_the_next_fit_is_its_own(way):
    class Breaks(Line):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            raise RuntimeError("broken")

    data = Data()
    with pytest.raises(RuntimeError, match="broken"):
        fitted(way, Breaks(), data=data)
    assert data.calls[-1] == "broken"

    loop = FederatedLoop(clients_per_round=2, local_steps=1)
    t = trainer(1, [loop])
    t.fit(Line(), FederatedWrapper(Data(), halves))
    t.fit_loop.max_epochs = 2
    with pytest.raises(ValueError, match="the datamodule Data does not say whose example is whose: add By"):
        t.fit(Line(), Data())


@pytest.mark.filterwarnings("ignore:You have overridden `on_after_batch_transfer` in `LightningModule` but")
@pytest.mark.parametrize("way", WAYS)
def test_hooks_of_the_module_are_used_where_the_datamodule_has_none(way):
    class Halving(Line):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            return [0.5 * batch[0], batch[1]]

    class Plain(L.LightningDataModule):
        def train_dataloader(self):
            return train_loader()

    model = Halving()
    fitted(way, model, data=Plain())
    assert model.weight.item() == pytest.approx(by_hand(2, factor=0.5), rel=1e-5)


@pytest.mark.parametrize("way", WAYS[:2])
def test_data_that_the_module_makes_in_its_setup(way):
    class Own(Validated):
        def setup(self, stage):
            self.data = TensorDataset(X, Y)

        def train_dataloader(self):
            return DataLoader(self.data, batch_size=4, shuffle=True)

        def val_dataloader(self):
            return DataLoader(self.data, batch_size=8)

        def configure_optimizers(self):
            self.steps = self.trainer.estimated_stepping_batches  # makes Lightning ask for the loader
            return super().configure_optimizers()

    model = Own()
    fitted(way, model)
    assert model.weight.item() == pytest.approx(by_hand(2), rel=1e-5)
    assert model.steps == 2  # rounds times the steps of the longest visit
    assert model.seen == [(0, 36.0)] * 2


class Stream(IterableDataset):
    def __iter__(self):
        return iter(zip(X, Y, strict=True))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["iterable", "list", "none"])
def test_validation_loaders_of_every_kind(way, kind):
    two = [DataLoader(TensorDataset(x, Y), batch_size=8) for x in (X, 2 * X)]
    val = {"iterable": DataLoader(Stream(), batch_size=8), "list": two, "none": None}[kind]
    model = {"iterable": Validated, "list": ValidatedOnTwo, "none": Line}[kind]()
    given = {"train": train_loader()} | ({} if val is None else {"val": val})
    fitted(way, model, rounds=1, **given)
    assert model.seen == {"iterable": [(0, 36.0)], "list": [(0, 36.0), (1, 72.0)], "none": []}[kind]
    assert model.weight.item() == pytest.approx(by_hand(1), rel=1e-5)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("train", "message"),
    [
        ({"x": train_loader()}, "are a dict of 1 loaders"),
        (CombinedLoader({"x": train_loader(), "y": train_loader()}), "are a dict of 2 loaders"),
    ],
)
def test_several_training_loaders_are_refused_by_name(way, train, message):
    model = Line()
    with pytest.raises(ValueError, match=message):
        fitted(way, model, train=train)
    assert model.weight.item() == 0


def test_who_says_whose_example_is_whose_is_said_once():
    class Knows(FederatedDataModule):
        def setup(self, stage):
            self.train_set, self.client_indices = TensorDataset(X, Y), HALVES

    loop = FederatedLoop(clients_per_round=2, local_steps=1)
    for callbacks, data, other in (
        ([ByClient(halves), loop], Knows(), "Knows"),
        ([loop, ByClient(halves)], FederatedWrapper(Data(), halves), "another ByClient or FederatedWrapper"),
        ([loop, ByClient(halves), ByClient(halves)], Data(), "another ByClient or FederatedWrapper"),
    ):
        with pytest.raises(ValueError, match=f"ByClient and {other} both assign .* remove ByClient"):
            trainer(1, callbacks).fit(Validated() if other == "Knows" else Line(), data)
    with pytest.raises(ValueError, match="nothing trains by client: add FederatedLoop"):
        trainer(1, [ByClient(halves)]).fit(Line(), Data())
    with pytest.raises(ValueError, match="the training loader does not say whose example is whose: add By"):
        trainer(1, [loop]).fit(Line(), train_loader())


def test_without_a_loop_the_wrapped_datamodule_trains_centrally():
    class Order(Data):
        def train_dataloader(self):
            return train_loader(shuffle=False, batch_size=8)

    model = Line()
    trainer(2).fit(model, FederatedWrapper(Order(factor=1.0), halves))
    everything = {"all": range(8)}
    assert model.weight.item() == pytest.approx(by_hand(2, clients=everything), rel=1e-5)


def test_settings_of_the_loader_are_kept():
    def init(worker):
        torch.manual_seed(worker)

    class Mine(DataLoader):
        """A class of one's own, with an attribute of its own."""

        note = "mine"

    settings = {"num_workers": 1, "persistent_workers": True, "prefetch_factor": 3, "timeout": 60}
    settings |= {"worker_init_fn": init, "multiprocessing_context": "fork", "in_order": False}
    loader = Mine(TensorDataset(X, Y), batch_size=4, **settings)
    workers = []

    class Watch(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            self.loader = trainer.train_dataloader
            workers.append(self.loader._iterator._workers[0].pid)

    watch, model = Watch(), Line()
    loop = FederatedLoop(clients_per_round=2, local_steps=1)
    trainer(2, [ByClient(halves), loop, watch]).fit(model, loader)
    assert model.weight.item() == pytest.approx(by_hand(2), rel=1e-5)
    assert type(watch.loader) is Mine
    assert watch.loader is not loader
    for name in (*settings, "dataset", "batch_size", "pin_memory", "collate_fn"):
        assert getattr(watch.loader, name) is getattr(loader, name), name
    assert len(workers) == 4


def test_a_datamodule_that_knows_its_clients_gives_positions_as_it_likes():
    class Knows(FederatedDataModule):
        def __init__(self, clients):
            super().__init__(batch_size=4)
            self.clients = clients

        def setup(self, stage):
            self.train_set = self.val_set = TensorDataset(X, Y)
            self.client_indices = self.clients

        def collate(self, examples):
            return [torch.stack(part) for part in zip(*examples, strict=True)]

    model = Validated()
    loop = FederatedLoop(clients_per_round=2, local_steps=1)
    trainer(2, [loop]).fit(model, Knows({1: [0, 1, 2, 3], "b": range(4, 8)}))
    assert model.weight.item() == pytest.approx(by_hand(2), rel=1e-5)
    assert list(loop.clients) == ["1", "b"]
    loop = FederatedLoop(clients_per_round=2, local_steps=1)
    with pytest.raises(ValueError, match="client 'b' has the position 8, but the training set has 8 exam"):
        trainer(2, [loop]).fit(model, Knows({"a": [0], "b": [8]}))


@pytest.mark.parametrize("way", WAYS)
def test_no_clients_are_refused_before_any_step(way):
    model = Line()
    with pytest.raises(ValueError, match="the training data have no clients: have the function of ByClient"):
        fitted(way, model, clients=lambda train_set: {}, train=train_loader())
    assert model.weight.item() == 0


class Noisy(torch.utils.data.Dataset):
    """Examples that are drawn anew whenever they are read."""

    def __len__(self):
        return 8

    def __getitem__(self, i):
        return X[i] + torch.rand(1), Y[i]


@pytest.mark.parametrize("batch_size", [4, None])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_random_transforms_depend_on_the_clients_own_visit_alone(num_workers, batch_size):
    """Not on who is visited before, nor on what a worker that persists has read in earlier rounds."""

    def read(clients, rounds=2):
        seen = {}

        class Watch(L.Callback):
            def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
                visit = loop.rounds_done, loop.visit.client_id
                seen.setdefault(visit, []).append(batch[0].flatten().tolist())

        loader = DataLoader(Noisy(), batch_size, num_workers=num_workers, persistent_workers=num_workers > 0)
        loop = FederatedLoop(clients_per_round=len(clients), local_steps=2)
        trainer(rounds, [ByClient(lambda _: clients), loop, Watch()]).fit(Line(), loader)
        return seen

    both, alone = read(HALVES), read({"b": HALVES["b"]})
    assert {visit: batches for visit, batches in both.items() if visit[1] == "b"} == alone
    values = [value for batches in both.values() for batch in batches for value in batch]
    assert len({value % 1 for value in values}) == len(values) == 2 * 2 * 2 * (batch_size or 1)


@pytest.mark.parametrize(
    "other",
    [
        {"clients": {"a": [0, 1, 2, 4], "b": [3, 5, 6, 7]}},
        {"seed": 1},
        {"generator": torch.Generator().manual_seed(1)},
    ],
)
def test_a_resumed_run_does_not_take_other_examples_or_another_order(tmp_path, other):
    def run(rounds, clients=HALVES, seed=0, ckpt_path=None, **settings):
        loop = FederatedLoop(clients_per_round=2, local_steps=1)
        t = trainer(rounds, [ByClient(lambda _: clients, seed), loop])
        t.fit(Line(), train_loader(**settings), ckpt_path=ckpt_path, weights_only=True)
        return t

    run(1).save_checkpoint(tmp_path / "one.ckpt")
    run(2, ckpt_path=tmp_path / "one.ckpt")
    with pytest.raises(ValueError, match=r"data\.client_examples"):
        run(2, ckpt_path=tmp_path / "one.ckpt", **other)


@pytest.mark.parametrize("wrapped", [False, True], ids=["callback", "wrapper"])
def test_a_mapping_names_clients_as_a_function_does(wrapped):
    loop, model = FederatedLoop(clients_per_round=2), Line()
    loaders = GivenLoaders(train_loader(shuffle=False))
    if wrapped:
        trainer(2, [loop]).fit(model, FederatedWrapper(loaders, HALVES))
    else:
        trainer(2, [ByClient(HALVES), loop]).fit(model, train_loader(shuffle=False))
    assert model.weight.item() == pytest.approx(by_hand(2))
