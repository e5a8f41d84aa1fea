import os
import shutil
from collections import OrderedDict
from functools import partial

import lightning as L
import pytest
import torch
from fleets import make_fleet
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    Checkpoint,
    EarlyStopping,
    LambdaCallback,
    ModelCheckpoint,
    OnExceptionCheckpoint,
)
from lightning.pytorch.plugins.environments import SLURMEnvironment
from memories import loop_with
from plain_lightning import Numbers, Regression, assert_equal, ten_clients, trainer, weights
from refusals import refusal
from tastes import Adapters, Tastes
from tiny_world import table
from torch import nn

from fedlight import FedAdam, FedBiscuit, FederatedWrapper, Scaffold, TopK, VisitLog, Wire
from fedlight.callbacks.loop.parts import AveragedBuffers, LocalBuffers
from fedlight.federation import ClientMemories

ROUNDS, STEPS = 4, 6  # three visits of two steps
LAST = STEPS - 1
pytestmark = [
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
    pytest.mark.filterwarnings("ignore:`.fit.ckpt_path=None.` was called"),
    pytest.mark.filterwarnings("ignore:.fit.ckpt_path=.last.. is set, but there is no last checkpoint"),
]


class Scheduled(Regression):
    """A rate for each step, a buffer and a frozen parameter that training changes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))
        self.teacher = nn.Parameter(torch.ones(1), requires_grad=False)

    def on_train_epoch_start(self):
        self.seen += 1
        with torch.no_grad():
            self.teacher *= 0.5

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * (1 + self.seen.item() + self.teacher.item())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class InPlace(FedAdam):
    """A server whose moment changes in place."""

    def direction(self, name, movement):
        self._moments["first"].setdefault(name, torch.zeros_like(movement)).add_(movement)
        return self._moments["first"][name]

    def step(self, state, movement):
        self._moments["second"]["before"] = torch.zeros(1)
        return super().step(state, movement)


class TwoParts(Regression):
    """A backbone that is frozen until it joins, and a rate that falls when the loss does not."""

    def __init__(self):
        super().__init__(dropout=0.3)
        self.net = nn.Sequential(OrderedDict(backbone=nn.Linear(4, 4), head=self.net))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.net.head.parameters(), lr=0.05)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
        return [optimizer], [{"scheduler": plateau, "monitor": "val/loss"}]


class SavesScore(Regression):
    """A project's checkpoint has what only a validation gives."""

    def on_save_checkpoint(self, checkpoint):
        checkpoint["score"] = self.trainer.callback_metrics["val/loss"].item()


MODELS = {"scheduled": Scheduled, "plateau": TwoParts, "scores": SavesScore}


def in_files(folder, limit_mib=0.0):
    return {"algorithm": Scaffold(), "memory": ClientMemories(str(folder / "clients"), limit_mib)}


CASES = {
    "fedavg": lambda folder: {},
    "scaffold": lambda folder: {"algorithm": Scaffold()},
    "on_disk": in_files,
    "to_disk": lambda folder: in_files(folder, 0.0009),  # the memories move there in round 2
    "fedadam": lambda folder: {"server": FedAdam(lr=0.1)},
    "in_place": lambda folder: {"server": InPlace(lr=0.1)},
    "top_k": lambda folder: {"channel": Wire(up=TopK(0.2))},
    "scheduled": lambda folder: {},
    "averaged_norm": lambda folder: {"parts": [AveragedBuffers()]},
    "local_norm": lambda folder: {"parts": [LocalBuffers()]},
    "fleet": lambda folder: {"fleet": make_fleet(folder / "devices", moody={"availability": 0.7})},
    "fedbiscuit": lambda folder: {"algorithm": FedBiscuit(warmup_rounds=1, regroup_every=1)},
}


def run(folder, case="fedavg", callbacks=(), ckpt_path=None, data=None, **settings):
    """Model, loop, trainer and the visit log of four rounds."""
    L.seed_everything(3, verbose=False)
    if case == "fedbiscuit":
        model, data = Adapters(3, "AdamW"), Tastes(batch_size=4)
        settings["limit_val_batches"] = 0
    else:
        optimizer = "SGD" if case in ("scaffold", "on_disk", "to_disk") else "AdamW"
        model = MODELS[case]() if case in MODELS else Regression(optimizer, norm="norm" in case)
        data = data or FederatedWrapper(Numbers(), ten_clients)
    more = CASES[case](folder) if case in CASES else {}
    loop = loop_with(**{"clients_per_round": 3, "local_steps": 2} | more)
    settings["enable_checkpointing"] = any(isinstance(one, Checkpoint) for one in callbacks)
    fit = trainer(ROUNDS, [VisitLog(), loop, *callbacks], default_root_dir=folder, **settings)
    try:
        fit.fit(model, data, ckpt_path=ckpt_path, weights_only=True)
    except (Plug, SystemExit):
        assert any(isinstance(one, Interrupts) for one in callbacks)
    return model, loop, fit


