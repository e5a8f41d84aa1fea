import copy

import lightning as L
import numpy as np
import pytest
import torch
from fleets import make_fleet
from memories import loop_with
from plain_lightning import Numbers, assert_equal, module, ten_clients, trainer, weights
from refusals import refusal
from torch.utils.data import DataLoader

from fedlight import Algorithm, ByClient, FedAvg, FederatedLoop, FederatedWrapper, FedProx, Scaffold, Wire
from fedlight.callbacks.loop.guard import MAY_CHANGE
from fedlight.callbacks.loop.parts.buffers import LocalBuffers
from fedlight.federation import ClientMemories, FedAdam, FedAvgM, PrivateMean, Quantize, TopK, TrimmedMean
from fedlight.support.settings_record import constructor_arguments


class Trained(L.Callback):
    """Notes that training has started."""

    started = False

    def on_train_start(self, trainer, pl_module):
        self.started = True


class Own(FedAvg):
    """A user's algorithm; what it is given it calls otherwise."""

    def __init__(self, temperature):
        super().__init__()
        self._t = temperature


def run(rounds=1, ckpt_path=None, data=None, callbacks=(), settings=None, **loop):
    model, loop = module(), loop_with(**{"clients_per_round": 3, "local_steps": 2, **loop})
    fit = trainer(rounds, [loop, *callbacks], **(settings or {}))
    fit.fit(model, data or FederatedWrapper(Numbers(), ten_clients), ckpt_path=ckpt_path, weights_only=True)
    return model, fit


def other(folder):
    """Settings of the run and of the one that goes on, and what is said of the one and of the other."""
    four, eight = (make_fleet(folder / str(gib), phone={"memory_gib": gib}) for gib in (4, 8))
    more = make_fleet(folder, over_selection=1.5, phone={"memory_gib": 4})
    sooner = make_fleet(folder, deadline_seconds=9.5, phone={"memory_gib": 4})
    top, chain = Wire(up=TopK(0.1)), Wire(up=[TopK(0.1), Quantize("int8")])
    return [
        ({}, {"clients_per_round": 4}, "clients_per_round=3", "=4"),
        ({}, {"local_steps": None}, "local_steps=2", "=None"),
        ({"seed": 1}, {"seed": 2}, "seed=1", "=2"),
        ({"fleet": four}, {"fleet": more}, "fleet.over_selection=1.0", "=1.5"),
        ({"fleet": four}, {"fleet": eight}, "fleet.devices.phone.memory_gib=4", "=8"),
        ({"fleet": four}, {"fleet": sooner}, "fleet.deadline_seconds=None", "=9.5"),
        ({}, {"algorithm": FedProx(0.1)}, "algorithm=fedlight.FedAvg", "FedProx"),
        ({}, {"algorithm": Scaffold()}, "algorithm=fedlight.FedAvg", "Scaffold"),
        ({"algorithm": FedProx(0.1)}, {"algorithm": FedProx(0.2)}, "algorithm.mu=0.1", "=0.2"),
        (
            {"algorithm": FedAvg()},
            {"algorithm": FedAvg("uniform")},
            "algorithm.weighting=unbiased",
            "=uniform",
        ),
        ({"algorithm": Own(1.0)}, {"algorithm": Own(2.0)}, "algorithm.t=1.0", "=2.0"),
        ({"server": FedAvgM(beta=0.5)}, {"server": FedAvgM(beta=0.9)}, "server.beta=0.5", "=0.9"),
        ({"server": FedAdam()}, {"server": FedAvgM()}, "server=", "FedAvgM"),
        ({"channel": top}, {"channel": Wire(up=TopK(0.2))}, "channel.up_codecs[0].share=0.1", "=0.2"),
        ({"channel": top}, {"channel": chain}, "channel.up_codecs=", "Quantize"),
        ({}, {"aggregation": TrimmedMean(0.2)}, "aggregation=None", "TrimmedMean"),
        ({}, {"parts": [LocalBuffers()]}, "parts=", "LocalBuffers"),
        ({}, {"settings": {"accumulate_grad_batches": 2}}, "trainer.accumulate_grad_batches=1", "=2"),
    ]


@pytest.mark.parametrize("which", range(18))
def test_another_setting_is_refused_by_its_name(which, tmp_path):
    was, now, said, said_of_now = other(tmp_path)[which]
    _, fit = run(**was)
    fit.save_checkpoint(tmp_path / "one.ckpt")
    trained = Trained()
    with pytest.raises(ValueError, match="give the same, or start anew, without the checkpoint") as refused:
        run(2, tmp_path / "one.ckpt", callbacks=[trained], **now)
    before, _, after = str(refused.value).partition(" and goes on with it, not with ")
    assert (said if said.startswith("trainer.") else f"federated.{said}") in before
    assert said_of_now in after
    assert not trained.started
    run(2, tmp_path / "one.ckpt", **was)


def without_the_last(dataset):
    return {name: rows for name, rows in ten_clients(dataset).items() if name != "c9"}


def sizes_changed(dataset):
    clients = ten_clients(dataset)
    return clients | {"c0": clients["c0"][:-1], "c7": np.append(clients["c7"], clients["c0"][-1])}


def exchanged(dataset):
    clients = ten_clients(dataset)
    return clients | {
        "c0": np.append(clients["c0"][:-1], clients["c7"][-1]),
        "c7": np.append(clients["c7"][:-1], clients["c0"][-1]),
    }


