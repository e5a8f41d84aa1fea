import math
from collections import Counter
from pathlib import Path
from statistics import NormalDist

import lightning as L
import numpy as np
import pytest
import torch
from budgets import budget
from fleets import make_fleet, rounds_of
from lora_runs import LoraModule
from lora_runs import run as run_lora
from plain_lightning import (
    Metrics,
    Numbers,
    States,
    assert_equal,
    federate,
    module,
    ten_clients,
    trainer,
    weights,
)
from refusals import refusal
from stacked import CLIENTS, Points, fit
from synthesizing import run as run_made
from tastes import Adapters
from tastes import run as run_selectors
from thread_team import on_team
from torch import nn
from torch.utils.data import WeightedRandomSampler
from two_parts import Recorder, TwoParts

from fedlight import FederatedLoop, FederatedWrapper, FewFedPIT, SFTModule, derive_seed
from fedlight.augmentation.less.example_gradients import example_gradients
from fedlight.callbacks.loop.parts import DPSGD, LocalBuffers
from fedlight.federation.algorithms import FedBiscuit, SoftGroups
from fedlight.federation.algorithms.lora import FFALoRA, HetLoRA, ProductAverage
from fedlight.federation.forward import ZerothOrder
from fedlight.modules import ProjectorModule
from fedlight.modules.language.adapters import Lora, trained_parameters

LR = 0.1


class PartlyUnused(TwoParts):
    """The loss does not reach all of its parameters."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.unused = nn.Parameter(torch.zeros(5))


def written_out(start, batches, clip_norm, noise, seed):
    """Return the weights after SGD on each batch of a visit: a loop over examples, each with a separate backward pass."""
    made = PartlyUnused()
    made.load_state_dict(start)
    stream = torch.Generator().manual_seed(seed)  # as the loop seeds the global stream for a visit
    for batch in batches:
        total = [np.zeros(tuple(p.shape)) for p in made.parameters()]
        for x, y in zip(batch["x"], batch["y"], strict=True):
            loss = (made({"x": x[None]}) - y[None]).square().mean()
            gradient = torch.autograd.grad(loss, [*made.parameters()], materialize_grads=True)
            gradient = [g.double().numpy() for g in gradient]
            norm = math.sqrt(sum((g**2).sum() for g in gradient))
            total = [t + g * min(1.0, clip_norm / norm) for t, g in zip(total, gradient, strict=True)]
        for parameter, value in zip(made.parameters(), total, strict=True):
            drawn = torch.randn(parameter.shape, generator=stream).double().numpy()
            value = (value + noise * clip_norm * drawn) / len(batch["x"])
            parameter.data -= LR * torch.from_numpy(value).float()
    return weights(made)


@pytest.mark.parametrize(("clip_norm", "noise"), [(0.4, 0.0), (0.4, 0.7), (1.5, 2.0), (1e6, 0.0)])
def test_a_visit_equals_a_loop_over_examples(clip_norm, noise):
    """Of clients with whole batches, with less than one, and at several steps; with a large norm it is plain training."""
    sent, recorder, made = States(), Recorder(), PartlyUnused(lr=LR)
    start = weights(made)
    fit(made, Points(), rounds=1, callbacks=[recorder, sent], parts=[DPSGD(clip_norm, noise)])
    assert {visit.client_id for visit, _ in recorder.visits[0]} == {*CLIENTS}
    for visit, batches in recorder.visits[0]:
        seed = derive_seed(0, "visit", 0, visit.client_id, "train")
        expected = written_out(start, batches, clip_norm, noise, seed)
        torch.testing.assert_close(sent.seen[0, visit.client_id], expected, rtol=1e-5, atol=1e-6)


def one_step(made, data, *parts, callbacks=(), rounds=1):
    """One client a round, for one step."""
    fit(made, data, rounds=rounds, local_steps=1, clients_per_round=1, callbacks=callbacks, parts=parts)


class Scaled(Points):
    """Points of one client; the input of its first is ``times`` as large."""

    def __init__(self, times):
        super().__init__({"a": 8}, batch_size=8)
        self.times = times

    def setup(self, stage=None):
        super().setup(stage)
        self.x[0] *= self.times


@pytest.mark.parametrize("times", [-1.0, 50.0, 1e8])
def test_one_example_moves_a_step_by_at_most_two_norms(times):
    def step(data, *parts):
        made = TwoParts(lr=1.0)
        with torch.no_grad():
            made.head.weight *= 20
        one_step(made, data, *parts)
        return torch.nn.utils.parameters_to_vector(made.parameters()).detach()

    protected = step(Scaled(times), DPSGD(0.01, 0.0)) - step(Scaled(1.0), DPSGD(0.01, 0.0))
    assert 0 < protected.norm().item() <= 2 * 0.01 / 8 * 1.001
    assert (step(Scaled(times)) - step(Scaled(1.0))).norm() > 1


def gaussian_epsilon_of(noise, delta, times):
    """Return the epsilon at which the Gaussian mechanism's exact delta (Balle and Wang, theorem 8) is ``delta``."""
    mu, cdf = 2 * math.sqrt(times) / noise, NormalDist().cdf
    low, high = 0.0, 200.0
    for _ in range(100):
        middle = (low + high) / 2
        exact = cdf(mu / 2 - middle / mu) - math.exp(middle) * cdf(-mu / 2 - middle / mu)
        low, high = (middle, high) if exact > delta else (low, middle)
    return high


