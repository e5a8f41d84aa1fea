"""What the federated loop takes for granted about Lightning, on the smallest runs that show it.

If a new Lightning breaks one of these, the loop is wrong even where its own tests still pass: read the failing fact
first. Each test says which part of the loop rests on it.
"""

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_facts import QUIET, Model, Numbers, fit
from torch.utils.data import DataLoader

HOOKS = ("setup", "on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start")
HOOKS += ("on_before_optimizer_step", "on_train_batch_end", "on_train_epoch_end")


class Validated(Model):
    def validation_step(self, batch, batch_idx):
        self.hooks.append("validation_step")

    def val_dataloader(self):
        return DataLoader(Numbers(1))


class Recorder(L.Callback):
    """Writes the hooks that the loop uses into a list, in the order in which they come."""

    def __init__(self, hooks: list[str]) -> None:
        self.hooks = hooks
        for name in HOOKS:
            setattr(self, name, lambda *_, name=name, **__: hooks.append(name))

    def state_dict(self):
        self.hooks.append("callback.state_dict")
        return {"recorded": True}

    def load_state_dict(self, state_dict):
        self.hooks.append("callback.load_state_dict")


class Loaders(L.LightningDataModule):
    """A training loader of two batches."""

    def __init__(self, hooks: list[str]) -> None:
        super().__init__()
        self.hooks = hooks

    def setup(self, stage):
        self.hooks.append("datamodule.setup")

    def train_dataloader(self):
        self.hooks.append("train_dataloader")
        return DataLoader(Numbers(2))


def test_validation_comes_before_the_epochs_end_and_the_checkpoint_after_it(tmp_path):
    """Hence the server steps in ``on_train_batch_end``: later would validate the last client's weights."""
    hooks: list[str] = []
    options = {"enable_checkpointing": True, "num_sanity_val_steps": 0}
    fit(Validated(hooks), callbacks=[Recorder(hooks), ModelCheckpoint(tmp_path)], **options)
    last = ["on_train_batch_end", "validation_step", "on_train_epoch_end", "callback.state_dict"]
    assert hooks[-4:] == last


def test_order_from_setup_to_the_end_of_the_first_batch():
    """Hence the plan of round 0 in ``setup``, and what makes a client's data in ``on_train_epoch_start``."""
    hooks: list[str] = []
    fit(Model(hooks), DataLoader(Numbers(1, hooks)), [Recorder(hooks)])
    assert hooks == [
        *("setup", "on_fit_start", "on_train_start", "on_train_epoch_start"),
        *("fetch", "on_train_batch_start", "training_step"),
        *("on_before_optimizer_step", "on_train_batch_end", "on_train_epoch_end"),
    ]


def test_estimated_steps_fetch_the_loader_before_fit_starts():
    """Hence the plan of round 0 in ``setup`` already: here the first loader is made before ``on_fit_start``."""

    class Schedules(Model):
        def configure_optimizers(self):
            assert self.trainer.estimated_stepping_batches == 2
            return super().configure_optimizers()

    hooks: list[str] = []
    L.Trainer(max_epochs=1, callbacks=[Recorder(hooks)], **QUIET).fit(Schedules(), datamodule=Loaders(hooks))
    assert hooks[:4] == ["datamodule.setup", "setup", "train_dataloader", "on_fit_start"]
    assert hooks.count("train_dataloader") == 1


def test_accumulation_counts_batches_per_epoch():
    """Hence a visit is a multiple of ``accumulate_grad_batches``: the window of batches 2 and 3 is one step."""
    hooks: list[str] = []
    fit(Model(), 5, [Recorder(hooks)], accumulate_grad_batches=2)
    steps = [i for i, hook in enumerate(hooks) if hook.endswith("optimizer_step")]
    steps_after = [hooks[:i].count("on_train_batch_start") for i in steps]
    assert steps_after == [2, 4, 5]


