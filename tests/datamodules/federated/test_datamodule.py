import pickle
from multiprocessing.reduction import ForkingPickler

import torch
from plain_lightning import trainer
from stacked import Points, fit
from two_parts import TwoParts


def test_workers_that_are_not_forked_get_the_data_without_the_trainer():
    data = Points()
    fit(TwoParts(), data, rounds=1)
    for loader in (data.train_dataloader(), data._sequential(data.train_set)):
        dataset, collate = pickle.loads(ForkingPickler.dumps((loader.dataset, loader.collate_fn)))
        here, there = (
            made([rows[0], rows[1]]) for made, rows in ((data.collate, data.train_set), (collate, dataset))
        )
        assert all(torch.equal(here[key], there[key]) for key in here)
        assert collate.__self__.trainer is None is not data.trainer


def test_a_plain_trainer_gets_pooled_batches_also_after_a_federated_run():
    data, fresh = Points(), Points()
    fit(TwoParts(), data, rounds=1)
    for each in (data, fresh):
        trainer(1, limit_val_batches=0).fit(TwoParts(), datamodule=each)
    pairs = zip(data.train_dataloader(), fresh.train_dataloader(), strict=True)
    assert all(torch.equal(used["x"], new["x"]) for used, new in pairs)
