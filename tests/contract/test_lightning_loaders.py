import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler

QUIET = {
    "logger": False,
    "accelerator": "cpu",
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Model(L.LightningModule):
    """Counts its training steps; with ``hooks``, notes them there."""

    def __init__(self, hooks: list[str] | None = None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.hooks = hooks if hooks is not None else []
        self.trained = 0

    def training_step(self, batch, batch_idx):
        self.hooks.append("training_step")
        self.trained += 1
        return (self.weight * batch.sum()).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Numbers(Dataset):
    """The numbers 1 to ``size``; notes when one is fetched."""

    def __init__(self, size: int, hooks: list[str] | None = None) -> None:
        self.size = size
        self.hooks = hooks if hooks is not None else []

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if index >= self.size:
            raise IndexError
        self.hooks.append("fetch")
        return torch.tensor([index + 1.0])


class Endless(IterableDataset):
    """The same without a length."""

    def __init__(self, size: int, hooks: list[str]) -> None:
        self.numbers = Numbers(size, hooks)

    def __iter__(self):
        return iter(self.numbers)


class LoaderPerEpoch(L.LightningDataModule):
    """One training loader per epoch, of the given sizes."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        super().__init__()
        self.sizes = sizes

    def train_dataloader(self):
        return DataLoader(Numbers(self.sizes[self.trainer.current_epoch]))


@pytest.mark.parametrize(("reload_every", "trained"), [(1, 2 + 4 + 1), (0, 2 + 2 + 2)])
def test_rounds_of_unequal_length_need_a_new_loader_every_epoch(reload_every, trained):
    """Hence the loop sets ``reload_dataloaders_every_n_epochs`` in ``setup``, which is early enough."""

    class SetsReload(L.Callback):
        def setup(self, trainer, pl_module, stage):
            trainer.reload_dataloaders_every_n_epochs = reload_every

    model = Model()
    trainer = L.Trainer(max_epochs=3, callbacks=[SetsReload()], **QUIET)
    trainer.fit(model, datamodule=LoaderPerEpoch((2, 4, 1)))
    assert model.trained == trained


@pytest.mark.parametrize(
    ("data", "fetched_before_first_step"), [(Numbers, 1), (Endless, 2)], ids=["with length", "without length"]
)
def test_only_a_loader_without_length_is_prefetched(data, fetched_before_first_step):
    """Hence the round's loader has a length: a batch fetched early would belong to a client not yet visited."""
    hooks: list[str] = []
    L.Trainer(max_epochs=1, **QUIET).fit(Model(hooks), DataLoader(data(3, hooks)))
    assert hooks.index("training_step") == fetched_before_first_step


def test_set_epoch_reaches_only_the_samplers_that_lightning_looks_at():
    """Hence the round's sampler takes its round from ``set_visits``, not from ``set_epoch``."""

    class Sampler(RandomSampler):
        epochs: list[int]

        def set_epoch(self, epoch):
            self.epochs.append(epoch)

    class BatchSampler(list):
        def set_epoch(self, epoch):
            raise AssertionError("Lightning now calls set_epoch on batch samplers")

    numbers = Numbers(2)
    sampler = Sampler(numbers)
    sampler.epochs = []
    L.Trainer(max_epochs=2, **QUIET).fit(Model(), DataLoader(numbers, sampler=sampler))
    L.Trainer(max_epochs=1, **QUIET).fit(Model(), DataLoader(numbers, batch_sampler=BatchSampler([[0], [1]])))
    assert sampler.epochs == [0, 1]


@pytest.mark.parametrize(
    ("setting", "trained"),
    [({"max_steps": 3}, 3), ({"limit_train_batches": 2}, 4), ({"overfit_batches": 1}, 2)],
    ids=["max_steps", "limit_train_batches", "overfit_batches"],
)
def test_settings_that_cut_an_epoch_do_it_without_a_word(setting, trained):
    """Hence the loop refuses them: two epochs of four batches would be eight."""
    model = Model()
    L.Trainer(max_epochs=2, **QUIET, **setting).fit(model, DataLoader(Numbers(4)))
    assert model.trained == trained
