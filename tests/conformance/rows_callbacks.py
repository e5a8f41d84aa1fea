"""Rows: every callback that Lightning ships, and one's own."""

from functools import partial

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.spike import TrainingSpikeException
from lightning.pytorch import callbacks
from lightning.pytorch.tuner import Tuner
from matrix import Row, Works, kind
from probes import Lines, Watch, same
from project import Net, Project, Run, Validated, loader, weights
from reference import local_training, stepped
from torch import nn

callback = kind("Callbacks")


def with_callbacks(*made, module=Net, **settings):
    """The project with these callbacks, each a function of a folder."""
    return Project(module, callbacks=lambda folder: [one(folder) for one in made], **settings)


class OwnData(L.LightningDataModule):
    batch_size = 2

    def train_dataloader(self):
        return loader(batch_size=self.batch_size)


class Tunable(Net):
    lr = 0.1


def early_stopping_waits_rounds(folder):
    """patience=3 waits three rounds; what is monitored is the new global model's"""
    stop = callbacks.EarlyStopping("val/loss", patience=3, min_delta=100.0)
    run = Run(Project(Validated, rounds=10, trainer={"num_sanity_val_steps": 0}), folder, [stop])
    run.fit(val_dataloaders=loader(shuffle=False))
    assert run.loop.rounds_done == 1 + 3  # the first is the best
    assert stop.stopped_epoch == 3


def early_stopping_hears_of_the_federation(folder):
    """fed/loss and the like can be monitored"""
    stop = callbacks.EarlyStopping("fed/loss", patience=1, min_delta=100.0)
    assert Run(Project(rounds=10), folder, [stop]).fit().loop.rounds_done == 2


def checkpoints_hold_the_global_model(folder):
    """a checkpoint is a finished round with the global model"""
    seen = Watch("on_train_epoch_end")
    save = callbacks.ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
    Run(Project(rounds=3, trainer={"enable_checkpointing": True}), folder, [seen, save]).fit()
    for number in range(3):
        saved = torch.load(folder / f"epoch={number}.ckpt", weights_only=True)
        assert same(saved["state_dict"], seen.seen[number])
        (of_loop,) = [state for name, state in saved["callbacks"].items() if name.startswith("FederatedLoop")]
        assert of_loop["rounds_done"] == number + 1


def the_best_round_is_kept(folder):
    """keeps the best round"""
    save = callbacks.ModelCheckpoint(folder, "best", monitor="val/loss", mode="max")
    losses = Watch("on_train_epoch_end", lambda trainer, module: float(trainer.callback_metrics["val/loss"]))
    run = Run(
        Project(Validated, rounds=3, trainer={"enable_checkpointing": True, "num_sanity_val_steps": 0}),
        folder,
        [losses, save],
    ).fit(val_dataloaders=loader(shuffle=False))
    saved = torch.load(save.best_model_path, weights_only=True)
    assert saved["epoch"] == losses.seen.index(max(losses.seen)) == 0
    assert not same(saved["state_dict"], run.weights())


def rates_logged(folder, interval, **settings):
    lines = Lines()
    halves = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5)
    project = Project(
        partial(Net, scheduler=halves, interval=interval), trainer={"logger": lines}, **settings
    )
    Run(project, folder, [callbacks.LearningRateMonitor(interval)]).fit()
    return [rate for _, rate in lines.of("lr-SGD")]


def rates_are_logged_for_each_round(folder):
    """by epoch it logs the round's rate"""
    assert rates_logged(folder, "epoch", rounds=3) == [0.1, 0.05, 0.025]


def rates_are_logged_for_each_step(folder):
    """by step it logs what each client's step has; all clients of a round have the same"""
    of_visits = [[0.1, 0.05, 0.025]] * 2 + [[0.0125, 0.00625, 0.003125]] * 2
    assert rates_logged(folder, "step") == pytest.approx(sum(of_visits, []))


def predictions_are_the_global_models(folder):
    """what is written are predictions of the global model"""

    class Kept(callbacks.BasePredictionWriter):
        def write_on_epoch_end(self, trainer, pl_module, predictions, batch_indices):
            self.kept = torch.cat(predictions)

    writer = Kept("epoch")
    run = Run(Project(Validated), folder, [writer]).fit(val_dataloaders=loader(shuffle=False))
    data = loader(shuffle=False)
    run.trainer.predict(run.module, data, return_predictions=False)
    assert writer.kept.equal(run.module.net(data.dataset.tensors[0]).detach()) or torch.allclose(
        writer.kept, run.module.net(data.dataset.tensors[0]).detach(), atol=1e-7
    )


