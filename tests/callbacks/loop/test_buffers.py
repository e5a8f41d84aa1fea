from collections import Counter
from types import SimpleNamespace

import lightning as L
import numpy as np
import pytest
import torch
from fleets import make_fleet
from memories import kept
from plain_lightning import Regression, assert_equal, federate, module, ten_clients, weights
from refusals import refusal
from torch import nn
from two_parts import Recorder

from fedlight import FedAvg, FedBiscuit, FewFedPIT, LocalOnly, Wire
from fedlight.callbacks.logs.client_accuracy import outputs_of_own_model
from fedlight.callbacks.loop.parts import AveragedBuffers, LocalBuffers
from fedlight.callbacks.loop.parts.limits import Limits
from fedlight.federation import ClipAndNoise, CoordinateMedian, FedAvgM, PrivateMean, Quantize
from fedlight.federation.client import Identity, serialized_bytes

SIZES = {name: len(indices) for name, indices in ten_clients(None).items()}
NORM = {"net.1.weight", "net.1.bias"}
PLAIN = {"optimizer": "SGD", "dropout": 0.0, "norm": True}


def state_of(of):
    return {name: value.detach().cpu().clone() for name, value in of.state_dict().items()}


class Seen(Recorder):
    """Also what validation saw: number of rounds -> state."""

    def __init__(self):
        super().__init__()
        self.validated = {}

    def on_validation_start(self, trainer, pl_module):
        if not trainer.sanity_checking:
            self.validated[len(self.visits)] = state_of(pl_module)


def run(rounds=3, model=None, clients=ten_clients, **loop):
    seen = Seen()
    model, loop = federate(rounds, clients, model or module(**PLAIN), [seen], **loop)
    return model, loop, seen


def trained_on(start, batches):
    """What plain SGD makes of ``start``, buffers included."""
    local = module(**PLAIN)
    local.load_state_dict(start)
    optimizer = torch.optim.SGD(local.parameters(), lr=0.05)
    for x, y in batches:
        optimizer.zero_grad()
        nn.functional.mse_loss(local.net(x), y).backward()
        optimizer.step()
    return state_of(local)


def of_round(seen, round_idx):
    return {visit.client_id: batches for visit, batches in seen.visits[round_idx]}


def moved(value, ends):
    """A parameter moved by FedBis' weights to where clients have ended, in fp64."""
    return (value + 10 / 3 * sum(SIZES[c] / 120 * (end.double() - value) for c, end in ends.items())).float()


