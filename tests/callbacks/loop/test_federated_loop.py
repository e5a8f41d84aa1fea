from importlib import import_module

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from plain_lightning import Numbers, Regression, assert_equal, federate, module, ten_clients, trainer, weights
from refusals import refusal
from torch.utils.data import DataLoader
from written_out import assert_close, combined, local, recorded

from fedlight import FedAvg, FederatedLoop, FederatedWrapper


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_one_client_with_all_the_data_is_plain_training_bit_for_bit(optimizer):
    """K steps of AdamW in one round; with SGD, which keeps nothing, any number of rounds."""
    rounds = 1 if optimizer == "AdamW" else 3
    seen = []

    class Recorder(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            seen.append((torch.get_rng_state(), batch))

    federated, _ = federate(
        rounds,
        clients=lambda dataset: {"only": np.arange(120)},
        model=module(optimizer=optimizer),
        callbacks=[Recorder()],
        clients_per_round=1,
        local_steps=12,
    )

    class Replay(L.Callback):
        def on_fit_start(self, trainer, pl_module):
            if optimizer == "AdamW":  # on the kernel that the loop chooses
                trainer.optimizers[0].param_groups[0]["fused"] = True

        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            torch.set_rng_state(seen[trainer.global_step][0])

    plain = module(optimizer=optimizer)
    batches = DataLoader([batch for _, batch in seen], batch_size=None)
    data = Numbers()
    data.setup("fit")
    trainer(1, [Replay()]).fit(plain, batches, data.val_dataloader())
    assert len(seen) == 12 * rounds
    assert_equal(weights(federated), weights(plain))


def test_order_of_the_clients_in_the_data_does_not_matter():
    def shuffled(dataset):
        return dict(reversed(ten_clients(dataset).items()))

    assert_equal(weights(federate()[0]), weights(federate(clients=shuffled)[0]))


@pytest.mark.parametrize("weighting", ["unbiased", "normalized", "uniform"])
def test_a_round_equals_a_loop_written_out(weighting):
    """Plain SGD without dropout, each client trained by hand from the same start on the same batches."""
    start, found, (batches,) = recorded(rounds=1, algorithm=FedAvg(weighting))
    movement = combined(start, {client: local(start, own) for client, own in batches.items()}, weighting)
    assert_close(found, {name: value + movement[name] for name, value in start.items()})


def test_a_run_whose_rounds_are_all_done_says_so(tmp_path, caplog):
    caplog.set_level("INFO")
    for ckpt_path in (None, tmp_path / "done.ckpt"):
        t = trainer(2, [FederatedLoop(clients_per_round=3, local_steps=2)], default_root_dir=tmp_path)
        t.fit(module(), FederatedWrapper(Numbers(), ten_clients), ckpt_path=ckpt_path, weights_only=True)
        assert ("all 2 rounds are done" in caplog.text) == (ckpt_path is not None)
        t.save_checkpoint(tmp_path / "done.ckpt")
    assert "raise trainer.max_epochs=2" in caplog.text


def test_module_and_callbacks_are_told_before_the_first_batch_of_each_visit():
    order = []

    class Model(Regression):
        def on_visit_start(self, client_id):
            order.append(("module", client_id))

        def training_step(self, batch, batch_idx):
            order.append("batch")
            return super().training_step(batch, batch_idx)

    class Callback(L.Callback):
        def on_visit_start(self, client_id):
            order.append(("callback", client_id))

    _, loop = federate(2, model=Model(), callbacks=[Callback()])
    visited = [entry[1] for entry in order if entry[0] == "module"]
    assert len(visited) == 6
    assert visited[3:] == [row["client"] for row in loop.visit_records]
    told = [[("module", client), ("callback", client), "batch", "batch"] for client in visited]
    assert order == sum(told, [])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: trainer(1, [federate(1)[1]]).fit(module(), wrapped()), "make a new one"),
        (lambda: FederatedLoop(clients_per_round=0), "clients_per_round=0 must be at least 1"),
        (lambda: FederatedLoop(local_steps=0), "local_steps=0 must be at least 1"),
        (
            lambda: FederatedLoop().setup(other_package().Trainer(max_epochs=1), module(), "fit"),
            r"of the package pytorch_lightning.*by lightning\.pytorch in the program",
        ),
        (
            lambda: trainer(
                1, [FederatedLoop(), other_package().callbacks.StochasticWeightAveraging(0.1)]
            ).fit(module(), wrapped()),
            "StochasticWeightAveraging averages weights across clients",
        ),
        (
            lambda: kept_by_the_module(FederatedLoop(clients_per_round=2)),
            r"hparams\.federation of Keeps holds .*save_hyperparameters\(ignore=\['federation'\]\)",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(make, message):
    with refusal(message):
        make()


def other_package():
    """Lightning's code under its older name, on which lightning depends."""
    return import_module("pytorch_lightning")


def kept_by_the_module(loop):
    class Keeps(Regression):
        def __init__(self, federation):
            super().__init__()
            self.save_hyperparameters()

    trainer(1, [loop]).fit(Keeps([loop]), wrapped())


def wrapped():
    return FederatedWrapper(Numbers(), ten_clients)


@pytest.mark.filterwarnings("ignore:You.re resuming from a checkpoint that ended before")
@pytest.mark.parametrize(
    ("inside", "message"), [(False, "that is not of"), (True, "at batch 30 .* is not of")]
)
def test_a_checkpoint_of_central_training_is_refused_on_resume(inside, message, tmp_path):
    """Also one from the middle of its epoch, where a validation is over, and a round has more batches than the epoch."""
    file = tmp_path / "central.ckpt"
    save = LambdaCallback(on_validation_end=lambda trainer, _: trainer.save_checkpoint(file))
    central = trainer(1, [save] if inside else [])
    central.fit(module(), Numbers())
    if not inside:
        central.save_checkpoint(file)
    t = trainer(2, [FederatedLoop(clients_per_round=3, local_steps=20)])
    with refusal(f"{message} a federated run"):
        t.fit(module(), wrapped(), ckpt_path=file, weights_only=True)
