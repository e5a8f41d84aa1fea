"""Rows: every argument of ``Trainer``."""

import re
from functools import partial

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelSummary
from matrix import Equals, Refused, Row, Works, row
from probes import Lines, Watch, same
from project import Net, Project, Run, Validated, given, loader
from reference import clipped_by_norm, local_training
from torch import nn


def argument(subject, proof, means=""):
    """A row that covers the argument with which its subject begins."""
    return row("Arguments of Trainer", subject, proof, means, "Trainer." + re.match(r"\w+", subject)[0])


def refused(remedy, **setting):
    """The row of one argument."""
    ((name, value),) = setting.items()
    return argument(f"{name}={value}", Refused(given(**setting), f"trainer.{name}={value}", remedy))


def clipped_by_value(parameters):
    nn.utils.clip_grad_value_(parameters, 0.02)


def validated(folder, more=(), rounds=2, **trainer):
    """A run with a validation loader."""
    run = Run(Project(Validated, rounds=rounds, trainer=trainer), folder, more)
    return run.fit(val_dataloaders=loader(shuffle=False))


def epochs_are_rounds(folder):
    """counts rounds of communication"""
    run = Run(Project(rounds=3), folder).fit()
    assert run.loop.rounds_done == len(run.rounds) == 3
    assert run.trainer.current_epoch == 3


def min_epochs_hold_up_early_stopping(folder):
    """so many rounds are trained whatever early stopping says"""
    stop = Watch("on_train_epoch_end", lambda trainer, module: setattr(trainer, "should_stop", True))
    run = Run(Project(rounds=5, trainer={"min_epochs": 3}), folder, [stop]).fit()
    assert run.loop.rounds_done == 3


def validation_is_limited(folder):
    """limits the validation of each round"""
    batches = Watch("on_validation_batch_end", lambda *_: 1)
    validated(folder, [batches], limit_val_batches=2, num_sanity_val_steps=0)
    assert len(batches.seen) == 2 * 2  # two batches in each of two rounds


def test_is_limited(folder):
    """limits the test of the global model"""
    run = validated(folder, limit_test_batches=2)
    batches = Watch("on_test_batch_end")
    run.trainer.callbacks.append(batches)
    run.trainer.test(run.module, loader(shuffle=False), verbose=False)
    assert len(batches.seen) == 2
    assert same(batches.seen[0], run.weights())


def prediction_is_limited(folder):
    """limits what the global model predicts"""
    run = validated(folder, limit_predict_batches=3)
    assert len(run.trainer.predict(run.module, loader(shuffle=False))) == 3


def validation_every_second_round(folder):
    """validates every n-th round"""
    rounds = Watch("on_validation_start", lambda trainer, module: trainer.current_epoch)
    validated(folder, [rounds], rounds=4, check_val_every_n_epoch=2, num_sanity_val_steps=0)
    assert rounds.seen == [1, 3]


def sanity_check_sees_the_start(folder):
    """checks the model as it is before the first round; later validations see the new global model"""
    seen = Watch("on_validation_start")
    run = validated(folder, [seen], num_sanity_val_steps=2)
    assert len(seen.seen) == 3
    assert same(seen.seen[0], {name: p.detach() for name, p in run.project.make_module().named_parameters()})
    assert same(seen.seen[2], run.weights())


def steps_are_those_of_all_clients(folder):
    """steps are counted through all clients' visits; what the loop logs as fed/... comes once for each round"""
    lines = Lines()

    class Logged(Net):
        def training_step(self, batch, batch_idx):
            loss = self.loss(batch)
            self.log("loss", loss)
            return loss

    run = Run(Project(Logged, trainer={"logger": lines, "log_every_n_steps": 4}), folder).fit()
    assert run.trainer.global_step == 2 * 2 * 3
    assert [step for step, _ in lines.of("loss")] == [3, 7, 11]
    assert [step for step, _ in lines.of("fed/loss")] == [5, 11]


def checkpoint_is_the_round(folder):
    """Lightning's own checkpoint of a finished round, with the global model"""
    run = Run(Project(trainer={"enable_checkpointing": True}), folder).fit()
    (found,) = folder.rglob("*.ckpt")
    saved = torch.load(found, weights_only=True)
    assert saved["epoch"] == 1
    assert same(saved["state_dict"], run.weights())


def bar_counts_the_batches_of_the_round(folder):
    """the bar of an epoch counts the batches of all visits of a round; RoundProgress tells the clients apart"""
    run = Run(Project(trainer={"enable_progress_bar": True}), folder).fit()
    bar = run.trainer.progress_bar_callback
    assert bar.total_train_batches == bar.train_progress_bar.total == 2 * 3


