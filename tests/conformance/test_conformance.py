import inspect
import os
import re

import lightning as L
import pytest
import torch
from lightning.pytorch import accelerators, callbacks, loggers, plugins, profilers, strategies
from page import PAGE, ROWS, render
from torch.optim import Optimizer, lr_scheduler
from torch.utils import data


def names(module, base=object):
    """Classes of the module's own list that derive from this."""
    found = [(name, getattr(module, name)) for name in module.__all__]
    return [name for name, value in found if inspect.isclass(value) and issubclass(value, base)]


LISTS = {
    "Trainer": [
        f"Trainer.{name}" for name in inspect.signature(L.Trainer.__init__).parameters if name != "self"
    ],
    "callbacks": names(callbacks),
    "plugins": names(plugins),
    "optimizers": names(torch.optim, Optimizer),
    "schedules": names(lr_scheduler),
    "samplers": names(data, data.Sampler),
    "data sets": names(data, data.Dataset),
    "loaders": names(data, data.DataLoader),
    "loggers": names(loggers),
    "profilers": names(profilers),
    "strategies": names(strategies),
    "accelerators": names(accelerators),
}


@pytest.fixture(autouse=True)
def settings_of_the_process():
    """What rows may change of it, as Lightning does for ``deterministic`` and for strategies, is put back."""
    environment = dict(os.environ)
    deterministic, benchmark = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    yield
    os.environ.clear()
    os.environ.update(environment)
    torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.benchmark = benchmark


def slug(row):
    return re.sub(r"\W+", "-", f"{row.kind}-{row.subject}").strip("-")


@pytest.mark.parametrize("row", ROWS, ids=slug)
def test_row(row, tmp_path):
    row.proof.check(tmp_path)


@pytest.mark.parametrize("of", LISTS)
def test_nothing_of_the_lists_is_without_a_row(of):
    covered = {name for row in ROWS for name in row.covers}
    assert LISTS[of]
    assert [name for name in LISTS[of] if name not in covered] == []


def test_no_subject_stands_twice():
    subjects = [(row.kind, row.subject) for row in ROWS]
    assert len(set(subjects)) == len(subjects)


def test_the_page_is_up_to_date():
    assert PAGE.read_text(encoding="utf-8") == render(), "run: python tests/conformance/page.py"
