import time
from contextlib import nullcontext
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.plugins import MixedPrecision
from plain_lightning import Regression, assert_equal, federate, module, seeded, trainer, weights
from refusals import refusal
from tiny_world import table
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from written_out import LR, assert_close, combined, doubled, gradients, recorded, scaffold

from fedlight import FedAvg, FedProx, RoundProgress, Scaffold, VisitLog
from fedlight.callbacks.loop import federated_loop
from fedlight.callbacks.loop.parts.optimizers import scaler_of
from fedlight.callbacks.loop.visits.visit import ParametersLeft, step_losses


class Manual(Regression):
    """Two optimizers, one for each layer; the second has another rate and steps twice where the first steps once."""

    returns = False

    def __init__(self):
        super().__init__(dropout=0.0)
        self.automatic_optimization = False

    def loss(self, batch):
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def training_step(self, batch, batch_idx):
        for optimizer in (*self.optimizers(), self.optimizers()[1]):
            self.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            optimizer.step()
        return loss if self.returns else None

    def configure_optimizers(self):
        parts = (self.net[0], self.net[3])
        return [torch.optim.SGD(part.parameters(), lr=LR / (1 + i)) for i, part in enumerate(parts)]


class ManualWithLoss(Manual):
    returns = True


class ManualInOneTensor(ManualWithLoss):
    """With the loss in one tensor of one number, which each step overwrites."""

    def __init__(self):
        super().__init__()
        self.kept = torch.zeros(1)

    def training_step(self, batch, batch_idx):
        return self.kept.copy_(super().training_step(batch, batch_idx).detach())


@pytest.mark.parametrize("accumulation", [1, 3])
def test_the_loss_is_that_of_the_batches_whatever_a_step_accumulates(accumulation):
    """``fed/loss``, the visit's loss and the progress bar's, which Lightning has divided by the accumulation."""
    given = []

    class Keeps(Regression):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            given.append(loss.item())
            return loss

    progress, settings = (
        RoundProgress(),
        {"accumulate_grad_batches": accumulation, "enable_progress_bar": True},
    )
    model, loop = federate(1, model=seeded(Keeps), callbacks=[progress], settings=settings)
    mean = pytest.approx(sum(given) / len(given), rel=1e-6)
    assert len(given) == 3 * 2 * accumulation
    assert model.trainer.callback_metrics["fed/loss"].item() == mean
    assert sum(row["loss"] for row in loop.visit_records) / 3 == mean
    assert progress._metrics._ends["loss"][0][0] == mean


def test_losses_in_16_bits_are_added_up_in_32_and_an_output_of_the_project_is_none_of_them():
    given = []

    class Half(Regression):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx).bfloat16()
            given.append(loss.item())
            return {"loss": loss, "client_losses": torch.ones(3)}

    _, loop = federate(1, model=seeded(Half), clients_per_round=1, local_steps=7)
    assert loop.visit_records[0]["loss"] == pytest.approx(sum(given) / 7, rel=1e-6)


def manual_visits(kind, folder):
    """The trainer of a round, and the rows of its visits."""
    settings = {"default_root_dir": folder}
    model, _ = federate(1, model=seeded(kind), callbacks=[VisitLog()], settings=settings)
    return model.trainer, table(folder / "visits.csv")


def test_without_a_loss_nothing_is_said_of_it(tmp_path):
    fit, rows = manual_visits(Manual, tmp_path)
    assert [row["loss"] for row in rows] == ["", "", ""]
    assert "fed/loss" not in fit.callback_metrics
    assert fit.callback_metrics["fed/clients"].item() == 3


def test_a_loss_that_is_overwritten_counts_in_each_step(tmp_path):
    kinds = (ManualWithLoss, ManualInOneTensor)
    one, other = ([row["loss"] for row in manual_visits(kind, tmp_path / kind.__name__)[1]] for kind in kinds)
    assert one == other


def test_manual_optimization_counts_the_steps_of_all_optimizers(tmp_path):
    fit, rows = manual_visits(ManualWithLoss, tmp_path)
    assert [row["steps"] for row in rows] == ["6", "6", "6"]  # two batches of three steps
    assert fit.global_step == 18
    assert fit.callback_metrics["fed/loss"].item() == pytest.approx(sum(float(r["loss"]) for r in rows) / 3)