def device_is_watched_in_every_step(folder):
    """watches this machine in every client's steps; an emulated device's figures are in the VisitLog"""
    lines = Lines()
    Run(Project(trainer={"logger": lines}), folder, [callbacks.DeviceStatsMonitor()]).fit()
    assert len(lines.of("DeviceStatsMonitor.on_train_batch_end/cpu_percent")) == 2 * 2 * 3


def lambdas_see_the_rounds(folder):
    """an epoch's end is a round's end, with the global model"""
    seen = []
    watch = callbacks.LambdaCallback(on_train_epoch_end=lambda trainer, module: seen.append(weights(module)))
    run = Run(Project(), folder, [watch]).fit()
    assert len(seen) == 2
    assert same(seen[1], run.weights())


def a_summary_counts_the_module(folder, kind):
    summary = kind()
    run = Run(Project(), folder, [summary]).fit()
    assert summary._summary(run.trainer, run.module).total_parameters == 21


def a_bar_counts_batches(folder, kind):
    bar = kind()
    Run(Project(trainer={"enable_progress_bar": True}), folder, [bar]).fit()
    assert bar.total_train_batches == 6


def a_bar_of_ones_own(folder):
    """counts the batches of all visits of a round"""

    class Counting(callbacks.ProgressBar):
        batches = 0

        def on_train_batch_end(self, *_):
            self.batches += 1

        def disable(self):
            pass

        def enable(self):
            pass

    bar = Counting()
    Run(Project(trainer={"enable_progress_bar": True}), folder, [bar]).fit()
    assert (bar.batches, bar.total_train_batches) == (12, 6)


def spikes_end_the_run(folder):
    """Dan's targets are far away: when his visit begins, the loss jumps."""

    class Far(Net):
        batches = 0

        def training_step(self, batch, batch_idx):
            self.batches += 1
            return self.loss(batch) * (1000.0 if self.batches == 4 else 1.0)

    spikes = callbacks.SpikeDetection(warmup=2, exclude_batches_path=folder / "skip.json")
    run = Run(Project(Far), folder, [spikes])
    with pytest.raises(TrainingSpikeException, match="batch 3"):
        run.fit()
    assert same(run.weights(), weights(run.project.make_module()))  # the model from before the round


def throughput_is_of_the_whole_round(folder):
    """counts this machine's work for all clients"""

    class Counted(Net):
        flops_per_batch = 10

    lines = Lines()
    monitor = callbacks.ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0]), window_size=2)
    Run(Project(Counted, trainer={"logger": lines}), folder, [monitor]).fit()
    samples = [count for _, count in lines.of("train/samples")]
    assert samples == [2 * number for number in range(1, 13)]


def a_timer_by_epoch_ends_after_a_round(folder):
    """ends the run after a round"""
    run = Run(Project(rounds=5), folder, [callbacks.Timer({"microseconds": 1}, interval="epoch")]).fit()
    assert run.loop.rounds_done == 1
    assert len(run.rounds) == 1


def pruned_are_the_global_models_weights(folder):
    """prunes the global model when a round is over"""
    prune = callbacks.ModelPruning(
        "l1_unstructured", amount=0.5, use_lottery_ticket_hypothesis=False, make_pruning_permanent=True
    )
    run = Run(Project(rounds=3), folder, [prune]).fit()
    zeros = [int((p == 0).sum()) for p in run.module.parameters() if p.ndim == 2]
    assert sum(zeros) > 8


class Pretrained(Net):
    def __init__(self):
        super().__init__()
        self.backbone, self.head = nn.Linear(3, 4), nn.Linear(4, 1)
        del self.net

    def loss(self, batch):
        x, y = batch
        return nn.functional.mse_loss(self.head(self.backbone(x).tanh()), y)

    def configure_optimizers(self):
        return torch.optim.Adam(self.head.parameters(), lr=0.05)


def thawed(model, batches, round_idx, rate):
    """The head alone in the first round; then the backbone as well, at the rate of the round."""
    optimizer = torch.optim.Adam(model.head.parameters(), lr=0.05, fused=True)
    model.backbone.requires_grad_(round_idx >= 1)
    if round_idx >= 1:
        optimizer.add_param_group({"params": list(model.backbone.parameters()), "lr": rate(round_idx)})
    stepped(optimizer, (model.loss(batch.content) for batch in batches))


