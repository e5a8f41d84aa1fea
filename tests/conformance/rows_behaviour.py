"""Rows: what a module may do: state beside its parameters, steps of its own, attributes, stops."""

from functools import partial

import pytest
import torch
from matrix import Equals, Refused, Row, Works, kind
from probes import Lines, same
from project import SIZES, Net, Project, Run, changed, examples, loader, rows_of_clients, weights
from reference import clipped_by_norm, federated_averaging, local_training, stepped
from torch import nn

from fedlight.callbacks.loop.parts import AveragedBuffers, LocalBuffers

module = kind("Modules")


def normed(net):
    net.insert(1, nn.BatchNorm1d(4))


Running = changed(normed)
Spectral = changed(lambda net: nn.utils.spectral_norm(net[0]))


class FrozenNorm(Net):
    def on_train_epoch_start(self):
        self.net[1].eval()


class Instance(Net):
    def __init__(self):
        super().__init__()
        self.norm = nn.InstanceNorm1d(1, track_running_stats=True, affine=True)

    def loss(self, batch):
        return super().loss((self.norm(batch[0][:, None])[:, 0], batch[1]))


class Queue(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("queue", torch.zeros(4, 3))

    def loss(self, batch):
        loss = super().loss(batch) + 0.1 * self.net(self.queue).square().mean()
        self.queue = torch.cat([batch[0], self.queue])[:4].detach()
        return loss


class Teacher(Net):
    def __init__(self):
        super().__init__()
        self.teacher = nn.Linear(3, 1)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        with torch.no_grad():
            self.teacher.weight.mul_(0.9).add_(self.net[0].weight[:1], alpha=0.1)

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=0.1)


class Manual(Net):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
        optimizer.step()
        return loss


class ManualAccumulation(Manual):
    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        self.manual_backward(self.loss(batch) / 3)
        if (batch_idx + 1) % 3 == 0:
            optimizer.step()
            optimizer.zero_grad()


class TwoOptimizers(Manual):
    def configure_optimizers(self):
        first = torch.optim.Adam(self.net[0].parameters(), lr=0.05)
        second = torch.optim.SGD(self.net[2].parameters(), lr=0.1, momentum=0.5)
        return [first, second], [torch.optim.lr_scheduler.ExponentialLR(second, 0.5)]

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            loss = self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)
        self.lr_schedulers().step()


def manually(model, batches, round_idx, size=1):
    """One optimizer, written out."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for start in range(0, len(batches), size):
        optimizer.zero_grad()
        for batch in batches[start : start + size]:
            (model.loss(batch.content) / size).backward()
        if size == 1:
            clipped_by_norm(model.parameters())
        optimizer.step()


def two_in_turn(model, batches, round_idx):
    """Two optimizers, written out; the schedule steps after each batch, three times in each round before."""
    first = torch.optim.Adam(model.net[0].parameters(), lr=0.05, fused=True)
    second = torch.optim.SGD(model.net[2].parameters(), lr=0.1, momentum=0.5)
    for number, batch in enumerate(batches):
        second.param_groups[0]["lr"] = 0.1 * 0.5 ** (3 * round_idx + number)
        for optimizer, layer in ((first, model.net[0]), (second, model.net[2])):
            gradients = torch.autograd.grad(model.loss(batch.content), list(layer.parameters()))
            for p, gradient in zip(layer.parameters(), gradients, strict=True):
                p.grad = gradient
            optimizer.step()


class Carries(Net):
    hidden = None

    def on_visit_start(self, client_id):
        self.hidden = None

    def loss(self, batch):
        now = self.net(batch[0]).mean()
        extra = 0.0 if self.hidden is None else (now - self.hidden) ** 2
        self.hidden = now.detach()
        return super().loss(batch) + extra


class CarriesOn(Carries):
    def on_visit_start(self, client_id):
        pass


def what_is_not_reset_goes_on(folder):
    """The written-out loop whose one attribute is handed on from visit to visit, through the round."""
    run = Run(Project(CarriesOn), folder).fit()
    last = [None]

    def handing_on(model, batches, round_idx):
        model.hidden = last[0]
        local_training(model, batches, round_idx)
        last[0] = model.hidden

    expected = federated_averaging(run.project.make_module(), run.rounds, handing_on, SIZES)
    assert same(run.weights(), weights(expected))


class Breaks(Net):
    def loss(self, batch):
        x = batch[0]
        bad = examples().tensors[0][rows_of_clients()["dan"]]
        of_dan = (x[:, None] == bad[None]).all(-1).any()
        return super().loss(batch) * (float("nan") if of_dan else 1.0)


def who_diverges_is_left_out(folder):
    """Dan is in the first round; the model is then the other client's movement alone, as if one had been asked."""
    project = Project(Breaks, rounds=1, loop={"clients_per_round": 4}, warns=("round 1: .*diverged",))
    run = Run(project, folder).fit()
    (visits,) = run.rounds
    others = [(client, batches) for client, batches in visits if client != "dan"]
    assert len(others) == 3
    expected = federated_averaging(run.project.make_module(), [others], local_training, SIZES)
    assert same(run.weights(), weights(expected))
    reasons = {record["client"]: record.get("reason") for record in run.loop.visit_records}
    assert [client for client, reason in reasons.items() if reason == "diverged"] == ["dan"]