def what_counts(folder, model, loop, fit):
    """All that a run leaves but wall times."""
    visits = [{k: v for k, v in row.items() if k != "seconds"} for row in table(folder / "visits.csv")]
    memories = {client: loop.memory.load(client) for client in loop.clients}
    state = {k: v for k, v in loop.state_dict().items() if k != "memory"}
    rates = [group["lr"] for group in fit.optimizers[0].param_groups]
    metrics = {k: v.item() for k, v in fit.callback_metrics.items()}
    return plain([dict(model.state_dict()), state, memories, visits, rates, metrics, fit.global_step])


def plain(value):
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """What each case leaves, made once."""
    left = {}

    def of(case):
        if case not in left:
            folder = tmp_path_factory.mktemp(case)
            left[case] = what_counts(folder, *run(folder, case))
        return left[case]

    return of


class Plug(Exception):
    """The plug is pulled."""


class Interrupts(L.Callback):
    """Does something once, in a hook of a batch."""

    def __init__(self, do, round_idx, batch_idx=2, hook="on_train_batch_end"):
        self.do, self.at = do, (round_idx, batch_idx)
        setattr(self, hook, self.now)

    def now(self, trainer, pl_module, *args):
        batch_idx = args[-1] if args and isinstance(args[-1], int) else self.at[1]
        if (trainer.current_epoch, batch_idx) == self.at and not trainer.sanity_checking:
            self.do(trainer)


def pull(trainer):
    raise Plug


def interrupt(trainer):
    raise KeyboardInterrupt


def stop(trainer):
    trainer.should_stop = True


def run_out_of_time(trainer):
    """Has the next look at the clock of ``max_time`` find the time over."""
    next(one for one in trainer.callbacks if type(one).__name__ == "Timer")._duration = 0


def newest(folder):
    return max(folder.glob("*.ckpt"), key=lambda file: file.stat().st_mtime_ns)


def saved(folder, **settings):
    return ModelCheckpoint(folder / "saved", **settings)


on_error = partial(saved, save_on_exception=True, filename="{step}")
ENDS = {  # what happens, who saves, and settings of the trainer
    "max_time": (run_out_of_time, saved, {"max_time": "01:00:00:00"}),
    "should_stop": (stop, saved, {}),
    "should_stop, saved after validation": (stop, partial(saved, save_on_train_epoch_end=False), {}),
    "should_stop, last": (stop, partial(saved, save_top_k=0, save_last=True), {}),
    "save_on_exception": (pull, on_error, {}),
    "Ctrl-C": (interrupt, on_error, {}),
    "OnExceptionCheckpoint": (pull, lambda folder: OnExceptionCheckpoint(folder / "saved"), {}),
}


@pytest.mark.parametrize("round_idx", [0, 2])
@pytest.mark.parametrize("end", ENDS)
def test_a_run_that_ends_inside_a_round_goes_on_from_its_newest_checkpoint(
    end, round_idx, uninterrupted, tmp_path, monkeypatch
):
    monkeypatch.setattr("signal.signal", lambda *_: None)  # Lightning takes Ctrl-C away for good
    do, save, settings = ENDS[end]
    model, _, _ = run(tmp_path, callbacks=[Interrupts(do, round_idx), save(tmp_path)], **settings)
    checkpoint = torch.load(newest(tmp_path / "saved"), weights_only=True)
    assert checkpoint["callbacks"]["FederatedLoop"]["rounds_done"] == round_idx
    assert checkpoint["global_step"] == round_idx * STEPS
    assert_equal(weights(model), checkpoint["state_dict"])  # the model is left as the checkpoint has it
    again = run(tmp_path, ckpt_path=shutil.copy(newest(tmp_path / "saved"), tmp_path))
    assert what_counts(tmp_path, *again) == uninterrupted("fedavg")


HOOKS = [
    ("on_train_epoch_start", 0),
    ("on_train_batch_start", 0),
    ("on_train_batch_start", 3),
    ("on_before_optimizer_step", 2),
    ("on_train_batch_end", LAST),
    ("on_validation_start", LAST),
    ("on_validation_end", LAST),
    ("on_train_epoch_end", LAST),
    ("on_train_end", LAST),
]