class Thaw(callbacks.BaseFinetuning):
    """A finetuning callback of one's own: the backbone joins in the second round."""

    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.backbone)

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.backbone, optimizer, lr=0.02)


class ThawInside(L.Callback):
    """Adds to the optimizer in the middle of a round."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 1:
            trainer.optimizers[0].add_param_group({"params": list(pl_module.backbone.parameters())})


def checkpoints_inside_a_round_are_of_its_start(folder):
    """inside a round it holds the state from before it; a resumed run does the round again, bit for bit"""
    at_start = Watch("on_train_epoch_start")
    save = callbacks.ModelCheckpoint(folder, filename="{step}", every_n_train_steps=4, save_top_k=-1)
    Run(Project(trainer={"enable_checkpointing": True}), folder, [at_start, save]).fit()
    saved = torch.load(folder / "step=8.ckpt", weights_only=True)
    assert same(saved["state_dict"], at_start.seen[1])
    save = callbacks.ModelCheckpoint(folder, filename="{step}", every_n_train_steps=4, save_top_k=-1)
    resumed = Project(trainer={"enable_checkpointing": True}, warns=("Checkpoint directory .* is not empty",))
    again = Run(resumed, folder, [save])
    again.fit(ckpt_path=folder / "step=8.ckpt", weights_only=True)
    assert same(again.weights(), Run(Project(), folder).fit().weights())


def an_exception_leaves_the_state_before_the_round(folder):
    """holds the state from before the round that broke"""

    class Breaks(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if trainer.global_step == 8:
                raise RuntimeError("broken")

    at_start = Watch("on_train_epoch_start")
    # Lightning goes on from the last one where it finds one, and says so.
    warns = (
        r"`.fit\(ckpt_path=None\)` was called without",
        r".fit\(ckpt_path=\"last\"\) is set, but there is no last",
    )
    project = Project(trainer={"enable_checkpointing": True}, warns=warns)
    with pytest.raises(RuntimeError, match="broken"):
        Run(project, folder, [at_start, callbacks.OnExceptionCheckpoint(folder), Breaks()]).fit()
    saved = torch.load(folder / "on_exception.ckpt", weights_only=True)
    assert same(saved["state_dict"], at_start.seen[1])


def a_checkpoint_callback_of_ones_own(folder):
    """a finished round with the global model"""

    class Own(callbacks.Checkpoint):
        def on_train_epoch_end(self, trainer, pl_module):
            trainer.save_checkpoint(folder / f"{trainer.current_epoch}.ckpt")

    run = Run(Project(trainer={"enable_checkpointing": True}), folder, [Own()]).fit()
    assert same(torch.load(folder / "1.ckpt", weights_only=True)["state_dict"], run.weights())


def time_runs_out_inside_a_round(folder):
    """After the seventh of twelve batches: the second round does not count."""
    timer = callbacks.Timer(duration=None)
    end = Watch(
        "on_train_batch_end",
        lambda trainer, module: setattr(timer, "_duration", 0.0) if trainer.global_step == 7 else None,
    )
    at_start = Watch("on_train_epoch_start")
    run = Run(Project(), folder, [timer, end, at_start]).fit()
    assert run.loop.rounds_done == 1
    assert same(run.weights(), at_start.seen[1])


def accumulated(model, batches, round_idx):
    """One batch for a step in the first round, two from the second."""
    local_training(model, batches, round_idx, accumulate=1 + (round_idx > 0))


def tuned(find):
    """What is asked of Lightning's Tuner."""

    def call(run):
        getattr(Tuner(run.make_trainer()), find)(run.module, datamodule=run.project.data())

    return call