def test_algorithms_are_told_the_sum_of_each_parameters_rates():
    told = []

    class Told(FedAvg):
        def finish_visit(self, visiting, movement, work):
            told.append((work.num_steps, work.lr, dict(work.lr_sums)))
            return super().finish_visit(visiting, movement, work)

    federate(rounds=1, algorithm=Told(), model=seeded(Manual))
    sums = {f"net.{layer}.{kind}": 2 * LR for layer in (0, 3) for kind in ("weight", "bias")}
    assert (
        told == [(6, LR, pytest.approx(sums))] * 3
    )  # the second layer steps twice as often, at half the rate


def two_optimizers(state, batches, change):
    """A visit of ``Manual`` in fp64; ``change`` gives the gradient that is used."""
    now = dict(state)
    for batch in batches:
        for layer, lr in (("net.0", LR), ("net.3", LR / 2), ("net.3", LR / 2)):
            found = gradients(now, batch)
            now |= {n: w - lr * change(n, found[n], w) for n, w in now.items() if n.startswith(layer)}
    return now


def test_fedprox_under_several_optimizers_equals_a_loop_written_out():
    """Each optimizer's step adds the term to its own parameters once."""
    start, found, rounds = recorded(rounds=2, model=seeded(Manual), algorithm=FedProx(mu=0.8))
    state = start
    for of_clients in rounds:
        held = state
        trained = {
            client: two_optimizers(state, own, lambda n, g, w, held=held: g + 0.8 * (w - held[n]))
            for client, own in of_clients.items()
        }
        state = {name: state[name] + value for name, value in combined(state, trained).items()}
    assert_close(found, state)


def test_scaffold_under_several_optimizers_and_rates_equals_a_loop_written_out():
    """Batches of a visit: 3; the first layer steps 3 times at LR, the second 6 times at LR / 2."""
    start, found, rounds = recorded(rounds=5, clients_per_round=6, model=seeded(Manual), algorithm=Scaffold())
    assert_close(found, scaffold(start, rounds, lambda _, *given: two_optimizers(*given), lambda *_: 3 * LR))


class Groups(Regression):
    """One optimizer whose two groups have rates of their own."""

    def configure_optimizers(self):
        first, second = self.net[0].parameters(), self.net[3].parameters()
        return torch.optim.SGD([{"params": first}, {"params": second, "lr": LR / 4}], lr=LR)


def test_scaffold_with_a_rate_for_each_group_equals_a_loop_written_out():
    model, rate = seeded(Groups, "", 0, 0.0), {"net.0": LR, "net.3": LR / 4}
    start, found, rounds = recorded(rounds=4, clients_per_round=8, model=model, algorithm=Scaffold())

    def visit(_, now, batches, change):
        for batch in batches:
            grads = gradients(now, batch)
            now = {n: w - rate[n[:5]] * change(n, grads[n], w) for n, w in now.items()}
        return now

    assert_close(found, scaffold(start, rounds, visit, lambda _, name: 3 * rate[name[:5]]))


class Lbfgs(Regression):
    """Up to five evaluations of the closure in a step, without a line search."""

    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=4, history_size=2)


def test_fedprox_changes_the_gradients_of_every_evaluation_of_lbfgs():
    """Against torch's own LBFGS on the loss with the term written into it."""
    mu = 0.8
    start, found, rounds = recorded(rounds=1, model=seeded(Lbfgs, "", 0, 0.0), algorithm=FedProx(mu))
    trained = {}
    for client, own in rounds[0].items():
        local = Regression(dropout=0.0).double()
        local.load_state_dict(start)
        optimizer = torch.optim.LBFGS(local.parameters(), lr=0.1, max_iter=4, history_size=2)
        for x, y in own:

            def closure(x=x, y=y, local=local, optimizer=optimizer):
                optimizer.zero_grad()
                distance = sum(((p - start[n]) ** 2).sum() for n, p in local.named_parameters())
                loss = nn.functional.mse_loss(local.net(x), y) + mu / 2 * distance
                loss.backward()
                return loss

            optimizer.step(closure)
        trained[client] = doubled(weights(local))
    expected = {name: start[name] + value for name, value in combined(start, trained).items()}
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-3, atol=1e-4)


def test_a_step_past_lightning_is_refused_where_the_algorithm_changes_gradients():
    class Past(Manual):
        def training_step(self, batch, batch_idx):
            self.zero_grad()
            self.manual_backward(self.loss(batch))
            for optimizer in self.optimizers(use_pl_optimizer=False):
                optimizer.step()

    with refusal(r"SGD past Lightning, so FedProx could not .* without use_pl_optimizer"):
        federate(model=seeded(Past), algorithm=FedProx(0.1))
    _, loop = federate(rounds=1, model=seeded(Past))
    assert [row["steps"] for row in loop.visit_records] == [4, 4, 4]