class Skips(Net):
    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch_idx == 4 else None


class Iterates(Net):
    """Takes batches from the loader itself."""

    def training_step(self, dataloader_iter):
        batch, _, _ = next(dataloader_iter)
        return self.loss(batch)


class OwnBackward(Net):
    def backward(self, loss):
        (2 * loss).backward()

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        optimizer.zero_grad(set_to_none=False)

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.step(closure=optimizer_closure)


def doubled(model, batches, round_idx):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stepped(optimizer, (2 * model.loss(batch.content) for batch in batches))


class Stops(Net):
    def training_step(self, batch, batch_idx):
        if self.trainer.global_step == 8:
            self.trainer.should_stop = True
        return super().training_step(batch, batch_idx)


def who_stops_inside_a_round_has_the_last(folder):
    """the round under way does not count: the model is that of the last whole round"""
    one = Run(Project(Net, rounds=1), folder).fit().weights()
    run = Run(Project(Stops, rounds=3), folder).fit()
    assert run.loop.rounds_done == 1
    assert same(run.weights(), one)


def a_compiled_lightning_module(folder):
    """trains the same, bit for bit"""
    run, plain = Run(Project(), folder), Run(Project(), folder).fit()
    run.fit(model=torch.compile(run.module, backend="eager"))
    assert same(run.weights(), plain.weights())


def norm_in_eval(model, batches, round_idx):
    model.net[1].eval()
    local_training(model, batches, round_idx)


def full():
    """No batch of one example, on which a batch norm cannot train."""
    return loader(drop_last=True)


def held(made, policy, **settings):
    part = {"average": AveragedBuffers, "local": LocalBuffers}[policy]
    return Equals(Project(made, full, loop={"parts": [part()]}), buffers=policy, **settings)


def refused_buffer(made, name):
    return Refused(Project(made, full), f"training changes {name}", "Add AveragedBuffers", in_training=True)


def plain_network():
    return nn.Linear(3, 1)


def a_step_may_be_left_out(folder):
    """the step is left out: neither its loss nor a step is counted"""

    class Skips(Net):
        def training_step(self, batch, batch_idx):
            return None if batch_idx % 3 == 1 else self.loss(batch)

    warns = ("`training_step` returned `None`",)
    run = Run(Project(Skips, warns=warns), folder).fit()
    assert [record["steps"] for record in run.loop.visit_records] == [2, 2]
    assert all(record["loss"] > 0 for record in run.loop.visit_records)


class LeavesGradients(Manual):
    """The second layer steps by the gradients of the batch before, which it finds when a batch begins."""

    def configure_optimizers(self):
        return [torch.optim.SGD(self.net[number].parameters(), lr=0.1) for number in (0, 2)]

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        second.step()
        second.zero_grad()
        self.manual_backward(self.loss(batch))
        first.step()
        first.zero_grad()


def one_batch_late(model, batches, round_idx):
    """The same; a visit begins without gradients."""
    first, second = model.configure_optimizers()
    for batch in batches:
        second.step()
        second.zero_grad()
        model.loss(batch.content).backward()
        first.step()
        first.zero_grad()


class Averages(Net):
    def __init__(self):
        super().__init__()
        self.average = torch.optim.swa_utils.AveragedModel(self.net)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.average.update_parameters(self.net)

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=0.1)


class Logs(Net):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=1)
        return loss


def means_are_of_the_round(folder):
    """by step each client's, by epoch the mean over the batches of all clients of a round"""
    lines = Lines()
    run = Run(Project(Logs, trainer={"logger": lines}), folder).fit()
    steps = [value for _, value in lines.of("loss_step")]
    assert len(steps) == 12
    assert [value for _, value in lines.of("loss_epoch")] == pytest.approx(
        [sum(steps[:6]) / 6, sum(steps[6:]) / 6]
    )
    assert [value for _, value in lines.of("fed/loss")][1] == pytest.approx(sum(steps[6:]) / 6)
    assert [row["loss"] for row in run.loop.visit_records] == pytest.approx(
        [sum(steps[6:9]) / 3, sum(steps[9:]) / 3]
    )


def clamped(model):
    with torch.no_grad():
        for p in model.parameters():
            p.clamp_(-0.3, 0.3)