ROWS: list[Row] = [
    callback('LearningRateMonitor("step"), a schedule by step', Works(rates_are_logged_for_each_step)),
    *(
        callback.refused(
            f"Tuner(trainer).{find}",
            with_callbacks(module=Tunable, data=OwnData),
            f"{finder} tries values on training batches",
            "use it in a run without the federation",
            call=tuned(find),
            covers="",
        )
        for find, finder in (("lr_find", "LearningRateFinder"), ("scale_batch_size", "BatchSizeFinder"))
    ),
    callback.equals(
        "BackboneFinetuning",
        with_callbacks(
            lambda folder: callbacks.BackboneFinetuning(1, lambda epoch: 2.0, backbone_initial_ratio_lr=0.1),
            module=Pretrained,
            rounds=3,
        ),
        partial(thawed, rate=lambda round_idx: {1: 0.005, 2: 0.01}[round_idx]),
        means="epochs are rounds: the backbone is federated from its round on",
    ),
    callback.equals(
        "a BaseFinetuning of one's own",
        with_callbacks(lambda folder: Thaw(), module=Pretrained),
        partial(thawed, rate=lambda round_idx: 0.02),
        means="what joins the optimizer is federated from that round on",
        covers="BaseFinetuning",
    ),
    callback.refused(
        "a callback that adds to the optimizer inside a round",
        with_callbacks(lambda folder: ThawInside(), module=Pretrained),
        "2 parameters joined or left the optimizer during the visit",
        "change what is trained in on_train_epoch_start",
        in_training=True,
        moved=("backbone.weight", "backbone.bias"),
    ),
    callback("ModelCheckpoint(every_n_train_steps=4)", Works(checkpoints_inside_a_round_are_of_its_start)),
    callback("OnExceptionCheckpoint", Works(an_exception_leaves_the_state_before_the_round)),
    callback("a Checkpoint of one's own", Works(a_checkpoint_callback_of_ones_own), covers="Checkpoint"),
    callback(
        "Timer(interval='step')",
        Works(time_runs_out_inside_a_round),
        "the round under way does not count: the run ends with the model of the last one",
    ),
    callback.equals(
        "GradientAccumulationScheduler",
        with_callbacks(lambda folder: callbacks.GradientAccumulationScheduler({0: 1, 1: 2}), rounds=3),
        accumulated,
        means="keys are rounds; local_steps counts optimizer steps",
    ),
    callback.equals(
        "a Callback that only looks", Project(callbacks=lambda folder: [L.Callback()]), covers="Callback"
    ),
    callback("EarlyStopping", Works(early_stopping_waits_rounds)),
    callback('EarlyStopping("fed/loss")', Works(early_stopping_hears_of_the_federation)),
    callback("ModelCheckpoint", Works(checkpoints_hold_the_global_model)),
    callback("ModelCheckpoint(monitor=...)", Works(the_best_round_is_kept)),
    callback("LearningRateMonitor", Works(rates_are_logged_for_each_round)),
    callback("BasePredictionWriter", Works(predictions_are_the_global_models)),
    callback("DeviceStatsMonitor", Works(device_is_watched_in_every_step)),
    callback("LambdaCallback", Works(lambdas_see_the_rounds)),
    *(
        callback(
            kind.__name__,
            Works(partial(a_summary_counts_the_module, kind=kind)),
            "shows the module, which every client has",
        )
        for kind in (callbacks.ModelSummary, callbacks.RichModelSummary)
    ),
    callback("a ProgressBar of one's own", Works(a_bar_of_ones_own), covers="ProgressBar"),
    *(
        callback(
            kind.__name__,
            Works(partial(a_bar_counts_batches, kind=kind)),
            "counts the batches of all visits of a round",
        )
        for kind in (callbacks.TQDMProgressBar, callbacks.RichProgressBar)
    ),
    callback(
        "SpikeDetection",
        Works(spikes_end_the_run),
        "compares a batch with those before it, of other clients too; a spike ends the run with the last round's model",
    ),
    callback("ThroughputMonitor", Works(throughput_is_of_the_whole_round)),
    callback('Timer(interval="epoch")', Works(a_timer_by_epoch_ends_after_a_round), covers="Timer"),
    *(
        callback.refused(
            kind.__name__,
            with_callbacks(lambda folder, kind=kind, given=given: kind(*given)),
            f"{kind.__name__} averages weights across clients",
            "take it out",
        )
        for kind, *given in (
            (callbacks.StochasticWeightAveraging, 0.1),
            (callbacks.WeightAveraging,),
            (callbacks.EMAWeightAveraging,),
        )
    ),
    *(
        callback.refused(
            kind.__name__,
            with_callbacks(lambda folder, kind=kind: kind(), module=Tunable, data=OwnData),
            f"{kind.__name__} tries values on training batches",
            "use it in a run without the federation",
        )
        for kind in (callbacks.LearningRateFinder, callbacks.BatchSizeFinder)
    ),
    callback("ModelPruning", Works(pruned_are_the_global_models_weights)),
]
