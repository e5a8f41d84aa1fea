"""Rows: every schedule of torch, by epoch and by step, and those of one's own."""

from functools import partial

import pytest
import torch
from matrix import Row, Works, kind
from probes import Watch
from project import Net, Project, Run, Validated, loader
from reference import local_training
from torch.optim import lr_scheduler, swa_utils

from fedlight.callbacks.loop.parts.optimizers import StepSchedules

by_epoch = kind("Schedules of the learning rate, by epoch")


def momentum_sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.8)


def chained(optimizer):
    return lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer, 0.5, 1), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    )


def sequential(optimizer):
    parts = [lr_scheduler.ConstantLR(optimizer, 0.1, 1), lr_scheduler.ExponentialLR(optimizer, 0.5)]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[1])


class Halves(lr_scheduler.LRScheduler):
    def get_lr(self):
        if self.last_epoch == 0:
            return [group["lr"] for group in self.optimizer.param_groups]
        return [group["lr"] / 2 for group in self.optimizer.param_groups]


SCHEDULES = {
    "LambdaLR": partial(lr_scheduler.LambdaLR, lr_lambda=lambda step: 1 / (1 + step)),
    "MultiplicativeLR": partial(lr_scheduler.MultiplicativeLR, lr_lambda=lambda step: 0.7),
    "StepLR": partial(lr_scheduler.StepLR, step_size=2, gamma=0.1),
    "MultiStepLR": partial(lr_scheduler.MultiStepLR, milestones=[1, 3], gamma=0.3),
    "ConstantLR": partial(lr_scheduler.ConstantLR, factor=0.3, total_iters=2),
    "LinearLR": partial(lr_scheduler.LinearLR, start_factor=0.2, total_iters=3),
    "ExponentialLR": partial(lr_scheduler.ExponentialLR, gamma=0.5),
    "SequentialLR": sequential,
    "CosineAnnealingLR": partial(lr_scheduler.CosineAnnealingLR, T_max=4),
    "ChainedScheduler": chained,
    "CyclicLR": partial(lr_scheduler.CyclicLR, base_lr=0.01, max_lr=0.2, step_size_up=2),
    "CosineAnnealingWarmRestarts": partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=2),
    "OneCycleLR": partial(lr_scheduler.OneCycleLR, max_lr=0.2, total_steps=20),
    "PolynomialLR": partial(lr_scheduler.PolynomialLR, total_iters=5, power=2.0),
    "LRScheduler": Halves,
    "SWALR": partial(swa_utils.SWALR, swa_lr=0.01, anneal_epochs=3),
}


def epochs(name):
    warns = ("A `OneCycleLR` scheduler is using 'interval': 'epoch'",)
    return Project(partial(Net, momentum_sgd, SCHEDULES[name]), rounds=3, warns=warns)


def a_plateau_is_of_rounds(folder):
    """patience counts rounds; what it watches is the global model's"""
    rates = Watch("on_train_epoch_start", lambda trainer, module: trainer.optimizers[0].param_groups[0]["lr"])
    plateau = partial(
        lr_scheduler.ReduceLROnPlateau, factor=0.1, patience=1, threshold=9.0, threshold_mode="abs"
    )
    made = Project(
        partial(Validated, scheduler=plateau, monitor="val/loss"),
        rounds=5,
        trainer={"num_sanity_val_steps": 0},
    )
    Run(made, folder, [rates]).fit(val_dataloaders=loader(shuffle=False))
    # the first is the best; two rounds are not better
    assert rates.seen == pytest.approx([0.1, 0.1, 0.1, 0.01, 0.01])


def steps(name, **loop):
    return Project(partial(Net, momentum_sgd, SCHEDULES[name], "step"), rounds=3, loop=loop)


def onwards(round_idx):
    """Three steps in each round before."""
    return 3 * round_idx


class Warming(Net):
    """The example of Lightning's documentation: a warm-up by trainer.global_step in optimizer_step."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.step(closure=optimizer_closure)
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * min(1.0, (self.trainer.global_step + 1) / 10)


class LambdaWarmup(Net):
    """As transformers' schedules: by all steps that there will be."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        self.asked = number = int(self.trainer.estimated_stepping_batches)
        falls = lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / number))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": falls, "interval": "step"}}


def all_steps_are_those_of_a_client(folder):
    """rounds times the steps of the longest visit, which is as far as a schedule gets"""
    rates = Watch("on_train_batch_start", lambda trainer, module: trainer.optimizers[0].param_groups[0]["lr"])
    run = Run(Project(LambdaWarmup), folder, [rates]).fit()
    assert run.module.asked == 2 * 3  # rounds x steps of a visit
    of_visits = [[6, 5, 4], [6, 5, 4], [3, 2, 1], [3, 2, 1]]
    assert rates.seen == pytest.approx([0.1 * left / 6 for visit in of_visits for left in visit])


by_step = kind("Schedules of the learning rate, by step")

ROWS: list[Row] = [
    by_epoch("ReduceLROnPlateau", Works(a_plateau_is_of_rounds)),
    *(
        by_epoch.equals(
            "an LRScheduler of one's own" if name == "LRScheduler" else name, epochs(name), covers=name
        )
        for name in SCHEDULES
    ),
    *(
        by_step.equals(
            "an LRScheduler of one's own" if name == "LRScheduler" else name,
            steps(name),
            partial(local_training, before=onwards, within=True),
            covers=name,
        )
        for name in SCHEDULES
    ),
    by_epoch.equals(
        "frequency=2",
        Project(partial(Net, scheduler=SCHEDULES["ExponentialLR"], frequency=2), rounds=4),
        partial(local_training, before=lambda round_idx: round_idx // 2),
    ),
    by_step.equals(
        'parts=[StepSchedules("restart")]',
        steps("OneCycleLR", parts=[StepSchedules("restart")]),
        partial(local_training, before=lambda round_idx: 0, within=True),
        means="each visit goes through the first steps of the schedule",
    ),
    by_step(
        "trainer.estimated_stepping_batches in configure_optimizers", Works(all_steps_are_those_of_a_client)
    ),
    by_step.refused(
        "a warm-up by trainer.global_step in optimizer_step",
        Project(Warming),
        "something sets it by trainer.global_step or batch_idx",
        "Take a schedule with interval 'step'",
        in_training=True,
    ),
    by_step.refused(
        'ReduceLROnPlateau, interval="step"',
        Project(partial(Net, scheduler=lr_scheduler.ReduceLROnPlateau, interval="step", monitor="loss")),
        "ReduceLROnPlateau with interval 'step' would compare one client's values with another's",
        "set interval 'epoch'",
    ),
]