@pytest.mark.parametrize("breaks_off", [False, True])
def test_optimizers_are_left_as_they_were_also_when_a_visit_breaks_off(breaks_off):
    class Breaks(Regression):
        def training_step(self, batch, batch_idx):
            if batch_idx == 3 and breaks_off:
                raise RuntimeError("broken off")
            return super().training_step(batch, batch_idx)

    model = Breaks()
    with pytest.raises(RuntimeError, match="broken off") if breaks_off else nullcontext():
        federate(1, model=model)
    assert not model.trainer.optimizers[0]._optimizer_step_post_hooks


class OnTop(torch.optim.SGD):
    """Calls the step of its class, whose hooks torch has installed as well."""

    def step(self, closure=None):
        return super().step(closure)


class WithoutRate(torch.optim.SGD):
    """As Adafactor with a rate of its own: its group has none."""

    def __init__(self, params):
        super().__init__(params, lr=LR)
        self.param_groups[0]["lr"] = None

    def step(self, closure=None):
        self.param_groups[0]["lr"] = LR
        loss = super().step(closure)
        self.param_groups[0]["lr"] = None
        return loss


class Around(torch.optim.Optimizer):
    """Wraps another and never makes itself one, as some versions of Lookahead do."""

    def __init__(self, params):
        self.inner = torch.optim.SGD(params, lr=LR)
        self.param_groups, self.state, self.defaults = self.inner.param_groups, self.inner.state, {}

    def step(self, closure=None):
        return self.inner.step(closure)

    def state_dict(self):
        return self.inner.state_dict()


def with_optimizer(make):
    class Model(Regression):
        def configure_optimizers(self):
            return make(self.parameters())

    return seeded(Model, "", 0, 0.0)


def test_a_step_that_calls_the_step_of_its_class_is_one_step():
    torch.optim.SGD([nn.Parameter(torch.zeros(1))])  # installs torch's hooks at the class
    plain, _ = federate(2, model=module(optimizer="SGD", lr=LR, dropout=0.0), algorithm=Scaffold())
    on_top = with_optimizer(lambda params: OnTop(params, lr=LR))
    model, loop = federate(2, model=on_top, algorithm=Scaffold())
    assert [row["steps"] for row in loop.visit_records] == [2, 2, 2]
    assert_equal(weights(plain), weights(model))


def test_an_optimizer_without_a_rate_trains_and_scaffold_refuses_it():
    plain, _ = federate(rounds=2, model=module(optimizer="SGD", lr=LR, dropout=0.0))
    model, _ = federate(rounds=2, model=with_optimizer(WithoutRate))
    assert_equal(weights(plain), weights(model))
    with refusal("learning rates, and WithoutRate has none"):
        federate(model=with_optimizer(WithoutRate), algorithm=Scaffold())


def test_an_optimizer_whose_steps_cannot_be_counted_is_refused():
    with refusal(r"Around does not call torch.optim.Optimizer.__init__"):
        federate(model=with_optimizer(Around))


class Partly(Regression):
    """Steps by hand, the second layer alone."""

    def __init__(self):
        super().__init__(dropout=0.0)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.manual_backward(super().training_step(batch, batch_idx))
        self.optimizers().step()
        self.optimizers().zero_grad()

    def configure_optimizers(self):
        return torch.optim.SGD(self.net[3].parameters(), lr=LR)


def test_a_visit_takes_until_the_device_has_done_its_work(monkeypatch):
    """A call returns before a GPU has computed its result."""
    monkeypatch.setattr(federated_loop, "wait_for", lambda device: time.sleep(0.05))
    _, loop = federate(rounds=1)
    assert [row["seconds"] >= 0.05 for row in loop.visit_records] == [True] * 3


def test_a_visits_end_reads_no_parameter_alone():
    """On a GPU each read waits for all that was computed before it."""

    class Reads(TorchDispatchMode):
        counted = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.counted += func is torch.ops.aten._local_scalar_dense.default
            return func(*args, **kwargs or {})

    left, parameters = ParametersLeft(), {str(n): nn.Parameter(torch.full((2,), float(n))) for n in range(9)}
    with Reads() as reads:
        left.note(parameters, "c")
        left.refuse_changed()
        left.note(parameters, "c")
        parameters["4"].data += 1
        with pytest.raises(
            ValueError, match=r"^4 was changed by a callback when the visit to client c was over"
        ):
            left.refuse_changed()
    assert reads.counted == 0