class Larger(Numbers):
    """Batches of another size."""

    def train_dataloader(self):
        return DataLoader(self.data, batch_size=6, shuffle=True)


def wrapped(clients=ten_clients, data=Numbers):
    return FederatedWrapper(data(), clients), ()


def by_client(clients=ten_clients, data=Numbers):
    return data(), (ByClient(clients),)


OTHER_DATA = [
    ({"clients": without_the_last}, "data.clients=10 and goes on with it, not with data.clients=9"),
    ({"clients": sizes_changed}, "data.client_sizes=digest"),
    ({"clients": exchanged}, "data.client_examples=digest"),
    ({"data": Larger}, "data.batches_in_a_pass="),
]


@pytest.mark.parametrize("kind", [wrapped, by_client])
@pytest.mark.parametrize(("changes", "said"), OTHER_DATA)
def test_other_data_are_refused(kind, changes, said, tmp_path):
    def federated(**changes):
        data, callbacks = kind(**changes)
        return {"data": data, "callbacks": callbacks}

    _, fit = run(**federated())
    fit.save_checkpoint(tmp_path / "one.ckpt")
    with pytest.raises(ValueError, match=f"the checkpoint was trained with {said}"):
        run(2, tmp_path / "one.ckpt", **federated(**changes))
    run(2, tmp_path / "one.ckpt", **federated())


def test_what_changes_no_result_may_change(tmp_path):
    whole, fit = run(3)
    _, fit = run(2)
    fit.save_checkpoint(tmp_path / "two.ckpt")
    memory = ClientMemories(str(tmp_path / "elsewhere"), limit_mib=1)
    settings = {"log_every_n_steps": 1, "default_root_dir": tmp_path / "there"}
    again, _ = run(3, tmp_path / "two.ckpt", memory=memory, settings=settings)
    assert_equal(weights(whole), weights(again))


@pytest.mark.parametrize(
    ("objects", "learns"),
    [
        (lambda: {"channel": Wire(down=Quantize("int8"))}, False),
        (lambda: {"aggregation": PrivateMean(1.0, 0.5, delta=0.01, bands=2)}, False),
        (lambda: {"server": FedAdam()}, True),
        (lambda: {"algorithm": Scaffold(), "server": FedAvgM()}, True),
    ],
)
def test_objects_of_an_earlier_run_go_on_from_its_checkpoint_and_begin_no_run_with_what_they_know(
    objects, learns, tmp_path
):
    whole, _ = run(2, **objects())
    used = objects()
    model, fit = run(**used)
    fit.save_checkpoint(tmp_path / "one.ckpt")
    again, _ = run(2, tmp_path / "one.ckpt", **used)
    assert_equal(weights(whole), weights(again))
    if learns:
        with refusal(r"remembers the rounds of another FederatedLoop: make a new one for a new run"):
            run(**used)
        with refusal("remembers the rounds of another FederatedLoop"):
            run(**copy.deepcopy(used))  # as out of a module's hyperparameters
    else:
        assert_equal(weights(run(**used)[0]), weights(model))


def test_a_trainer_goes_on_with_the_same_data_alone():
    """As from a checkpoint: SCAFFOLD's controls, a privacy account and memories are those of its clients."""
    whole, _ = run(3)
    model, fit = run(1)
    fit.fit_loop.max_epochs = 3
    trained = Trained()
    fit.callbacks.append(trained)
    with refusal("this FederatedLoop has trained with data.clients=10, and now has 9: give it the same data"):
        fit.fit(model, FederatedWrapper(Numbers(), without_the_last))
    assert not trained.started
    fit.fit(model, FederatedWrapper(Numbers(), ten_clients))
    assert_equal(weights(whole), weights(model))


def test_a_trainer_that_goes_on_without_a_checkpoint_says_that_schedules_begin_anew(tmp_path):
    model, fit = run(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model.configure_optimizers = lambda: ([optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)])
    fit.fit_loop.max_epochs = 2
    with pytest.warns(UserWarning, match="goes on after round 1, but Lightning begins the schedules"):
        fit.fit(model, FederatedWrapper(Numbers(), ten_clients))
    fit.save_checkpoint(tmp_path / "two.ckpt")
    fit.fit_loop.max_epochs = 3
    fit.fit(
        model, FederatedWrapper(Numbers(), ten_clients), ckpt_path=tmp_path / "two.ckpt", weights_only=True
    )


def test_who_evaluates_a_checkpoint_is_not_asked_how_it_was_trained(tmp_path):
    model, fit = run()
    fit.save_checkpoint(tmp_path / "one.ckpt")
    loop = FederatedLoop(FedProx(0.5), clients_per_round=7, seed=4)
    loss = trainer(1, [loop]).validate(module(), Numbers(), ckpt_path=tmp_path / "one.ckpt", verbose=False)
    assert loss == trainer(1).validate(model, Numbers(), verbose=False)


def test_every_argument_of_the_loop_is_recorded_and_kept_under_its_name():
    arguments = {*constructor_arguments(FederatedLoop)} - {*MAY_CHANGE}
    loop = FederatedLoop(algorithm=Algorithm())
    assert {f"federated.{name}" for name in arguments} == loop._federation.settings.keys()
    assert all(hasattr(loop, name) for name in arguments)