def summary_is_the_module(folder):
    """shows the module, which every client has"""
    run = Run(Project(trainer={"enable_model_summary": True}), folder).fit()
    (summary,) = [one for one in run.trainer.callbacks if isinstance(one, ModelSummary)]
    assert summary._summary(run.trainer, run.module).total_parameters == 3 * 4 + 4 + 4 + 1


def inference_mode_is_of_tests(folder):
    """the global model is tested in inference mode or not, as set; inside fit Lightning validates without it"""
    for on in (True, False):
        run = validated(folder, inference_mode=on)
        modes = Watch("on_test_batch_start", lambda *_: torch.is_inference_mode_enabled())
        run.trainer.callbacks.append(modes)
        run.trainer.test(run.module, loader(shuffle=False), verbose=False)
        assert set(modes.seen) == {on}


def barebones_trains_the_same(folder):
    """trains the same and logs nothing, also of the loop's fed/...; a VisitLog still has its rows"""
    left_to_it = dict.fromkeys(("enable_progress_bar", "enable_model_summary", "log_every_n_steps"))
    run = Run(given(barebones=True, **left_to_it), folder).fit()
    assert same(run.weights(), Run(Project(), folder).fit().weights())
    assert run.trainer.logged_metrics == {}
    assert len(run.loop.visit_records) == 2


def loaders_are_made_anew_for_each_round(folder):
    """each round has its own training batches, and loaders for validation are made anew"""
    made = []

    class Data(L.LightningDataModule):
        def train_dataloader(self):
            return loader()

        def val_dataloader(self):
            made.append(len(made))
            return loader(shuffle=False)

    run = Run(Project(Validated, Data, rounds=3, trainer={"num_sanity_val_steps": 0}), folder).fit()
    assert run.trainer.reload_dataloaders_every_n_epochs == 0
    assert len(made) >= 3


def memories_lie_under_the_root(folder):
    """what clients remember between rounds lies there in clients/, where it is too large for RAM"""
    run = Run(given(default_root_dir=folder / "mine"), folder).fit()
    assert run.loop.memory.folder == folder / "mine" / "clients"


def hyperparameters_reach_the_logger(folder):
    """the module's hyperparameters reach the logger or not, as set; the federation's are in the run's config"""

    class Saved(Net):
        def __init__(self, width=4):
            super().__init__()
            self.save_hyperparameters()

    for on, expected in ((True, {"width": 4}), (False, None)):
        lines = Lines()
        Run(Project(Saved, trainer={"logger": lines, "enable_autolog_hparams": on}), folder).fit()
        assert (dict(lines.hparams) if lines.hparams else None) == expected


def registry_name_is_kept(folder):
    """names the model for uploads by Lightning's own cloud; training is the same"""
    run = Run(given(model_registry="mine"), folder).fit()
    assert run.trainer._model_registry == "mine"
    assert same(run.weights(), Run(Project(), folder).fit().weights())


def time_ends_with_a_whole_round(folder):
    """A time that is up at once: no round is left half done."""
    run = Run(given(max_time={"seconds": 0}), folder).fit()
    assert run.loop.rounds_done == 0
    assert same(run.weights(), dict(run.project.make_module().named_parameters()))


def checkpoint(folder, **loop):
    """Of a first round."""
    run = Run(Project(rounds=1, loop=loop), folder).fit()
    run.trainer.save_checkpoint(folder / "first.ckpt")
    return folder / "first.ckpt"


def goes_on(folder):
    """bit for bit the run that was never interrupted"""
    run = Run(Project(rounds=3), folder)
    run.fit(ckpt_path=checkpoint(folder), weights_only=True)
    assert run.loop.rounds_done == 3
    assert len(run.rounds) == 2
    assert same(run.weights(), Run(Project(rounds=3), folder).fit().weights())


def with_the_checkpoint_of_another(run):
    run.fit(ckpt_path=checkpoint(run.folder / "before", local_steps=2), weights_only=True)