def save_once(folder):
    def save(trainer):
        if not (folder / "own.ckpt").exists():
            trainer.save_checkpoint(folder / "own.ckpt")

    return save


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
@pytest.mark.parametrize("round_idx", [0, 2])
@pytest.mark.parametrize(("hook", "batch_idx"), HOOKS)
def test_a_user_may_save_in_any_hook(hook, batch_idx, round_idx, uninterrupted, tmp_path):
    if hook == "on_train_end":
        round_idx = ROUNDS
    run(tmp_path, callbacks=[Interrupts(save_once(tmp_path), round_idx, batch_idx, hook)])
    done = torch.load(tmp_path / "own.ckpt", weights_only=True)["callbacks"]["FederatedLoop"]["rounds_done"]
    assert done == round_idx + (hook in ("on_validation_end", "on_train_epoch_end"))
    found = what_counts(tmp_path, *run(tmp_path, ckpt_path=tmp_path / "own.ckpt"))
    expected = uninterrupted("fedavg")
    if hook == "on_train_end":  # nothing is left to do, so nothing is logged
        found[5], expected = {}, [*expected[:5], {}, *expected[6:]]
    assert found == expected


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("round_idx", [0, 2])
@pytest.mark.parametrize("case", CASES)
def test_every_kind_of_federation_does_the_round_again(case, round_idx, uninterrupted, tmp_path):
    expected = uninterrupted(case)
    run(tmp_path, case, [Interrupts(stop, round_idx, 3), saved(tmp_path)])
    again = run(tmp_path, case, ckpt_path=newest(tmp_path / "saved"))
    assert what_counts(tmp_path, *again) == expected
    if case == "on_disk":
        kept = {name for names in again[1].memory.state_dict(ROUNDS)["snapshots"].values() for name in names}
        assert kept
        assert all((tmp_path / "clients" / name).exists() for name in kept)


