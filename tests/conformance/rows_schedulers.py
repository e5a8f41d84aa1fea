"""Rows: every schedule of torch, by epoch and by step, and those of one's own."""

from functools import partial

import pytest
import torch
from matrix import Equals, Row, Works, kind
from probes import Watch
from project import Net, Project, Run, Validated, loader
from torch.optim import lr_scheduler, swa_utils

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
    """Half of the rate before."""

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


class Plateau(Validated):
    """Lowers the rate when validation does not get better."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        lowers = lr_scheduler.ReduceLROnPlateau(
            optimizer, factor=0.1, patience=1, threshold=9.0, threshold_mode="abs"
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": lowers, "monitor": "val/loss"}}


def a_plateau_is_of_rounds(folder):
    rates = Watch("on_train_epoch_start", lambda trainer, module: trainer.optimizers[0].param_groups[0]["lr"])
    Run(Project(Plateau, rounds=5, trainer={"num_sanity_val_steps": 0}), folder, [rates]).fit(
        val_dataloaders=loader(shuffle=False)
    )
    assert rates.seen == pytest.approx(
        [0.1, 0.1, 0.1, 0.01, 0.01]
    )  # the first is the best; two rounds are not better


ROWS: list[Row] = [
    by_epoch(
        "ReduceLROnPlateau",
        Works(a_plateau_is_of_rounds),
        "patience counts rounds; what it watches is the global model's",
    ),
    *(
        by_epoch(
            name,
            Equals(epochs(name)),
            subject="an LRScheduler of one's own" if name == "LRScheduler" else name,
        )
        for name in SCHEDULES
    ),
]