ROWS: list[Row] = [
    argument("fit(ckpt_path=...)", Works(goes_on)),
    argument(
        "fit(ckpt_path=...) of another federation",
        Refused(
            Project(),
            "federated.local_steps",
            "start anew, without the checkpoint",
            call=with_the_checkpoint_of_another,
            moved=tuple(dict(Net().named_parameters())),  # Lightning has read them
        ),
    ),
    argument(
        "max_time",
        Works(time_ends_with_a_whole_round),
        "a round under way when time is up does not count; the model is that of the last whole round",
    ),
    argument('accelerator="cpu"', Equals(given(accelerator="cpu"))),
    argument('strategy="auto"', Equals(given(strategy="auto"))),
    *(
        argument(
            f"{name}=2",
            Refused(
                given(strategy=strategy, **{name: 2}),
                f"trainer.devices={devices} and trainer.num_nodes={num_nodes} make 2 processes",
                "set --trainer.devices 1 --trainer.num_nodes 1",
                call=Run.ask,
            ),
        )
        for name, strategy, devices, num_nodes in (("devices", "ddp_spawn", 2, 1), ("num_nodes", "ddp", 1, 2))
    ),
    argument('precision="32-true"', Equals(given(precision="32-true"))),
    argument("logger", Equals(given(logger=Lines()))),
    argument(
        "callbacks",
        Equals(Project(callbacks=lambda folder: [Watch("on_train_batch_end")])),
        "those that only look; what each of Lightning's own does stands below",
    ),
    argument("max_epochs=3", Works(epochs_are_rounds)),
    argument(
        "max_epochs=-1", Refused(Project(rounds=-1), "trainer.max_epochs=-1", "give the number of rounds")
    ),
    refused("set max_epochs=1 and local_steps=1", fast_dev_run=True),
    refused("leave it at 0, and set local_steps", overfit_batches=2),
    argument("min_epochs", Works(min_epochs_hold_up_early_stopping)),
    refused("give max_epochs, which counts rounds", max_steps=5),
    refused("give min_epochs, which counts rounds", min_steps=5),
    refused("set local_steps", limit_train_batches=0.5),
    refused("set local_steps", limit_train_batches=1),
    argument("limit_val_batches", Works(validation_is_limited)),
    argument("limit_test_batches", Works(test_is_limited)),
    argument("limit_predict_batches", Works(prediction_is_limited)),
    refused("use check_val_every_n_epoch", val_check_interval=0.5),
    argument("check_val_every_n_epoch=2", Works(validation_every_second_round)),
    argument("num_sanity_val_steps", Works(sanity_check_sees_the_start)),
    argument("log_every_n_steps=4", Works(steps_are_those_of_all_clients)),
    argument("enable_checkpointing=True", Works(checkpoint_is_the_round)),
    argument("enable_progress_bar=True", Works(bar_counts_the_batches_of_the_round)),
    argument("enable_model_summary=True", Works(summary_is_the_module)),
    argument(
        "accumulate_grad_batches=2",
        Equals(given(accumulate_grad_batches=2), partial(local_training, accumulate=2)),
        "local_steps counts optimizer steps: a visit is local_steps x accumulate_grad_batches batches",
    ),
    argument(
        "gradient_clip_val=0.05",
        Equals(given(gradient_clip_val=0.05), partial(local_training, clip=clipped_by_norm)),
    ),
    argument(
        'gradient_clip_algorithm="value"',
        Equals(
            given(gradient_clip_val=0.02, gradient_clip_algorithm="value"),
            partial(local_training, clip=clipped_by_value),
        ),
    ),
    argument("deterministic=True", Equals(given(deterministic=True))),
    argument("benchmark=True", Equals(given(benchmark=True))),
    argument("inference_mode=False", Works(inference_mode_is_of_tests)),
    argument(
        "use_distributed_sampler",
        Equals(given(use_distributed_sampler=False)),
        "one process: nothing to distribute",
    ),
    argument('profiler="simple"', Equals(given(profiler="simple"))),
    argument(
        "detect_anomaly=True",
        Equals(
            Project(
                trainer={"detect_anomaly": True},
                warns=("Anomaly Detection has been enabled", "You have turned on"),
            )
        ),
    ),
    argument("barebones=True", Works(barebones_trains_the_same)),
    argument("plugins", Equals(given(plugins=[])), "those of Lightning stand below"),
    argument(
        "sync_batchnorm=True", Equals(given(sync_batchnorm=True)), "one process: nothing to synchronize"
    ),
    argument("reload_dataloaders_every_n_epochs=0", Works(loaders_are_made_anew_for_each_round)),
    refused("leave it at 0", reload_dataloaders_every_n_epochs=2),
    argument("default_root_dir", Works(memories_lie_under_the_root)),
    argument("enable_autolog_hparams", Works(hyperparameters_reach_the_logger)),
    argument("model_registry", Works(registry_name_is_kept)),
]
