import sys
from pathlib import Path

import lightning as L
import pytest
from plain_lightning import Numbers, Regression, ten_clients, trainer
from tiny_world import VOTES

import fedlight
from fedlight import ByClient, FederatedLoop, PreferenceDataModule, SelectorModule

HOME = Path(fedlight.__file__).parent
ROOMS = ("lora", "forward", "groups", "processes", "devices")


class Watch(L.Callback):
    """The files of fedlight in which a function is called in the second round."""

    def __init__(self):
        self.entered = set()

    def on_train_epoch_start(self, trainer, pl_module):
        sys.setprofile(self.note if trainer.current_epoch == 1 else None)

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.current_epoch == 1:
            sys.setprofile(None)

    def note(self, frame, event, arg):
        if event == "call" and frame.f_code.co_filename.startswith(str(HOME)):
            self.entered.add(frame.f_code.co_filename.removeprefix(f"{HOME}/"))


def entered(model, data, *callbacks):
    watch = Watch()
    loop = FederatedLoop(clients_per_round=3, local_steps=2)
    before = sys.getprofile()
    try:
        trainer(3, [*callbacks, loop, watch], num_sanity_val_steps=0, limit_val_batches=0).fit(model, data)
    finally:
        sys.setprofile(before)
    return watch.entered


def test_a_round_of_fedavg_with_somebodys_own_module(threads):
    found = entered(Regression(), Numbers(), ByClient(ten_clients))
    assert len(found) <= 14, sorted(found)
    assert not [file for file in found if set(Path(file).parts) & set(ROOMS)]


@pytest.fixture
def threads(monkeypatch):
    monkeypatch.setattr("torch.get_num_threads", lambda: 1)


def test_a_round_of_fedbis(tiny_model, threads):
    data = PreferenceDataModule(VOTES, tokenizer=tiny_model, view="selector", batch_size=2)
    found = entered(SelectorModule(tiny_model, dtype="fp32"), data)
    assert len(found) <= 25, sorted(found)
    assert not [file for file in found if set(Path(file).parts) & set(ROOMS)]
