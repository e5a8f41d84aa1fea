import lightning as L
import pytest
from lightning_facts import QUIET, Model, Numbers, fit
from torch.utils.data import DataLoader, IterableDataset, RandomSampler


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
    assert len(model.hooks) == trained


@pytest.mark.parametrize(
    ("data", "fetched_before_first_step"), [(Numbers, 1), (Endless, 2)], ids=["with length", "without length"]
)
def test_only_a_loader_without_length_is_prefetched(data, fetched_before_first_step):
    """Hence the round's loader has a length: a batch fetched early would belong to a client not yet visited."""
    hooks: list[str] = []
    fit(Model(hooks), DataLoader(data(3, hooks)))
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
    fit(Model(), DataLoader(numbers, sampler=sampler), max_epochs=2)
    fit(Model(), DataLoader(numbers, batch_sampler=BatchSampler([[0], [1]])))
    assert sampler.epochs == [0, 1]


@pytest.mark.parametrize(
    ("setting", "trained"),
    [({"max_steps": 3}, 3), ({"limit_train_batches": 2}, 4), ({"overfit_batches": 1}, 2)],
    ids=["max_steps", "limit_train_batches", "overfit_batches"],
)
def test_settings_that_cut_an_epoch_do_it_without_a_word(setting, trained):
    """Hence the loop refuses them: two epochs of four batches would be eight."""
    model = Model()
    fit(model, 4, **{"max_epochs": 2, **setting})
    assert len(model.hooks) == trained