@pytest.mark.parametrize("local_steps", [None, 2, 7])
def test_epsilon_is_that_of_the_example_in_most_batches(local_steps):
    """Counted by an observer of all batches; an upper bound where a visit stops inside a pass."""
    watch, uses, most = Metrics("_example"), Counter(), Counter()

    class Uses(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            rows = [(loop.rounds_done, loop.visit.client_id, tuple(x.tolist())) for x in batch[0]]
            assert len({*rows}) == len(rows)
            uses.update(rows)

    loop = FederatedLoop(clients_per_round=3, local_steps=local_steps, parts=[DPSGD(1.0, 6.0, delta=1e-3)])
    wrapped = FederatedWrapper(Numbers(), ten_clients)
    trainer(4, [loop, watch, Uses()]).fit(module(), wrapped)
    for (round_idx, client, _), times in uses.items():
        most[round_idx, client] = max(most[round_idx, client], times)
    passes = Counter()
    for (_, client), times in most.items():
        passes[client] += times
    if local_steps is None:
        assert loop.privacy.passes == passes  # every visit is one pass
    else:
        assert all(times <= loop.privacy.passes[client] for client, times in passes.items())
        assert loop.privacy.passes["c0"] == passes["c0"]  # of 3 examples, all in each batch
    expected = gaussian_epsilon_of(6.0, 1e-3, max(loop.privacy.passes.values()))
    expected = {"fed/epsilon_example": expected, "fed/delta_example": 1e-3}
    assert watch.rounds[-1] == pytest.approx(expected, rel=1e-5)


def test_the_noise_of_epsilons_in_the_documentation():
    page = (Path(__file__).parents[4] / "docs/privacy.md").read_text()
    for epsilon in (1, 4, 8):
        part = DPSGD(1.0, epsilon=float(epsilon))
        noise = [f"{part.noise_for({(1, 1): times}):.1f}" for times in (1, 10, 100)]
        assert f"| {epsilon} | {' | '.join(noise)} |" in page


def test_each_visit_of_a_client_counts():
    """Soft groups train every selector at every client, after a warm-up."""
    recorder, part = Recorder(), DPSGD(1.0, 1.0)
    algorithm = FedBiscuit(1, 1, assignment=SoftGroups())
    _, loop = run_selectors(algorithm, 4, Adapters(2), [recorder], local_steps=1, parts=[part])
    visits = Counter(visit.client_id for visits in recorder.visits.values() for visit, _ in visits)
    assert visits.total() == 2 * 4 + 2 * 4 * 2
    assert loop.privacy.passes == visits


def test_a_budget_of_soft_groups_counts_one_visit_in_the_warm_up():
    algorithm = FedBiscuit(1, 1, assignment=SoftGroups())
    part = DPSGD(1.0, delta=1e-3, epsilon=30.0)
    _, loop = run_selectors(algorithm, 4, Adapters(2), local_steps=1, clients_per_round=9, parts=[part])
    assert {*loop.privacy.passes.values()} == {2 + 2 * 2}
    assert 0.999 * 30 < part.spent({(1, 1): 6}) <= 30


def test_the_noise_follows_from_an_epsilon_and_a_resumed_run_keeps_it(tmp_path, caplog):
    caplog.set_level("INFO")

    def part():
        return {"parts": [DPSGD(1.0, delta=0.01, epsilon=30.0)]}

    whole, loop, logged = budget(4, **part())
    assert 0.999 * 30 < logged[-1]["fed/epsilon_example"] <= 30
    assert f"DPSGD: noise_multiplier={loop.privacy.noise['_example']:.5g} keeps epsilon=30" in caplog.text
    _, first, _ = budget(4, tmp_path / "half.ckpt", stops_after=2, **part())
    assert first.rounds_done == 2
    # With more rounds than planned the budget ends the run. The fifth round asks no client with the most passes.
    resumed, again, rest = budget(40, ckpt=tmp_path / "half.ckpt", **part())
    assert again.privacy.noise == loop.privacy.noise
    assert again.rounds_done == 5
    assert rest[-1]["fed/epsilon_example"] <= 30
    assert "would exceed epsilon=30" in caplog.text
    most = max(loop.privacy.passes.values())
    assert max(again.privacy.passes.values()) == most
    in_sixth = again._rounds.visits_of(5, again._rounds.asked(5))
    assert max((again.privacy.passes + Counter(visit.client_id for visit in in_sixth)).values()) > most
    given, _ = federate(rounds=5, parts=[DPSGD(1.0, loop.privacy.noise["_example"])])
    assert_equal(resumed, weights(given))
    assert not torch.equal(resumed["net.0.weight"], whole["net.0.weight"])


def test_processes_change_no_bit(monkeypatch):
    def run(rank=0):
        made, loop = federate(clients_per_round=6, parts=[DPSGD(1.0, 1.0)])
        return weights(made), loop.privacy.passes

    whole, passes = run()
    for state, counted in on_team(monkeypatch, 3, run):
        assert_equal(state, whole)
        assert counted == passes


def test_a_client_with_an_example_that_is_not_finite_is_left_out():
    _, rows, _, loop = fit(TwoParts(), Points(broken={"c": float("nan")}), rounds=1, parts=[DPSGD(1.0, 1.0)])
    assert {row["client"]: row["reason"] for row in rows} == {"a": "", "b": "", "c": "diverged", "d": ""}
    assert loop.privacy.passes["c"] == 3  # it took part


def test_micro_batches_of_a_device_change_no_bit(tmp_path):
    """A device with little memory cuts batches in two; each example is computed alone on it as well."""
    part = {"parts": [DPSGD(0.3, 1.0)]}
    alone, _ = federate(**part)
    rows, large, _, _ = rounds_of(fleet=make_fleet(tmp_path, large={}), **part)
    small = {"memory_gib": (min(row["peak_bytes"] for row in rows) - 1) / 2**30}
    cut, model, _, _ = rounds_of(fleet=make_fleet(tmp_path, small=small), **part)
    assert {row["micro_batch"] for row in cut} == {2}
    assert_equal(weights(large), weights(alone))
    assert_equal(weights(model), weights(alone))
    assert "training_step" not in vars(model)

    class Breaks(L.Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            assert "training_step" in vars(pl_module)
            raise RuntimeError("broken off")

    broken = module()
    loop = FederatedLoop(clients_per_round=3, local_steps=2, fleet=make_fleet(tmp_path, small=small), **part)
    with pytest.raises(RuntimeError, match="broken off"):
        trainer(1, [loop, Breaks()]).fit(broken, FederatedWrapper(Numbers(), ten_clients))
    assert "training_step" not in vars(broken)


def test_secret_noise_is_another_in_each_run():
    ends = []
    for _ in range(2):
        part = DPSGD(1.0, 1.0)
        part.keep_secret()
        ends.append(weights(federate(rounds=1, parts=[part])[0]))
    seeded = [weights(federate(rounds=1, parts=[DPSGD(1.0, 1.0)])[0]) for _ in range(2)]
    assert_equal(*seeded)
    assert not torch.equal(*(end["net.0.weight"] for end in ends))


def test_a_fixed_factor_has_no_noise_and_no_part_of_the_norm():
    """FFALoRA keeps A: B moves as if A had no gradient."""
    start = dict(LoraModule().named_parameters())
    end = dict(run_lora(FFALoRA(), parts=[DPSGD(0.05, 1.0)])[0].named_parameters())
    for name, value in start.items():
        assert torch.equal(value, end[name]) == ("lora_B" not in name), name
    sent, recorder, parts = States(), Recorder(), [DPSGD(1e-3, 0.0)]
    callbacks = [recorder, sent]
    fit(LoraModule(), Points(), 1, 1, callbacks, local_steps=1, algorithm=FFALoRA(), parts=parts)
    for (_, client), state in sent.seen.items():
        [batch] = next(batches for visit, batches in recorder.visits[0] if visit.client_id == client)
        model = LoraModule()
        b = {name: p for name, p in model.named_parameters() if "lora_B" in name}
        total = [torch.zeros_like(p) for p in b.values()]
        for loss in model.example_losses(batch):  # all norms are above the clipping norm
            gradient = torch.autograd.grad(loss, [*b.values()], retain_graph=True)
            norm = torch.sqrt(sum(g.square().sum() for g in gradient))
            total = [t + 1e-3 * g / norm for t, g in zip(total, gradient, strict=True)]
        for (name, parameter), value in zip(b.items(), total, strict=True):
            expected = parameter - 0.1 * value / len(batch["x"])
            torch.testing.assert_close(state[name], expected.detach(), rtol=0, atol=1e-7)


def test_a_language_model_equals_its_example_gradients():
    """The gradients of `example_gradients`, which come from one backward pass for all examples, clipped and averaged."""

    class Texts(Points):
        def collate(self, examples):
            stream = torch.Generator().manual_seed(7)
            ids = torch.randint(5, 90, (len(self.train_set), 20), generator=stream)[list(examples)]
            labels = torch.where(torch.arange(20) >= 1 + torch.tensor(examples)[:, None], ids, -100)
            return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}

    made = SFTModule("toy", dtype="fp32", lora=Lora(rank=2, dropout=0.0), optimizer={"name": "SGD"}, lr=0.5)
    made.configure_model()
    recorder = Recorder()
    start = {name: value.detach().clone() for name, value in trained_parameters(made).items()}
    one_step(made, Texts({"a": 6}, batch_size=6), DPSGD(10.5, 0.0), callbacks=[recorder])
    end = {name: value.detach().clone() for name, value in trained_parameters(made).items()}
    for name, value in trained_parameters(made).items():
        value.data.copy_(start[name])
    [[(_, [batch])]] = [recorder.visits[0]]
    each = example_gradients(made, batch)
    norms = torch.sqrt(sum(g.flatten(1).square().sum(1) for g in each.values()))
    assert norms.min() < 10.5 < norms.max()
    scale = (10.5 / norms).clamp(max=1.0)
    for name, value in each.items():
        mean = torch.einsum("b,b...->...", scale, value) / 6
        torch.testing.assert_close(start[name] - end[name], 0.5 * mean, rtol=1e-3, atol=1e-5)


def test_an_example_with_a_plain_0_as_its_loss_is_left_out():
    class LeavesOut(TwoParts):
        is_plain = True

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            if batch["x"][0, 0] < 0:
                return loss
            return torch.zeros(()) if self.is_plain else 0 * loss

    ends = []
    for plain in (True, False):
        made = LeavesOut(lr=LR)
        made.is_plain = plain
        fit(made, Points(), rounds=1, parts=[DPSGD(0.5, 1.0)])
        ends.append(weights(made))
    assert_equal(*ends)


class Manual(type(module())):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class Skips(type(module())):
    def training_step(self, batch, batch_idx):
        return None


@pytest.mark.parametrize(
    ("message", "settings"),
    [
        ("given twice in parts", {"parts": [DPSGD(1.0, 1.0), DPSGD(1.0, 1.0)]}),
        ("leave federated.forward out", {"forward": ZerothOrder()}),
        ("have training_step return the loss", {"model": Manual}),
        ("accumulate_grad_batches=1", {"settings": {"accumulate_grad_batches": 2}}),
        ("the statistics of LocalBuffers: leave it out", {"parts": [DPSGD(1.0, 1.0), LocalBuffers()]}),
        ("net.1 normalizes over a batch", {"model": lambda: module(norm=True)}),
        ("another algorithm, such as FedAvg", {"algorithm": HetLoRA()}),
        ("another algorithm, such as FedAvg", {"algorithm": ProductAverage(threshold=0.95)}),
        ("several in one step, as LBFGS does", {"model": lambda: module(optimizer="LBFGS", dropout=0.0)}),
        ("training_step left an example out", {"model": Skips}),
        ("delta=0.1 is not below one over the 21 examples", {"parts": [DPSGD(1.0, 1.0, delta=0.1)]}),
    ],
)
def test_runs_that_it_cannot_protect_are_refused(message, settings):
    settings = {"parts": [DPSGD(1.0, 1.0)], **settings}
    model = settings.pop("model", module)()
    with refusal(message):
        federate(rounds=1, model=model, **settings)


class Collated(Points):
    """Points of one client, and a function of x and y of a batch in the place of `collate`."""

    def __init__(self, made, batch_size=8):
        super().__init__({"a": 8}, batch_size=batch_size)
        self.made = made

    def collate(self, examples):
        return self.made(self.x[list(examples)], self.y[list(examples)])


@pytest.mark.parametrize(
    ("message", "made"),
    [
        ("a batch has 6 rows of 8 examples", lambda x, y: list(x)),
        ("a batch is a list of 8 examples", lambda x, y: [row.repeat(2)[:8] for row in x]),
        ("a batch is a list of 8 examples", lambda x, y: {"x": [row.repeat(2)[:8] for row in x]}),
        ("a batch has 24 rows of 8 examples", lambda x, y: {"x": x.repeat(3, 1), "y": y.repeat(3, 1)}),
        ("a batch has 2 rows of 8 examples", lambda x, y: {"x": x[6:], "y": y[6:]}),
    ],
)
def test_batches_whose_rows_are_no_examples_are_refused(message, made):
    with refusal(f"{message}: DPSGD needs one row for each; have collate"):
        fit(TwoParts(), Collated(made), clients_per_round=1, parts=[DPSGD(1.0, 1.0)])


def test_as_many_columns_as_examples_are_allowed():
    class Columns(TwoParts):
        def training_step(self, batch, batch_idx):
            return super().training_step({"x": batch[0], "y": batch[1]}, batch_idx)

    named, columns = TwoParts(lr=LR), Columns(lr=LR)
    for made, collate in ((named, lambda x, y: {"x": x, "y": y}), (columns, lambda *xy: [*xy])):
        fit(made, Collated(collate, batch_size=2), clients_per_round=1, parts=[DPSGD(1.0, 1.0)])
    assert_equal(weights(named), weights(columns))


class Contrasts(TwoParts):
    compares_rows = ProjectorModule.compares_rows


def by_own_losses(parts):
    """Each training example's loss decides which selector a client trains, without noise."""
    run_selectors(FedBiscuit(1, 1, group_by="own"), 4, Adapters(2), parts=parts)


AT_ONCE = "DPSGD trains one client at a time: set clients_at_once=1"


@pytest.mark.parametrize(
    ("message", "train"),
    [
        (AT_ONCE, lambda parts: fit(LoraModule(), Points(), 2, parts=parts)),
        (AT_ONCE, lambda parts: fit(LoraModule(), Points(), "auto", parts=parts)),
        ("DPSGD does not protect losses on clients' own rows: set group_by=val", by_own_losses),
        (
            "the loss of Contrasts compares the rows of a batch: take PrivateMean",
            lambda parts: fit(Contrasts(), Points(), parts=parts),
        ),
        (
            "DPSGD protects training rows, and client '.*' trains on 'synthetic' data",
            lambda parts: run_made(FewFedPIT(0.3), parts=parts),
        ),
    ],
)
def test_visits_that_it_cannot_protect_are_refused(message, train):
    with refusal(message):
        train([DPSGD(1.0, 1.0)])


def test_a_loss_scale_is_refused():
    run = federate(rounds=1, parts=[part := DPSGD(1.0, 1.0)])[1]._run
    run.trainer = type("Scaled", (), {"precision": "16-mixed", "accumulate_grad_batches": 1, "callbacks": []})
    with refusal("clips gradients without a loss scale"):
        part.check(run)


def test_batches_that_depend_on_examples_are_refused():
    class Weighted(Numbers):
        def train_dataloader(self):
            sampler = WeightedRandomSampler(torch.arange(120.0), 120)
            return torch.utils.data.DataLoader(self.data, batch_size=4, sampler=sampler)

    loop = FederatedLoop(clients_per_round=3, local_steps=2, parts=[DPSGD(1.0, 1.0)])
    with refusal("give the training loader a batch_size and shuffle=True"):
        trainer(1, [loop]).fit(module(), FederatedWrapper(Weighted(), ten_clients))


@pytest.mark.parametrize(
    ("message", "settings"),
    [
        ("clip_norm=0.0 bounds the norm of an example's gradient", (0.0, 1.0)),
        ("give one of them", (1.0,)),
        ("give one of them", (1.0, 1.0, 1e-5, 8.0)),
        ("noise_multiplier=-1", (1.0, -1.0)),
        ("epsilon=0", (1.0, None, 1e-5, 0.0)),
        ("delta", (1.0, 1.0, 1.0)),
    ],
)
def test_settings_out_of_range(message, settings):
    with refusal(message):
        DPSGD(*settings)
