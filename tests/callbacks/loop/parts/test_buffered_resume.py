import lightning as L
import pytest
from fleets import make_fleet
from lightning.pytorch.callbacks import ModelCheckpoint
from memories import loop_with
from plain_lightning import Numbers, assert_equal, module, ten_clients, trainer, weights

from fedlight import FedAdam, FederatedWrapper, FedProx, Quantize, TopK, VisitLog, Wire
from fedlight.federation import ClientMemories
from fedlight.federation.asynchronous import FedBuff

pytestmark = pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
DEVICES = {
    "moody": {"availability": 0.7, "upload_mbps": 0.004},
    "nightly": {
        "availability": "{intervals_hours: [[0, 0.001]], period_hours: 0.003}",
        "upload_mbps": 0.0005,
    },
    "steady": {"upload_mbps": 0.003},
}


def run(folder, devices, ckpt_path=None, rounds=8, save=None, callbacks=(), fedbuff=None):
    model = module()
    loop = loop_with(
        algorithm=FedProx(),
        server=FedAdam(0.05),
        clients_per_round=5,
        local_steps=2,
        fleet=make_fleet(devices, buffered=fedbuff or FedBuff(2), **DEVICES),
        channel=Wire(up=[TopK(0.4, error_feedback=True), Quantize("int8")]),
        memory=ClientMemories(limit_mib=0),
    )
    log = VisitLog(str(folder / "visits.csv"))
    callbacks = [loop, log, *callbacks, *([save] if save else [])]
    fit = trainer(rounds, callbacks, enable_checkpointing=save is not None, default_root_dir=folder)
    fit.fit(model, FederatedWrapper(Numbers(), ten_clients), ckpt_path=ckpt_path, weights_only=True)
    return model, loop, log._table.rows()


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
def test_a_run_that_is_stopped_inside_a_step_goes_on_as_if_it_had_not_been(tmp_path):
    class Stop(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if trainer.current_epoch == 4 and batch_idx == 1:
                trainer.save_checkpoint(tmp_path / "inside.ckpt")
                raise RuntimeError("the power went out")

    whole, loop, rows = run(tmp_path / "whole", tmp_path / "devices")
    assert {"", "absent", "left"} == {row["reason"] for row in rows}
    with pytest.raises(RuntimeError, match="the power went out"):
        run(tmp_path / "stopped", tmp_path / "devices", callbacks=[Stop()])
    again, resumed, _ = run(tmp_path / "again", tmp_path / "devices", ckpt_path=tmp_path / "inside.ckpt")
    assert_equal(weights(whole), weights(again))
    assert resumed.virtual_seconds == loop.virtual_seconds
    assert repr(resumed.remembered()["buffered"]) == repr(loop.remembered()["buffered"])


def test_another_mode_or_buffer_is_refused(tmp_path):
    save = ModelCheckpoint(tmp_path / "saved", filename="{epoch}", save_top_k=-1)
    run(tmp_path / "whole", tmp_path / "devices", rounds=1, save=save)
    (checkpoint,) = (tmp_path / "saved").glob("*.ckpt")
    with pytest.raises(ValueError, match=r"buffered.buffer_size=2 .* not with .*buffer_size=3"):
        run(tmp_path / "other", tmp_path / "devices", ckpt_path=checkpoint, fedbuff=FedBuff(3))
