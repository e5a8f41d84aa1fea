import shutil

import lightning as L
import pytest
import torch
from fleets import make_fleet, rounds_of
from lightning.pytorch.callbacks import EarlyStopping, LambdaCallback, ModelCheckpoint
from plain_lightning import Numbers, Regression, assert_equal, federate, module, ten_clients, trainer, weights
from two_parts import Recorder

from fedlight import FederatedLoop, FederatedWrapper

MOODY = {"moody": {"availability": 0.5}}
TINY = {"tiny": {"memory_gib": "0.000000001"}}


class Warmup(Regression):
    """Asks Lightning how many steps there will be, so that it makes a loader before the fit starts."""

    def configure_optimizers(self):
        assert self.trainer.estimated_stepping_batches > 0
        return super().configure_optimizers()


def test_a_loader_from_before_the_devices_were_known_is_not_used(tmp_path):
    visits = []
    for kind in (Warmup, Regression):
        L.seed_everything(0, verbose=False)
        seen, fleet = Recorder(), make_fleet(tmp_path, over_selection=1.75, **MOODY)
        federate(2, model=kind(), callbacks=[seen], clients_per_round=4, fleet=fleet)
        visits.append(
            [(visit.client_id, batch[0]) for own in seen.visits.values() for visit, b in own for batch in b]
        )
    found, expected = visits
    assert [client for client, _ in found] == [client for client, _ in expected]
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(found, expected, strict=True))


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
@pytest.mark.parametrize("fleet", [False, True])
def test_a_checkpoint_from_after_validation_goes_on_with_a_longer_or_an_empty_round(tmp_path, fleet):
    def run(ckpt_path=None):
        devices = make_fleet(tmp_path / "devices", **MOODY) if fleet else None
        loop = FederatedLoop(clients_per_round=2 if fleet else 3, fleet=devices)
        save = ModelCheckpoint(
            tmp_path / "saved", filename="{epoch}", save_top_k=-1, save_on_train_epoch_end=False
        )
        model, data = module(), FederatedWrapper(Numbers(), ten_clients)
        fit = trainer(7, [loop, save], enable_checkpointing=True, default_root_dir=tmp_path)
        fit.fit(model, data, ckpt_path=ckpt_path, weights_only=True)
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
    watch = LambdaCallback(on_validation_end=lambda t, _: seen.append((t.current_epoch, t.global_step)))
    stop, settings = EarlyStopping("val/loss", patience=2), {"accumulate_grad_batches": 2}
    model, loop = federate(
        9,
        callbacks=[watch, stop],
        settings=settings | {"num_sanity_val_steps": 0},
        clients_per_round=2,
        fleet=make_fleet(tmp_path, **TINY),
    )
    assert seen == [(0, 1), (1, 2), (2, 3)]  # two rounds without a better loss
    assert loop.rounds_done == 3
    assert "training_step" not in vars(model)


def test_a_run_that_is_stopped_inside_a_round_leaves_the_model_of_the_round_before(tmp_path):
    class Stop(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            trainer.should_stop = trainer.current_epoch == 1 and batch_idx == 2

    fleet = make_fleet(tmp_path, small={"memory_gib": 0.0000012})
    _, whole, _, _ = rounds_of(1, fleet=fleet)
    model, _ = federate(3, callbacks=[Stop()], fleet=fleet)
    assert model.trainer.global_step == 6 + 3
    assert_equal(weights(whole), weights(model))
    assert "training_step" not in vars(model)


def test_an_error_inside_an_empty_round_leaves_the_module_as_it_was(tmp_path):
    class Fail(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            raise RuntimeError("the plug is pulled")

    model = module()
    with pytest.raises(RuntimeError, match="the plug is pulled"):
        federate(2, model=model, callbacks=[Fail()], clients_per_round=2, fleet=make_fleet(tmp_path, **TINY))
    assert "training_step" not in vars(model)
