import numpy as np
import pytest
from plain_lightning import Numbers, trainer
from tiny_world import VOTES

from fedlight import PreferenceDataModule, Visit
from fedlight.datamodules.federated.loader_by_client import LoaderByClient
from fedlight.datamodules.rows.split import Split
from fedlight.devices.shape import BatchShape


@pytest.mark.parametrize("view", ["selector", "sft", "dpo"])
def test_shapes_are_those_of_the_batches_that_come(view):
    settings = {"tokenizer": "toy", "max_tokens": 128, "batch_size": 4, "split": Split(val_share=0)}
    data = PreferenceDataModule(VOTES, view=view, **settings)
    data.prepare_data()
    data.setup("fit")
    visits = [Visit(client, 5) for client in list(data.client_indices)[:3]]
    data.set_visits(visits, 7)
    expected = [shape for visit in visits for shape in data.batch_shapes(visit, 7)]
    for batch, shape in zip(data.train_dataloader(), expected, strict=True):
        parts = [batch["chosen"], batch["rejected"]] if view == "dpo" else [batch]
        assert shape.examples == len(parts[0]["input_ids"])
        assert shape.tokens == max(part["input_ids"].shape[1] for part in parts)
        labelled = 0 if view == "selector" else sum(int((part["labels"] != -100).sum()) for part in parts)
        assert shape.responses == labelled
    assert len({shape.tokens for shape in expected}) > 1


def test_data_that_are_no_text_have_examples_alone():
    t, numbers = trainer(1), Numbers()
    numbers.setup("fit")
    t.fit_loop._data_source.instance = numbers.train_dataloader()
    data = LoaderByClient(t, lambda dataset: {"small": np.arange(3), "large": np.arange(3, 90)})
    data.open()
    assert data.batch_shapes(Visit("small", 2), 0) == [BatchShape(3)] * 2
    assert data.batch_shapes(Visit("large", 1), 0) == [BatchShape(4)]
    assert [shape.examples for shape in data.batch_shapes(Visit("large", 23), 0)] == [4] * 21 + [3, 4]
    x, y = data.example_batch(3)
    assert (x.shape, y.shape) == ((3, 4), (3, 1))