def test_local_equals_a_loop_written_out():
    """FedBN: normalization and statistics of a client go on where it left them; the server's are the initial ones."""
    start = state_of(module(**PLAIN))
    g, own = dict(start), {}
    kept = {name for name in g if name.startswith("net.1.")}
    model, loop, seen = run(rounds=4, parts=[LocalBuffers()])
    for round_idx in range(4):
        local = {}
        for client, batches in of_round(seen, round_idx).items():
            local[client] = trained_on(g | own.get(client, {}), batches)
            own[client] = {name: local[client][name] for name in kept}
        g |= {name: moved(g[name], {c: end[name] for c, end in local.items()}) for name in g.keys() - kept}
    assert max(int(of["net.1.num_batches_tracked"]) for of in own.values()) > 2  # somebody came back
    torch.testing.assert_close(state_of(model), g, rtol=1e-5, atol=1e-6)
    assert_equal({n: state_of(model)[n] for n in kept}, {n: start[n] for n in kept})
    for client in loop.clients:
        if client in own:
            torch.testing.assert_close(loop.own_state(client), own[client], rtol=1e-5, atol=1e-6)
            with loop.holding(loop.own_state(client)):
                torch.testing.assert_close(state_of(model), g | own[client], rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(state_of(model), g, rtol=1e-5, atol=1e-6)
        else:
            assert loop.own_state(client) is None


@pytest.mark.parametrize("server", [{}, {"server": FedAvgM(lr=5.0)}, {"algorithm": FedAvg("uniform")}])
def test_a_variance_stays_a_mean_whatever_the_server_does(server):
    model, _, seen = run(4, parts=[AveragedBuffers()], **server)
    for state in seen.validated.values():
        assert (state["net.1.running_var"] > 0).all()
    assert model.net[1].num_batches_tracked.item() == 8


def test_a_count_is_a_rounded_mean():
    """Client a has one batch, client b two: (4 * 1 + 8 * 2) / 12."""
    clients = {"a": np.arange(4), "b": np.arange(4, 12)}
    settings = {"clients_per_round": 2, "local_steps": None, "parts": [AveragedBuffers()]}
    model, *_ = run(1, clients=lambda dataset: clients, **settings)
    assert model.net[1].num_batches_tracked.item() == 2


def test_bytes_are_counted_exactly():
    model = module(**PLAIN)
    buffers = serialized_bytes(dict(model.named_buffers()))
    whole = Identity().down_bytes(weights(model))
    shared = Identity().down_bytes({n: p for n, p in weights(model).items() if n not in NORM})
    for policy, expected in (("average", whole + buffers), ("local", shared)):
        _, loop, _ = run(1, parts=kept(policy))
        assert {(r["bytes_down"], r["bytes_up"]) for r in loop.visit_records} == {(expected, expected)}
    _, loop, _ = run(1, parts=[AveragedBuffers()], channel=Wire(up=Quantize("int8")))
    small = Wire(up=Quantize("int8")).up_bytes(weights(model)) + buffers
    assert {(r["bytes_down"], r["bytes_up"]) for r in loop.visit_records} == {(whole + buffers, small)}


@pytest.mark.parametrize("policy", ["average", "local"])
def test_with_a_fleet_the_planned_bytes_are_those_that_are_sent(tmp_path, caplog, policy):
    fleet = make_fleet(tmp_path, fast={})
    model, loop, _ = run(2, parts=kept(policy), fleet=fleet)
    assert "the clock of its rounds is off" not in caplog.text
    alone, _, _ = run(2, parts=kept(policy))
    assert_equal(state_of(model), state_of(alone))
    assert len({row["bytes_up"] for row in loop.visit_records}) == 1


def test_a_lossy_wire_leaves_buffers_as_they_are():
    """With one client the server's statistics are exactly the client's."""
    one = {"clients": lambda d: {"all": np.arange(120)}, "clients_per_round": 1, "parts": [AveragedBuffers()]}
    model, _, seen = run(1, channel=Wire(up=Quantize("nf4")), **one)
    expected = trained_on(state_of(module(**PLAIN)), of_round(seen, 0)["all"])
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        assert torch.equal(getattr(model.net[1], name), expected[f"net.1.{name}"])


class Queue(Regression):
    """The last inputs, as a momentum contrast has them; in the place of the old ones, or growing."""

    def __init__(self, grows=False, persistent=True, **kwargs):
        super().__init__(optimizer="SGD", **kwargs)
        self.grows = grows
        self.register_buffer("queue", torch.zeros(0 if grows else 4, 4), persistent=persistent)

    def training_step(self, batch, batch_idx):
        x = batch[0].detach()
        self.queue = torch.cat([self.queue, x]) if self.grows else x.mean(0).expand(4, 4).clone()
        return super().training_step(batch, batch_idx)


class Ema(Regression):
    """A running mean of a weight."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8, 4))

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.mean.lerp_(self.net[0].weight.detach(), 0.1)


class Least(Regression):
    """The least input so far, which starts at infinity."""

    def __init__(self):
        super().__init__(**PLAIN | {"norm": False})
        self.register_buffer("least", torch.full((4,), torch.inf))

    def training_step(self, batch, batch_idx):
        self.least = torch.minimum(self.least, batch[0].amin(0))
        return super().training_step(batch, batch_idx)


def test_the_mean_of_a_buffer_that_started_at_infinity():
    model, _, seen = run(rounds=1, model=Least(), parts=[AveragedBuffers()])
    least = {client: torch.cat([x for x, _ in own]).amin(0) for client, own in of_round(seen, 0).items()}
    total = sum(SIZES[client] * value.double() for client, value in least.items())
    assert torch.equal(model.least, (total / sum(SIZES[client] for client in least)).float())


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_the_mean_of_a_complex_buffer(dtype):
    class Turned(Regression):
        def __init__(self):
            super().__init__(**PLAIN | {"norm": False})
            self.register_buffer("turned", torch.zeros(4, dtype=dtype))

        def training_step(self, batch, batch_idx):
            self.turned = (batch[0].sum(0) * (1 + 2j)).to(dtype)
            return super().training_step(batch, batch_idx)

    model, _, seen = run(rounds=1, model=Turned(), parts=[AveragedBuffers()])
    last = {client: batches[-1][0].sum(0) for client, batches in of_round(seen, 0).items()}
    total = sum(SIZES[client] * value.double() * (1 + 2j) for client, value in last.items())
    torch.testing.assert_close(model.turned, (total / sum(SIZES[client] for client in last)).to(dtype))


class Late(Regression):
    """Makes its buffer when it first trains."""

    def __init__(self):
        super().__init__()
        self.register_buffer("declared", None)

    def training_step(self, batch, batch_idx):
        if self.declared is None:
            self.declared = torch.zeros(1)
        if not hasattr(self, "new"):
            self.register_buffer("new", torch.zeros(1))
        return super().training_step(batch, batch_idx)


CASES = {
    "batch norm": (lambda: module(norm=True), "net.1.running_mean, net.1.running_var, net.1.num_batches"),
    "growing queue": (lambda: Queue(grows=True), "changes queue:"),
    "average of weights": (Ema, "changes mean:"),
    "late": (Late, "changes declared, new:"),
}


@pytest.mark.parametrize("case", CASES)
def test_each_kind_of_buffer_is_refused_by_name_after_the_first_batch_of_all(case):
    """The module is as before."""
    make, named = CASES[case]
    L.seed_everything(0, verbose=False)
    model = make()
    before = state_of(model)
    with refusal(r"training changes .*Add AveragedBuffers .* or LocalBuffers") as error:
        run(2, model)
    assert named in str(error.value)
    batch_idx = model.trainer.fit_loop.epoch_loop.batch_idx
    assert batch_idx == (case == "average of weights")  # whose hook comes behind the batch
    assert_equal(state_of(model), before)
    assert "new" not in model._buffers


def test_what_changes_later_is_refused_at_the_end_of_its_visit():
    class Rare(Regression):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def training_step(self, batch, batch_idx):
            if batch_idx == 3:
                self.seen.add_(1)
            return super().training_step(batch, batch_idx)

    model = Rare()
    before = state_of(model)
    with refusal("training changes seen"):
        run(1, model)
    assert model.trainer.fit_loop.epoch_loop.batch_idx == 3
    assert_equal(before, state_of(model))


class Teacher(Regression):
    """Follows its student, in one of the ways in which people write that."""

    def __init__(self, how, held=False):
        super().__init__(optimizer="SGD", dropout=0.0)
        self.teacher = nn.Linear(4, 8).requires_grad_(False)
        self.how, self.held, self.seen = how, held, 0

    def training_step(self, batch, batch_idx):
        self.seen += 1
        with torch.no_grad():
            for own, student in zip(self.teacher.parameters(), self.net[0].parameters(), strict=True):
                if self.how == "data":
                    own.data = 0.9 * own.data + 0.1 * student.data
                elif self.seen > 3:
                    own.data.mul_(0.9).add_(student.data, alpha=0.1)
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters() if self.held else self.net.parameters(), lr=0.05)


@pytest.mark.parametrize(("how", "batch_idx"), [("data", 0), ("late", 5)])
@pytest.mark.parametrize("policy", ["refuse", "average", "local"])
def test_a_teacher_that_no_optimizer_holds_is_refused_by_name(how, batch_idx, policy):
    """At once, or before validation sees the round in which it first moved."""
    model = Teacher(how)
    with refusal(r"changes teacher\.weight, teacher\.bias: .* Give them to the optimizer"):
        run(1, model, parts=kept(policy))
    assert model.trainer.fit_loop.epoch_loop.batch_idx == batch_idx


def test_a_teacher_that_the_optimizer_holds_is_averaged():
    L.seed_everything(0, verbose=False)
    start = Teacher("data", held=True)
    g = state_of(start)
    model, _, seen = run(1, start)
    ends = {}
    for client, batches in of_round(seen, 0).items():
        local = Teacher("data")
        local.load_state_dict(g)
        optimizer = torch.optim.SGD(local.net.parameters(), lr=0.05)
        for batch in batches:
            optimizer.zero_grad()
            local.training_step(batch, 0).backward()
            optimizer.step()
        ends[client] = state_of(local)
    expected = {n: moved(value, {c: end[n] for c, end in ends.items()}) for n, value in g.items()}
    torch.testing.assert_close(state_of(model), expected, rtol=1e-5, atol=1e-6)


def test_what_a_client_would_go_on_with_is_what_its_own_examples_are_tested_with():
    _, loop, _ = run(4, parts=[LocalBuffers()])
    model = loop._run.lightning_module
    examples = torch.arange(24.0).reshape(6, 4).cos()
    data = SimpleNamespace(
        eval_batch_size=60, test_set=examples, collate=torch.stack,
        test_client_indices={client: np.arange(6) for client in loop.clients},
    )  # fmt: skip
    model.test_step = lambda batch, batch_idx: model.net(batch)
    before = state_of(model)
    for client in data.test_client_indices:
        (output,) = outputs_of_own_model(model.trainer, model, loop, data, client)
        alone = module(**PLAIN)
        alone.load_state_dict(before | (loop.own_state(client) or {}))
        assert torch.equal(output, alone.eval().net(examples))
    assert_equal(before, state_of(model))
    assert 1 < sum(loop.own_state(client) is not None for client in loop.clients) < 10


@pytest.mark.parametrize("policy", ["refuse", "average", "local"])
def test_policies_change_nothing_where_no_buffer_changes(policy):
    plain, _ = federate(2)
    model = module()
    model.register_buffer("mask", torch.tensor([float("nan"), float("-inf")]), persistent=False)
    run(2, model, parts=kept(policy))
    assert_equal(weights(plain), weights(model))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Queue(persistent=False), r"changes queue, which the module's state_dict leaves out"),
        (lambda: Queue(grows=True), r"the size of queue from \(0, 4\) to \(4, 4\)"),
        (Late, r"the size of declared from None to \(1,\)"),
    ],
)
def test_what_has_no_mean_or_is_not_sent_is_refused_under_average(make, message):
    model = make()
    with refusal(message):
        run(1, model, parts=[AveragedBuffers()])


@pytest.mark.parametrize("make", [lambda: Queue(grows=True, persistent=False), Late])
def test_local_keeps_what_changes_its_size_or_is_in_no_state_dict(make):
    L.seed_everything(0, verbose=False)
    model, loop, seen = run(3, make(), parts=[LocalBuffers()])
    examples = Counter()
    for visits in seen.visits.values():
        for visit, batches in visits:
            examples[visit.client_id] += sum(len(x) for x, _ in batches)
    for client, number in examples.items():
        own = loop.own_state(client)
        if isinstance(model, Queue):
            assert own["queue"].shape == (number, 4)
        else:
            assert own.keys() == {"declared", "new"}
    assert dict(model.named_buffers()).get("queue", torch.zeros(0)).numel() == 0
    assert "new" not in model._buffers


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"parts": [AveragedBuffers(), LocalBuffers()]}, "AveragedBuffers and LocalBuffers: leave one of them out"),
        ({"parts": [AveragedBuffers()], "aggregation": PrivateMean(1.0, 1.0)}, "differential privacy: take LocalBuffers"),
        ({"parts": [AveragedBuffers()], "channel": Wire(up=ClipAndNoise(1.0, 1.0))}, "past the clipping and the noise"),
        ({"parts": [AveragedBuffers()], "aggregation": CoordinateMedian()}, "which CoordinateMedian would not protect"),
        ({"parts": [AveragedBuffers()], "limits": Limits(enforce=True)}, "limits.enforce holds for updates, not for"),
        ({"parts": [AveragedBuffers()], "algorithm": LocalOnly()}, "under LocalOnly: take LocalBuffers"),
        ({"parts": [LocalBuffers()], "algorithm": FedBiscuit()}, "under FedBiscuit: leave it out of parts"),
        ({"parts": [AveragedBuffers()], "algorithm": FewFedPIT(0.5)}, "under FewFedPIT: leave it out of parts"),
    ],
)  # fmt: skip
def test_what_cannot_go_together_is_refused_before_any_work(settings, message):
    model = module(**PLAIN)
    before = weights(model)
    with refusal(message):
        run(1, model, **settings)
    assert_equal(before, weights(model))
