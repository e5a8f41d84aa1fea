"""Rows: every optimizer of torch, one of one's own, and how many there are of them."""

from functools import partial

import torch
from matrix import Equals, Row, Works, kind
from probes import Watch
from project import Net, Project, Run
from torch import nn

optimizer = kind("Optimizers")


class Words(Net):
    """Rows of a table are looked up by the sign of the first feature; their gradients are sparse."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.net = nn.Embedding(2, 1, sparse=True)

    def loss(self, batch):
        x, y = batch
        return nn.functional.mse_loss(self.net((x[:, 0] > 0).long()), y)


class Matrices(Net):
    def __init__(self, **settings):
        super().__init__(**settings)
        self.net = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Tanh(), nn.Linear(4, 1, bias=False))


class SignDescent(torch.optim.Optimizer):
    """Steps by the sign of a running mean of the gradients."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        with torch.enable_grad():
            loss = closure() if closure else None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                mean.mul_(0.5).add_(p.grad)
                p.sub_(group["lr"] * mean.sign())
        return loss


class Elsewhere(torch.optim.SGD):
    """Keeps its momentum and the number of its steps in attributes of its own."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr)
        self.velocity, self.number = {}, 0

    @torch.no_grad()
    def step(self, closure=None):
        with torch.enable_grad():
            loss = closure() if closure else None
        self.number += 1
        for p in self.param_groups[0]["params"]:
            self.velocity[p] = 0.9 * self.velocity.get(p, 0.0) + p.grad
            p.sub_(self.param_groups[0]["lr"] / self.number * self.velocity[p])
        return loss


class CountsInGroup(torch.optim.SGD):
    """Keeps a count in its group, as schedule-free optimizers do."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr)
        self.param_groups[0]["count"] = 0

    def step(self, closure=None):
        self.param_groups[0]["count"] += 1
        return super().step(closure)


def groups_go_on_as_schedules_do(folder):
    """as schedules by step: every visit starts at the round's value, the next round where the furthest visit came to"""
    counts = Watch(
        "on_train_batch_start", lambda trainer, module: trainer.optimizers[0].param_groups[0]["count"]
    )
    Run(Project(partial(Net, CountsInGroup)), folder, [counts]).fit()
    assert counts.seen == [0, 1, 2, 0, 1, 2, 3, 4, 5, 3, 4, 5]


class TwoGroups(Net):
    def configure_optimizers(self):
        slow = {"params": self.net[2].parameters(), "lr": 0.01, "weight_decay": 0.1}
        return torch.optim.AdamW([{"params": self.net[0].parameters()}, slow], lr=0.05)


def made(name, module=Net, tolerance=0.0, **settings):
    making = partial(getattr(torch.optim, name), **settings)
    return Equals(Project(partial(module, optimizer=making)), tolerance=tolerance)


ROWS: list[Row] = [
    optimizer("Adafactor", made("Adafactor", lr=0.05)),
    optimizer("Adadelta", made("Adadelta", lr=1.0)),
    optimizer("Adagrad", made("Adagrad", lr=0.05)),
    optimizer("Adam", made("Adam", lr=0.05)),
    optimizer("Adamax", made("Adamax", lr=0.05)),
    optimizer("AdamW", made("AdamW", lr=0.05)),
    optimizer("ASGD", made("ASGD", lr=0.05, t0=1)),
    optimizer("LBFGS", made("LBFGS", lr=0.5, max_iter=4), "a step evaluates several times and counts as one"),
    optimizer("Muon", made("Muon", Matrices, lr=0.05)),
    optimizer("NAdam", made("NAdam", lr=0.05)),
    optimizer("RAdam", made("RAdam", lr=0.05)),
    optimizer("RMSprop", made("RMSprop", lr=0.05, momentum=0.5)),
    optimizer("Rprop", made("Rprop", lr=0.05)),
    optimizer("SGD", made("SGD", lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)),
    optimizer("SparseAdam", made("SparseAdam", Words, lr=0.05)),
    optimizer.equals(
        "an Optimizer of one's own that keeps its state in Optimizer.state",
        Project(partial(Net, optimizer=SignDescent)),
        covers="Optimizer",
    ),
    optimizer.equals(
        "an Optimizer of one's own that keeps its state in an attribute",
        Project(partial(Net, Elsewhere)),
        means="what was empty or a number when the run began is so again; tensors in attributes that change are refused",
        covers="",
    ),
    optimizer(
        "an Optimizer of one's own that counts in its groups", Works(groups_go_on_as_schedules_do), covers=""
    ),
    optimizer.equals("parameter groups with settings of their own", Project(TwoGroups)),
    optimizer.equals(
        "fused=True", Project(partial(Net, optimizer=partial(torch.optim.Adam, lr=0.05, fused=True)))
    ),
    optimizer.equals(
        "lr as a tensor",
        Project(partial(Net, optimizer=partial(torch.optim.Adam, lr=torch.tensor(0.05), foreach=False))),
    ),
]
