import copy
import random
from functools import partial
from hashlib import blake2b

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from plain_lightning import Metrics, Regression, assert_equal, federate, module, seeded, weights
from stacked import Lora, Points, both_ways, fit, furthest
from two_parts import Recorder

from fedlight import CoordinateMedian, FederatedLoop, LocalOnly, Quantize, Scaffold, Wire
from fedlight.federation.algorithms import Ditto, FedAvg, FedProx, FedRep, GlobalThenLocal
from fedlight.federation.algorithms.lora import FedSALoRA, FFALoRA, FlexLoRA, HetLoRA, ProductAverage, RoLoRA
from fedlight.federation.forward.zeroth_order import ZerothOrder, perturb

LR, EPS = 0.02, 0.01


class Scheduled(Regression):
    """Plain SGD whose rate falls from step to step of a visit."""

    def __init__(self, gamma=1.0, lr=LR, **options):
        super().__init__(optimizer="SGD", lr=lr, dropout=0.0)
        self.gamma, self.options = gamma, options

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, **self.options)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, self.gamma)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def drawn(client, step, k, name, shape):
    """Standard normal numbers of a direction: Philox on a digest of what it is for."""
    parts = (0, "direction", 0, client, "train", step, k, name)
    text = "\x1f".join(f"{'int' if isinstance(part, int) else 'str'}:{part}" for part in parts)
    key = int.from_bytes(blake2b(text.encode(), digest_size=16).digest(), "little")
    generator = np.random.Generator(np.random.Philox(key=key))
    return torch.from_numpy(generator.standard_normal(tuple(shape), dtype=np.float32))


def loss_at(state, batch):
    hidden = torch.tanh(batch[0] @ state["net.0.weight"].T + state["net.0.bias"])
    return (hidden @ state["net.3.weight"].T + state["net.3.bias"] - batch[1]).square().mean()


def mezo(start, client, batches, n=1, gamma=1.0, decay=0.0, clip=None, mu=0.0, at_a_time=1):
    """Parameters after a visit by MeZO, in fp64, one batch or several for a step."""
    state = {name: p.double() for name, p in start.items()}
    steps = [batches[i : i + at_a_time] for i in range(0, len(batches), at_a_time)]
    for step, some in enumerate(steps):
        gradient = {name: torch.zeros_like(p) for name, p in state.items()}
        for k in range(n):
            z = {name: drawn(client, step, k, name, p.shape).double() for name, p in state.items()}
            up = {name: p + EPS * z[name] for name, p in state.items()}
            down = {name: p - EPS * z[name] for name, p in state.items()}
            slopes = [(loss_at(up, b) - loss_at(down, b)) / (2 * EPS) for b in some]
            for name in state:
                gradient[name] += sum(slopes) / len(some) * z[name] / n
        for name in state:
            gradient[name] += mu * (state[name] - start[name])
        norm = torch.cat([g.flatten() for g in gradient.values()]).norm()
        if clip is not None and norm > clip:
            gradient = {name: g * clip / norm for name, g in gradient.items()}
        rate = LR * gamma**step
        state = {name: p - rate * (gradient[name] + decay * p) for name, p in state.items()}
    return state