def test_clearing_an_optimizers_state_keeps_its_groups():
    """Hence a fresh optimizer at each visit costs nothing: moments start again, the learning rate stays."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.AdamW([parameter], lr=0.1)
    parameter.grad = torch.ones(1)
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.05
    optimizer.state.clear()
    optimizer.step()
    assert optimizer.state[parameter]["step"] == 1
    assert optimizer.param_groups[0]["lr"] == 0.05


def test_gradients_are_changed_before_they_are_clipped():
    """Hence FedProx and SCAFFOLD work in ``on_before_optimizer_step``: what they add is clipped with the rest."""

    class AddsTen(L.Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            self.raw = pl_module.weight.grad.item()
            pl_module.weight.grad += 10.0

    class SeesTheStep(Model):
        def optimizer_step(self, epoch, batch_idx, optimizer, closure):
            super().optimizer_step(epoch, batch_idx, optimizer, closure)
            self.stepped_with = self.weight.grad.item()

    callback, model = AddsTen(), SeesTheStep()
    fit(model, callbacks=[callback], gradient_clip_val=2.0)
    assert callback.raw == 1.0
    assert model.stepped_with == pytest.approx(2.0, abs=1e-5)  # 11 clipped to norm 2


def test_fit_leaves_a_frozen_mode_alone():
    """Hence our modules say ``.train()`` themselves: a model that comes in eval mode would train without dropout."""

    class SeesMode(Model):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Dropout(0.5).eval()

        def training_step(self, batch, batch_idx):
            self.mode = self.inner.training
            return super().training_step(batch, batch_idx)

    model = SeesMode()
    with pytest.warns(UserWarning, match="in eval mode"):
        fit(model)
    assert model.mode is False


def test_a_checkpoint_taken_after_validation_ends_its_epoch_first(tmp_path):
    """Hence the loop counts rounds itself, at aggregation, and must stand ``on_train_epoch_end`` first thing."""

    class SavesAfterValidation(L.Callback):
        def on_validation_end(self, trainer, pl_module):
            if not trainer.sanity_checking:
                trainer.save_checkpoint(tmp_path / f"{trainer.current_epoch}.ckpt")

    fit(Validated(), callbacks=[SavesAfterValidation()], max_epochs=2)
    assert torch.load(tmp_path / "0.ckpt", weights_only=True)["epoch"] == 0
    hooks: list[str] = []
    fit(Validated(), callbacks=[Recorder(hooks)], ckpt_path=tmp_path / "0.ckpt", max_epochs=2)
    started = hooks.index("on_train_start")
    assert hooks[started + 1] == "on_train_epoch_end"
    assert hooks[started + 2] == "on_train_epoch_start"
    assert hooks.count("on_train_batch_end") == 1


def test_callbacks_are_restored_between_setup_and_fit_start(tmp_path):
    """Hence the loop plans anew in ``on_fit_start``: only then does it know which round comes next."""
    fit(Model(), callbacks=[Recorder([])]).save_checkpoint(tmp_path / "end.ckpt")
    hooks: list[str] = []
    fit(Model(), callbacks=[Recorder(hooks)], ckpt_path=tmp_path / "end.ckpt", max_epochs=2)
    assert hooks[:3] == ["setup", "callback.load_state_dict", "on_fit_start"]


@pytest.mark.parametrize("hook", ["on_fit_start", "on_train_end", "on_fit_end"])
def test_logging_is_refused_outside_of_the_epoch(hook):
    """Hence the loop logs at the round's last batch."""

    def logs(self, trainer, pl_module):
        pl_module.log("fed/loss", 1.0)

    callback = type("Logs", (L.Callback,), {hook: logs})()
    with pytest.raises(Exception, match=r"You can't `self.log\(\)`"):
        fit(Model(), callbacks=[callback])


def test_every_checkpoint_of_the_trainer_is_made_by_its_connector(tmp_path):
    """Hence a round's beginning is saved in the place of its middle; of weights alone no callback is told."""
    told = []

    class Saves(L.Callback):
        def on_save_checkpoint(self, trainer, pl_module, checkpoint):
            told.append(sorted(checkpoint))

        def on_train_batch_end(self, trainer, pl_module, *args):
            trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
            trainer.save_checkpoint(tmp_path / "all.ckpt")
            connector = trainer._checkpoint_connector
            connector.dump_checkpoint = lambda weights_only: {"of_weights_only": weights_only}
            trainer.save_checkpoint(tmp_path / "mine.ckpt", weights_only=True)

    fit(Model(), callbacks=[Saves()])
    assert len(told) == 1
    everything = {"callbacks", "epoch", "global_step", "loops", "lr_schedulers", "optimizer_states"}
    everything.add("state_dict")
    assert everything <= set(told[0])
    of_weights = torch.load(tmp_path / "weights.ckpt", weights_only=True)
    assert everything - set(of_weights) == {"callbacks", "lr_schedulers", "optimizer_states"}
    assert torch.load(tmp_path / "mine.ckpt", weights_only=True) == {"of_weights_only": True}


def test_an_epoch_is_counted_as_ready_before_its_first_hook_and_can_be_counted_back(tmp_path):
    """Hence the checkpoint of a round's beginning takes one from ``ready``: a run goes on with that epoch's first hook."""

    class Saves(L.Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            if trainer.current_epoch == 1:
                trainer.save_checkpoint(tmp_path / "1.ckpt")

    fit(Model(), 2, [Saves()], max_epochs=2)
    checkpoint = torch.load(tmp_path / "1.ckpt", weights_only=True)
    progress = checkpoint["loops"]["fit_loop"]["epoch_progress"]
    counts = {"ready": 2, "started": 1, "processed": 1, "completed": 1}
    assert progress["total"] == progress["current"] == counts
    for each in progress.values():
        each["ready"] -= 1
    torch.save(checkpoint, tmp_path / "1.ckpt")
    hooks: list[str] = []
    trainer = fit(Model(), 2, [Recorder(hooks)], tmp_path / "1.ckpt", max_epochs=2)
    assert hooks[hooks.index("on_train_start") + 1] == "on_train_epoch_start"
    assert hooks.count("on_train_batch_end") == 2
    assert (trainer.current_epoch, trainer.global_step) == (2, 4)