def test_losses_are_on_the_modules_device():
    """A plain 0, of a batch that is left out, may be on the CPU beside losses of a GPU."""
    model = Regression().to("meta")
    fit = SimpleNamespace(lightning_module=model, accumulate_grad_batches=1)
    assert step_losses(fit, {"loss": torch.zeros(())}).device == model.device


def test_gradients_of_parameters_outside_the_optimizer_are_cleared_as_well():
    left = []

    class Watch(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            left.append(pl_module.net[0].weight.grad)

    recorded(rounds=1, local_steps=1, model=Partly(), after=[Watch()])
    assert left == [None] * 3


def test_a_round_without_visits_under_scheduled_accumulation():
    class NobodyFirst(FedAvg):
        def plan(self, round_idx, cohort, num_batches):
            return super().plan(round_idx, cohort, num_batches)[: round_idx * 3]

    scheduler = GradientAccumulationScheduler({0: 3, 1: 2})
    _, loop = federate(rounds=2, algorithm=NobodyFirst(), callbacks=[scheduler])
    assert [row["steps"] for row in loop.visit_records] == [2, 2, 2]


def test_accumulation_that_a_callback_changes_unannounced_is_refused():
    class Changes(L.Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            trainer.accumulate_grad_batches = 1 + trainer.current_epoch

    with refusal(r"is 2, but .* planned with 1: .* GradientAccumulationScheduler"):
        federate(callbacks=[Changes()])


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")  # said once in a process
@pytest.mark.parametrize("algorithm", [FedProx(mu=0.1), Scaffold()])
def test_a_step_without_a_loss_is_left_out_whatever_the_algorithm_adds_to_gradients(algorithm):
    class EverySecond(Regression):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) if batch_idx % 2 else None

    _, loop = federate(model=seeded(EverySecond), local_steps=4, algorithm=algorithm)
    assert [row["steps"] for row in loop.visit_records] == [2, 2, 2]


class Embedding(Regression):
    """Looks up a vector by the sign of a feature, with sparse gradients or dense ones."""

    def __init__(self, sparse):
        super().__init__(optimizer="SGD", dropout=0.0)
        self.vectors = nn.Embedding(2, 4, sparse=sparse)

    def training_step(self, batch, batch_idx):
        shifted = batch[0] + self.vectors((batch[0][:, 0] > 0).long())
        return nn.functional.mse_loss(self.net(shifted), batch[1])


@pytest.mark.parametrize("algorithm", [FedProx, Scaffold])
def test_an_algorithm_changes_sparse_gradients_like_dense_ones(algorithm):
    sparse, dense = (federate(model=seeded(Embedding, s), algorithm=algorithm())[0] for s in (True, False))
    torch.testing.assert_close(weights(sparse), weights(dense))


def run(algorithm=None, scale=2.0**18, rounds=3, fused=None):
    """A scale of 2**18 overflows in the first steps; one of 2**4 never does."""

    class Model(Regression):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.05, fused=fused)

    half = MixedPrecision("16-mixed", device="cpu", scaler=torch.amp.GradScaler("cpu", init_scale=scale))
    loop = {"algorithm": algorithm, "clients_per_round": 4, "local_steps": 3}
    return federate(rounds, model=seeded(Model, dropout=0.0), settings={"plugins": [half]}, **loop)


@pytest.mark.parametrize("fused", [None, True])  # a fused kernel leaves a step out by itself
def test_steps_that_were_left_out_are_not_counted(fused):
    _, first = run(rounds=1, fused=fused)
    assert {row["steps"] for row in first.visit_records} <= {0, 1, 2}
    _, plain = run(rounds=1, scale=16.0, fused=fused)
    assert [row["steps"] for row in plain.visit_records] == [3] * 4


def test_algorithms_see_gradients_that_are_not_multiplied():
    """Lightning divides by the scale before its hook: a scale of 2**4 or 2**8, powers of 2, changes nothing."""
    found = [weights(run(FedProx(0.5), scale=scale)[0]) for scale in (2.0**4, 2.0**8)]
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name], rtol=2e-3, atol=2e-4)


def test_optimizers_that_divide_by_the_scale_themselves_are_refused_where_gradients_are_changed():
    with refusal(r"SGD with fused=True divides .* after FedProx has added .* leave fused out"):
        run(FedProx(0.5), fused=True)


def test_other_precisions_have_no_scale():
    assert scaler_of(trainer(1)) is None