CASES = {
    "MeZO": ({}, {}, {}),
    "several directions": ({"perturbations": 3}, {"n": 3}, {}),
    "schedule": ({}, {"gamma": 0.5}, {"gamma": 0.5}),
    "weight decay": ({"weight_decay": 0.3}, {"decay": 0.3}, {}),
    "clipped": ({}, {"clip": 0.5}, {"settings": {"gradient_clip_val": 0.5}}),
    "FedProx": ({}, {"mu": 5.0}, {"algorithm": FedProx(5.0, "uniform")}),
    "accumulation": ({}, {"at_a_time": 2}, {"settings": {"accumulate_grad_batches": 2}}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_visit_is_mezo_written_out(case):
    own, reference, loop = copy.deepcopy(CASES[case])
    seen = Recorder()
    model = seeded(Scheduled, gamma=loop.pop("gamma", 1.0))
    start = weights(model)
    loop = {"algorithm": FedAvg("uniform"), "clients_per_round": 1, "local_steps": 3, **loop}
    trained, made = federate(1, model=model, callbacks=[seen], forward=ZerothOrder(EPS, **own), **loop)
    ((visit, batches),) = seen.visits[0]
    batches = [[part.double() for part in batch] for batch in batches]
    expected = mezo(start, visit.client_id, batches, **reference)
    for name, value in weights(trained).items():
        # Losses of some units are rounded to fp32 and divided by 2 eps.
        torch.testing.assert_close(value.double(), expected[name], rtol=0, atol=2e-6)
        assert (expected[name] - start[name]).abs().max() > 1e-4
    assert made.visit_records[0]["steps"] == 3


def test_scaffolds_control_is_the_mean_of_the_estimates():
    """c_m+ = c_m - c + (received - trained) / (sum of the rates): in the first round the mean of the estimated gradients."""
    model = module(optimizer="SGD", lr=0.05, dropout=0.0)
    start = weights(model)
    settings = {"forward": ZerothOrder(EPS, lr_scale=0.5)}
    loop = {"clients_per_round": 1, "local_steps": 2, "algorithm": Scaffold("uniform")}
    trained, made = federate(1, model=model, **settings, **loop)
    (client,) = {row["client"] for row in made.visit_records}
    control = made.memory.load(client)["control"]
    for name, value in weights(trained).items():
        assert (control[name] * 0.05 * 0.5 * 2 + value - start[name]).abs().max() < 1e-6
        assert control[name].abs().max() > 1e-3


@pytest.mark.parametrize("forward", [ZerothOrder(), None])
def test_under_adamw_scaffold_warns_of_its_estimates_unless_steps_are_plain_sgd(forward, caplog):
    federate(1, model=module(lr=1e-3), algorithm=Scaffold(), forward=forward)
    assert ("Scaffold is exact under plain SGD" in caplog.text) == (forward is None)


class Recording(Regression):
    """Keeps what each pass sees: random numbers of three streams, and the parameters."""

    def __init__(self, **options):
        super().__init__(**options)
        self.drawn, self.seen = [], []

    def training_step(self, batch, batch_idx):
        self.drawn.append((torch.rand(()).item(), random.random(), float(np.random.rand())))
        self.seen.append(weights(self))
        return super().training_step(batch, batch_idx)


def test_all_passes_of_a_step_see_the_same_random_numbers_and_the_next_step_those_of_backpropagation():
    def draws(**settings):
        model = seeded(Recording, optimizer="SGD")
        federate(2, model=model, **settings)
        return model.drawn

    plain = draws()
    twice = draws(forward=ZerothOrder(perturbations=2))
    assert len(set(plain)) == len(plain) == 12
    assert twice == [numbers for numbers in plain for _ in range(4)]


def test_passes_in_16_bits_see_parameters_of_their_own():
    """Under autocast casts of parameters may be kept: a second pass with those of the first would have the same loss."""
    before = weights(module(optimizer="SGD"))
    settings = {"settings": {"precision": "bf16-mixed"}, "forward": ZerothOrder(0.1)}
    trained, made = federate(1, model=module(optimizer="SGD"), **settings)
    assert made.visit_records[0]["steps"] == 2
    assert all(not torch.equal(p, before[name]) for name, p in weights(trained).items())


def test_parameters_are_given_back_bit_for_bit():
    """Three additions in place, as in the paper, would not: with a rate of 0 the model stays what it was."""
    model = module(optimizer="SGD", lr=0.0)
    before = weights(model)
    trained, _ = federate(2, model=model, forward=ZerothOrder(perturbations=3))
    assert_equal(weights(trained), before)
    walked = {name: p.clone() for name, p in before.items()}
    for size in (1e-3, -2e-3, 1e-3):
        perturb(walked, {name: p.clone() for name, p in walked.items()}, ("a",), size)
    assert any(not torch.equal(walked[name], p) for name, p in before.items())


def test_what_an_algorithm_holds_fixed_is_not_perturbed():
    model = seeded(Recording, optimizer="SGD", dropout=0.0)
    loop = {"clients_per_round": 1, "algorithm": FedRep(["net.3"]), "forward": ZerothOrder()}
    _, made = federate(1, model=model, **loop)
    assert [row["split"] for row in made.visit_records] == ["head", "train"]
    first, second = model.seen[:4], model.seen[4:]
    for name in weights(model):
        changed, held = (first, second) if name.startswith("net.3") else (second, first)
        assert all(torch.equal(seen[name], held[0][name]) for seen in held)
        assert not torch.equal(changed[0][name], changed[1][name])


class Counts(Lora):
    """Logs the number of examples that it has seen."""

    def training_step(self, batch, batch_idx):
        self.log("seen", float(len(batch["x"])), on_step=False, on_epoch=True, reduce_fx="sum")
        self.log_dict({"calls": 1.0}, on_step=False, on_epoch=True, reduce_fx="sum")
        return super().training_step(batch, batch_idx)


def test_a_batch_is_logged_once():
    metrics = Metrics()
    for forward in (None, ZerothOrder()):
        fit(Counts(lr=0.001), Points(), rounds=1, forward=forward, callbacks=[metrics])
    plain, by_forward = ([row["seen"], row["calls"]] for row in metrics.rounds)
    assert by_forward == plain
    assert plain[1] == 12  # four clients, three batches


ALGORITHMS = {
    "FedAvg": {"algorithm": FedAvg()},
    "FedProx": {"algorithm": FedProx(0.5)},
    "Scaffold": {"algorithm": Scaffold()},
    "median": {"aggregation": CoordinateMedian()},
    "wire": {"channel": Wire(up=[Quantize("int8")])},
    "Ditto": {"algorithm": Ditto(0.5, personal_epochs=2)},
    "FedRep": {"algorithm": FedRep(private=["lora_B"])},
    "GlobalThenLocal": {"algorithm": GlobalThenLocal(1)},
    "LocalOnly": {"algorithm": LocalOnly()},
    **{
        kind.__name__: {"algorithm": kind(local=FedProx(0.5))}
        for kind in (FFALoRA, RoLoRA, FedSALoRA, ProductAverage, HetLoRA, FlexLoRA)
    },
}
FORWARD = {"forward": ZerothOrder(EPS, perturbations=2)}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_clients_side_by_side_train_what_each_trains_alone(name):
    # In fp64, as a difference of losses is divided by 2 eps.
    made, data = partial(Lora, dtype=torch.float64, lr=0.02), partial(Points, dtype=torch.float64)
    more = ALGORITHMS[name] | FORWARD | {"settings": {"gradient_clip_val": 1.0}}
    (alone, *_), (_, _, groups, _) = both_ways(made, data, **more)
    assert groups[0][0] == ["a", "b", "c"]
    initial = {name: p for name, p in made().named_parameters() if p.requires_grad}
    assert furthest(alone, initial) > 1e-4 or name == "LocalOnly"


class Manual(Regression):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class LooksAtGradients(Regression):
    def on_before_optimizer_step(self, optimizer):
        """Log norms."""


class ClipsItself(Regression):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        """Clip."""


class Fine(LooksAtGradients):
    takes_forward = True


class Hooked(Regression):
    def __init__(self):
        super().__init__()
        self.net[0].weight.register_hook(lambda gradient: 2 * gradient)


class Maximizing(Regression):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, maximize=True)


BY_VALUE = {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}
HALF = {"plugins": [MixedPrecision("16-mixed", device="cpu", scaler=torch.amp.GradScaler("cpu"))]}


class Watching(L.Callback):
    def on_after_backward(self, trainer, pl_module):
        """Log norms."""


@pytest.mark.parametrize(
    ("model", "settings", "callbacks", "message"),
    [
        (Manual, {}, [], "Manual has automatic_optimization=False, so its training_step takes gradients"),
        (Regression, BY_VALUE, [], "trainer.gradient_clip_algorithm=value clips the gradients"),
        (Regression, HALF, [], "trainer.precision='16-mixed' scales a loss"),
        (LooksAtGradients, {}, [], "LooksAtGradients.on_before_optimizer_step would see no gradients"),
        (ClipsItself, {}, [], "ClipsItself.configure_gradient_clipping would see no gradients"),
        (Regression, {}, [Watching()], "Watching.on_after_backward would see no gradients"),
        (Hooked, {}, [], "a hook on the gradient of net.0.weight would never be called"),
        (Maximizing, {}, [], "SGD has maximize=True, and forward-only visits go down"),
        (lambda: Regression("LBFGS"), {}, [], "LBFGS is not known to leave parameters without gradients"),
    ],
)
def test_what_needs_gradients_is_refused_before_anything_is_trained(model, settings, callbacks, message):
    made = model()
    before = weights(made)
    with pytest.raises(ValueError, match=f"(?s)forward: .*{message}.*or leave forward out"):
        federate(1, model=made, callbacks=callbacks, settings=settings, forward=ZerothOrder())
    assert_equal(weights(made), before)


def test_a_class_that_says_so_is_taken():
    _, loop = federate(1, model=Fine(optimizer="SGD"), forward=ZerothOrder())
    assert loop.rounds_done == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"forward": "sideways"}, "forward='sideways' must be a ZerothOrder or None"),
        ({"forward": ZerothOrder(only_where_needed=True)}, "=True asks the memory of each client's device"),
        (
            {"forward": ZerothOrder(forward_weight=0.5), "aggregation": CoordinateMedian()},
            "forward_weight=0.5 is a factor on weights, and CoordinateMedian has none",
        ),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        FederatedLoop(**settings)


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("eps", 0.0, "must be above 0"),
        ("eps", float("nan"), "must be above 0"),
        ("lr_scale", -1.0, "must be above 0"),
        ("perturbations", 0, "must be at least 1"),
        ("weight_decay", -0.1, "must be at least 0"),
        ("forward_weight", 1.5, r"must be in \[0, 1\]"),
        ("forward_weight", 0.0, "must be above 0, or no client counts"),
    ],
)
def test_settings_out_of_their_range_are_refused(setting, value, message):
    with pytest.raises(ValueError, match=f"{setting}={value} {message}"):
        ZerothOrder(**{setting: value})
