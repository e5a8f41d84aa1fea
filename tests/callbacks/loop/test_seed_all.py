import os
import random

import lightning as L
import numpy as np
import pytest
import torch

from fedlight.callbacks.loop.run import seed_all
from fedlight.support.seeding import derive_seed


def draws():
    return [random.random(), np.random.rand(), torch.rand(3).tolist(), torch.randn(2).tolist()]


@pytest.mark.parametrize("parts", [(0, "round", 0), (7, "visit", 3, "c1", "train")])
def test_draws_are_those_of_lightning(parts, monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "5")
    monkeypatch.setenv("PL_SEED_WORKERS", "1")
    torch.randn(1)  # leaves half of a pair of normal numbers in the stream
    seed_all(*parts)
    found = draws()
    assert (os.environ["PL_GLOBAL_SEED"], os.environ["PL_SEED_WORKERS"]) == ("5", "1")
    L.seed_everything(derive_seed(*parts), verbose=False)
    assert found == draws()
    assert found != draws()


def test_devices_are_seeded_where_there_are_some(monkeypatch):
    seeds = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch, "manual_seed", seeds.append)
    seed_all(1, "server", 2)
    assert seeds == [derive_seed(1, "server", 2)]


@pytest.mark.gpu
def test_draws_on_a_gpu_are_those_of_lightning():
    seed_all(3, "visit")
    found = torch.rand(5, device="cuda")
    L.seed_everything(derive_seed(3, "visit"), verbose=False)
    assert torch.equal(found, torch.rand(5, device="cuda"))
