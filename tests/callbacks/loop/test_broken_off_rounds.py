import shutil

import lightning as L
import pytest
import torch
from fleets import make_fleet, rounds_of
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from plain_lightning import Numbers, Regression, assert_equal, module, ten_clients, trainer, weights

from fedlight import FederatedLoop, FederatedWrapper
from fedlight.callbacks.loop.plan import number_asked

MOODY = {"moody": {"availability": 0.5}}


class Warmup(Regression):
    """Asks Lightning how many steps there will be, so that it makes a loader before the fit starts."""

    def configure_optimizers(self):
        assert self.trainer.estimated_stepping_batches > 0
        return super().configure_optimizers()


def batches_by_client(kind, tmp_path):
    seen = []

    class Watch(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            seen.append((loop.visit.client_id, batch[0]))

    L.seed_everything(0, verbose=False)
    loop = FederatedLoop(
        clients_per_round=4, local_steps=2, fleet=make_fleet(tmp_path, over_selection=1.75, **MOODY)
    )
    trainer(2, [loop, Watch()]).fit(kind(), FederatedWrapper(Numbers(), ten_clients))
    return seen


def test_a_loader_from_before_the_devices_were_known_is_not_used(tmp_path):
    found, expected = batches_by_client(Warmup, tmp_path), batches_by_client(Regression, tmp_path)
    assert [client for client, _ in found] == [client for client, _ in expected]
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(found, expected, strict=True))


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
@pytest.mark.parametrize("fleet", [False, True])
def test_a_checkpoint_from_after_validation_goes_on_with_a_longer_or_an_empty_round(tmp_path, fleet):
    def run(ckpt_path=None):
        loop = FederatedLoop(
            clients_per_round=2 if fleet else 3,
            local_steps=None,
            fleet=make_fleet(tmp_path / "devices", **MOODY) if fleet else None,
        )
        save = ModelCheckpoint(
            tmp_path / "saved", filename="{epoch}", save_top_k=-1, save_on_train_epoch_end=False
        )
        model = module()
        trainer(7, [loop, save], enable_checkpointing=True, default_root_dir=tmp_path).fit(
            model, FederatedWrapper(Numbers(), ten_clients), ckpt_path=ckpt_path, weights_only=True
        )
        return model, loop

    whole, loop = run()
    files = [shutil.copy(file, tmp_path) for file in sorted((tmp_path / "saved").glob("*.ckpt"))]
    assert len(files) == 7
    for file in files[:-1]:
        again, resumed = run(file)
        assert_equal(weights(whole), weights(again))
        assert resumed.rounds_done == 7
        assert resumed.virtual_seconds == loop.virtual_seconds


def test_empty_rounds_are_validated_and_logged_like_others(tmp_path):
    seen = []

    class Watch(L.Callback):
        def on_validation_end(self, trainer, pl_module):
            seen.append((trainer.current_epoch, trainer.global_step))

    loop = FederatedLoop(
        clients_per_round=2, local_steps=2, fleet=make_fleet(tmp_path, tiny={"memory_gib": "0.000000001"})
    )
    stop = EarlyStopping("val/loss", patience=2)
    fit = trainer(9, [loop, Watch(), stop], accumulate_grad_batches=2, num_sanity_val_steps=0)
    model = module()
    fit.fit(model, FederatedWrapper(Numbers(), ten_clients))
    assert seen == [(0, 1), (1, 2), (2, 3)]  # two rounds without a better loss
    assert loop.rounds_done == 3
    assert "training_step" not in vars(model)


def test_a_run_that_is_stopped_inside_a_round_leaves_the_model_of_the_round_before(tmp_path):
    class Stop(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            trainer.should_stop = trainer.current_epoch == 1 and batch_idx == 2

    fleet = {"small": {"memory_gib": 0.0000012}}
    _, whole, _, _ = rounds_of(1, fleet=make_fleet(tmp_path, **fleet))
    model, loop = (
        module(),
        FederatedLoop(clients_per_round=3, local_steps=2, fleet=make_fleet(tmp_path, **fleet)),
    )
    fit = trainer(3, [loop, Stop()])
    fit.fit(model, FederatedWrapper(Numbers(), ten_clients))
    assert fit.global_step == 6 + 3
    assert_equal(weights(whole), weights(model))
    assert "training_step" not in vars(model)


def test_an_error_inside_an_empty_round_leaves_the_module_as_it_was(tmp_path):
    class Fail(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            raise RuntimeError("the plug is pulled")

    model = module()
    tiny = make_fleet(tmp_path, tiny={"memory_gib": "0.000000001"})
    with pytest.raises(RuntimeError, match="the plug is pulled"):
        trainer(2, [FederatedLoop(clients_per_round=2, fleet=tiny), Fail()]).fit(
            model, FederatedWrapper(Numbers(), ten_clients)
        )
    assert "training_step" not in vars(model)


@pytest.mark.parametrize(
    ("wanted", "times", "asked"), [(100, 1.1, 110), (50, 1.1, 55), (8, 1.3, 11), (8, 1.0, 8)]
)
def test_as_many_are_asked_as_a_person_would_count(wanted, times, asked):
    assert number_asked(wanted, times) == asked
