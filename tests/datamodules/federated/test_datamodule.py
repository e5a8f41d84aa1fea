import pickle
from contextlib import nullcontext
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from stacked import Points, fit
from two_parts import TwoParts

from fedlight.datamodules.federated.rounds import PooledSampler


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


class Fails(TwoParts):
    def on_train_batch_end(self, *_):
        raise ArithmeticError


@pytest.mark.parametrize("model", [TwoParts, Fails])
def test_batches_are_pooled_again_after_a_federated_run(model):
    data = Points()
    with nullcontext() if model is TwoParts else pytest.raises(ArithmeticError):
        fit(model(), data, rounds=1)
    assert isinstance(data.train_dataloader().batch_sampler, PooledSampler)