class ClampsBehind(Net):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        clamped(self)


class ClampsInStep(Net):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        clamped(self)


def clamping(model, batches, round_idx):
    for batch in batches:
        stepped(torch.optim.SGD(model.parameters(), lr=0.1), [model.loss(batch.content)])
        clamped(model)


ROWS: list[Row] = [
    module.equals("weights changed in optimizer_step, such as clamped", Project(ClampsInStep), clamping),
    module.equals(
        "weights changed in on_train_batch_end, such as clamped",
        Project(ClampsBehind),
        clamping,
        means="a callback of one's own that does so has to stand in front of FederatedLoop, or is refused",
    ),
    module("self.log in the training step", Works(means_are_of_the_round)),
    module("a training_step that gives None", Works(a_step_may_be_left_out)),
    module("batch norm", refused_buffer(Running, "net.1.running_mean")),
    module(
        "batch norm, `AveragedBuffers`",
        held(Running, "average"),
        "running statistics are the mean over a round's clients",
    ),
    module(
        "batch norm, `LocalBuffers`",
        held(Running, "local"),
        "FedBN: statistics, weights and biases of the norm stay with each client",
    ),
    module.equals("batch norm in eval()", Project(changed(normed, FrozenNorm)), norm_in_eval),
    module("InstanceNorm1d(track_running_stats=True)", refused_buffer(Instance, "norm.running_mean")),
    module(
        "InstanceNorm1d(track_running_stats=True), LocalBuffers", held(Instance, "local"), "as for batch norm"
    ),
    module("spectral_norm", refused_buffer(Spectral, "net.0.weight_u")),
    module("spectral_norm, `LocalBuffers`", held(Spectral, "local"), "its vectors stay with each client"),
    module("a queue in a buffer", refused_buffer(Queue, "queue")),
    module(
        "a queue in a buffer, `LocalBuffers`", held(Queue, "local"), "a client goes on with its own queue"
    ),
    module.refused(
        "a teacher that follows its student, outside of the optimizer",
        Project(Teacher),
        "training changes teacher.weight",
        "Give them to the optimizer as well",
        in_training=True,
        moved=("teacher.weight",),
    ),
    module.equals("manual optimization", Project(Manual), manually),
    module.equals(
        "manual optimization that accumulates, local_steps a multiple of it",
        Project(ManualAccumulation),
        partial(manually, size=3),
        means="local_steps counts batches here",
    ),
    module.refused(
        "manual optimization that accumulates across a visit's end",
        Project(ManualAccumulation, loop={"local_steps": 4}),
        "gradients that no optimizer step has used",
        "set local_steps to a multiple",
        in_training=True,
    ),
    module.equals(
        "several optimizers and a schedule, manual optimization", Project(TwoOptimizers), two_in_turn
    ),
    module.equals(
        "attributes carried from batch to batch, reset in on_visit_start",
        Project(Carries),
        means="reset in on_visit_start",
    ),
    module(
        "attributes carried from batch to batch, not reset",
        Works(what_is_not_reset_goes_on),
        "cannot be seen: what one client leaves in an attribute the next one finds",
    ),
    module.equals(
        "backward, optimizer_step and optimizer_zero_grad of one's own", Project(OwnBackward), doubled
    ),
    module("torch.compile(module), given to fit", Works(a_compiled_lightning_module)),
    module.refused(
        "a plain nn.Module", Project(plain_network), "`model` must be a `LightningModule`", "LightningModule"
    ),
    module(
        "a loss that becomes NaN at one client",
        Works(who_diverges_is_left_out),
        "who ends in NaN or Inf is left out of the round, as if it had not been asked",
    ),
    module("trainer.should_stop, set inside a round", Works(who_stops_inside_a_round_has_the_last)),
    module.refused(
        "on_train_batch_start that gives -1",
        Project(Skips),
        "round 1 was cut short: its epoch ended before the last of its 6 batches",
        "Have it give nothing, and set local_steps",
        in_training=True,
    ),
    module.refused(
        "training_step(dataloader_iter)",
        Project(Iterates, warns=("You are using the `dataloader_iter` step flavor",)),
        "training_step(dataloader_iter) takes batches from the loader itself",
        "take the batch, training_step(batch, batch_idx)",
    ),
    module.equals(
        "manual optimization that leaves gradients to the next batch",
        Project(LeavesGradients),
        one_batch_late,
        means="a visit begins without gradients, whatever the one before has left",
    ),
    module.refused(
        "swa_utils.AveragedModel inside of the module",
        Project(Averages),
        "training changes average.",
        "Add AveragedBuffers",
        means="keep it in a callback that averages the global models",
        in_training=True,
        moved=tuple(f"average.module.{name}" for name in ("0.weight", "0.bias", "2.weight", "2.bias")),
    ),
]