@pytest.mark.parametrize("round_idx", [0, 2])
def test_slurm_goes_on_by_itself_from_what_it_saved_inside_a_round(
    round_idx, uninterrupted, tmp_path, monkeypatch
):
    called = []
    monkeypatch.setattr("lightning.pytorch.trainer.connectors.signal_connector.call", called.append)
    for name, value in {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1", "SLURM_JOB_NAME": "train"}.items():
        monkeypatch.setenv(name, value)
    environment = SLURMEnvironment(auto_requeue=True)

    def requeue(trainer):
        os.kill(os.getpid(), environment.requeue_signal)
        raise Plug  # what the scheduler does next

    run(tmp_path, callbacks=[Interrupts(requeue, round_idx, 3)], plugins=[environment])
    assert called
    assert [file.name for file in tmp_path.glob("*.ckpt")] == ["hpc_ckpt_1.ckpt"]
    monkeypatch.setattr(SLURMEnvironment, "detect", staticmethod(lambda: True))
    again = run(tmp_path, plugins=[environment])  # without a word about a checkpoint
    assert again[2].ckpt_path.endswith("hpc_ckpt_1.ckpt")
    assert what_counts(tmp_path, *again) == uninterrupted("fedavg")


def test_weights_alone_are_the_global_models(tmp_path):
    states = {}
    watch = LambdaCallback(
        on_train_epoch_start=lambda t, model: states.update({t.global_step: weights(model)})
    )
    save = saved(tmp_path, save_top_k=-1, every_n_train_steps=1, filename="{step}", save_weights_only=True)
    model, _, _ = run(tmp_path, callbacks=[watch, save])
    states[ROUNDS * STEPS] = weights(model)
    files = {int(file.stem.partition("=")[2]): file for file in (tmp_path / "saved").glob("*.ckpt")}
    assert len(files) == ROUNDS * STEPS
    for step, file in files.items():
        checkpoint = torch.load(file, weights_only=True)
        assert "optimizer_states" not in checkpoint
        assert_equal(checkpoint["state_dict"], states[step // STEPS * STEPS])


def test_saving_inside_a_round_leaves_it_alone(uninterrupted, tmp_path):
    run_ = run(tmp_path, "on_disk", [saved(tmp_path, every_n_train_steps=1, save_top_k=-1)])
    assert what_counts(tmp_path, *run_) == uninterrupted("on_disk")


def test_the_datamodules_state_is_that_of_before_the_round(tmp_path):
    class Counting(FederatedWrapper):
        loaders = 0

        def train_dataloader(self):
            self.loaders += 1
            return super().train_dataloader()

        def state_dict(self):
            return {"loaders": self.loaders}

        def load_state_dict(self, state_dict):
            self.loaders = state_dict["loaders"]

    def loaders(callbacks=(), ckpt_path=None):
        data = Counting(Numbers(), ten_clients)
        run(tmp_path, "fedavg", callbacks, ckpt_path, data)
        return data.loaders

    whole = loaders()
    for round_idx in (0, 2):
        file = tmp_path / f"{round_idx}.ckpt"
        loaders([Interrupts(lambda trainer, file=file: trainer.save_checkpoint(file), round_idx)])
        assert loaders(ckpt_path=file) == whole


def test_a_server_that_changes_its_moments_in_place_is_saved_as_before_the_round(uninterrupted, tmp_path):
    run(tmp_path, "in_place", [Interrupts(save_once(tmp_path), 1, LAST)])
    again = run(tmp_path, "in_place", ckpt_path=tmp_path / "own.ckpt")
    assert what_counts(tmp_path, *again) == uninterrupted("in_place")


def test_the_same_trainer_may_go_on_after_an_error_and_does_the_round_again(uninterrupted, tmp_path):
    plug = Interrupts(pull, 2, 3)
    model, loop, fit = run(tmp_path, "scaffold", [plug])
    plug.at = None
    fit.fit(model, FederatedWrapper(Numbers(), ten_clients))
    assert what_counts(tmp_path, model, loop, fit)[:3] == uninterrupted("scaffold")[:3]


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_validation_epoch_start"])
def test_a_round_that_failed_when_its_model_was_there_is_not_done_again_on_top_of_it(hook, tmp_path):
    plug = Interrupts(pull, 2, LAST, hook)
    model, _, fit = run(tmp_path, "scaffold", [plug])
    after, plug.do = weights(model), lambda trainer: None
    model.train()  # Lightning leaves it as a validation needs it
    with pytest.raises(ValueError, match=r"counted 2 epochs, but 3 rounds are done\. .* make a new trainer"):
        fit.fit(model, FederatedWrapper(Numbers(), ten_clients))
    assert_equal(weights(model), after)


class Joins(BaseFinetuning):
    """Has the backbone join in the third round."""

    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.net.backbone)

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 2:
            self.unfreeze_and_add_param_group(pl_module.net.backbone, optimizer, lr=0.01)


@pytest.mark.parametrize("joins", [False, True])
@pytest.mark.parametrize("round_idx", [0, 2, 3])
def test_what_other_callbacks_count_and_plateaus_go_on_from_before_the_round(joins, round_idx, tmp_path):
    """A plateau scheduler steps behind the checkpoint of an epoch; the beginning of a round is behind both."""

    def left(callbacks=(), ckpt_path=None):
        stops = EarlyStopping("val/loss", patience=9)
        made = run(tmp_path, "plateau", [stops, *([Joins()] if joins else []), *callbacks], ckpt_path)
        return what_counts(tmp_path, *made), stops.wait_count, stops.best_score

    whole = left([Interrupts(save_once(tmp_path), round_idx, 3)])
    assert len(whole[0][4]) == 1 + joins
    assert left(ckpt_path=tmp_path / "own.ckpt") == whole


def test_a_resumed_run_that_fails_before_its_first_round_saves_what_it_goes_on_from(uninterrupted, tmp_path):
    """Lightning restores its counters behind ``on_fit_start``, where planning a round may take minutes."""
    file = tmp_path / "own.ckpt"
    run(tmp_path, "on_disk", [Interrupts(save_once(tmp_path), 2)])
    fails = Interrupts(pull, 0, hook="on_fit_start")
    run(tmp_path, "on_disk", [fails, OnExceptionCheckpoint(tmp_path / "saved")], ckpt_path=file)
    again = run(tmp_path, "on_disk", ckpt_path=newest(tmp_path / "saved"))
    assert what_counts(tmp_path, *again) == uninterrupted("on_disk")


def test_a_hook_that_saves_a_metric_of_validation_is_asked_again_when_the_round_is_over(tmp_path):
    saver = ModelCheckpoint(tmp_path)
    _, _, fit = run(tmp_path, "scores", [saver])
    score = torch.load(saver.best_model_path, weights_only=True)["score"]
    assert score == fit.callback_metrics["val/loss"].item()


def test_a_checkpoint_that_such_a_hook_has_not_given_is_refused_inside_the_round(tmp_path):
    with refusal(r"inside this round, .* \(KeyError: 'val/loss'\): let on_save_checkpoint"):
        run(tmp_path, "scores", [ModelCheckpoint(tmp_path, every_n_train_steps=1)])
