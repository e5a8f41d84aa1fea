import inspect
from typing import Union

import pytest
from lightning.pytorch import Trainer

from fedlight.lightning_cli.cli import ReadSettings

GIVEN = [
    *("fit", "--model=SelectorModule", "--model.model=toy", "--data=PreferenceDataModule"),
    "--data.source=toy:votes",
]


@pytest.mark.parametrize("types", [Union[float, int, None], Union[int, float, None]])  # noqa: UP007  a `|` has one order
@pytest.mark.parametrize("value", ["1", "1.0", "0", "0.5"])
def test_one_batch_is_not_all_batches(types, value, monkeypatch):
    # Python keeps one Optional[Union[int, float]] with the order of the package that was imported first.
    monkeypatch.setitem(inspect.unwrap(Trainer.__init__).__annotations__, "limit_train_batches", types)
    read = ReadSettings([*GIVEN, f"--trainer.limit_train_batches={value}"])
    assert repr(read.config["fit"].trainer.limit_train_batches) == value
