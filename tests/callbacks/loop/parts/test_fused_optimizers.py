import copy
from functools import partial

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from plain_lightning import Numbers, Regression, ten_clients, trainer
from refusals import refusal
from torch import nn
from torch.optim.lr_scheduler import StepLR

from fedlight import FedAvg, FederatedLoop, FederatedWrapper, FedProx
from fedlight.callbacks.loop.parts.optimizers import use_fused_kernels

SETTINGS = {
    "AdamW": {"lr": 0.02, "weight_decay": 0.1},
    "Adam": {"lr": 0.02, "weight_decay": 0.01, "betas": (0.8, 0.95)},
    "amsgrad": {"lr": 0.02, "amsgrad": True},
    "maximize": {"lr": 0.02, "maximize": True, "eps": 1e-3},
    "tensor": {"lr": torch.tensor(0.02, dtype=torch.float64)},
}


def make(name, parameters, **more):
    kind = torch.optim.Adam if name == "Adam" else torch.optim.AdamW
    return kind(parameters, **(copy.deepcopy(SETTINGS[name]) | more))


def groups(dtype):
    draw = torch.Generator().manual_seed(0)
    shapes = [(5, 7), (33,), (2, 3, 4), (1,)]
    weights = [nn.Parameter(torch.randn(shape, generator=draw, dtype=dtype)) for shape in shapes]
    return weights, [{"params": weights[:2]}, {"params": weights[2:], "eps": 1e-6, "weight_decay": 0.3}]


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_step_differs_in_the_last_place_alone(name, dtype):
    """Each of ten steps starts both kernels at the same numbers; a schedule changes the rate of two groups."""
    (fused, own), (plain, theirs) = groups(dtype), groups(dtype)
    one, other = make(name, own), make(name, theirs)
    use_fused_kernels([one])
    assert [group["fused"] for group in one.param_groups] == [True, True]
    rates = [StepLR(optimizer, 3, 0.5) for optimizer in (one, other)]
    draw, precision = torch.Generator().manual_seed(1), torch.finfo(dtype).eps
    for _ in range(10):
        before = [weight.detach().clone() for weight in plain]
        for a, b in zip(fused, plain, strict=True):
            a.grad = torch.randn(a.shape, generator=draw, dtype=dtype)
            b.grad = a.grad.clone()
        one.step()
        other.step()
        for a, b, start in zip(fused, plain, before, strict=True):
            assert not torch.equal(b, start)
            # Two units in the last place of the step, and one of the weight, to which it is added.
            allowed = 2 * precision * (b - start).abs() + precision * b.abs().clamp(min=start.abs())
            assert ((a - b).abs() <= allowed).all()
            with torch.no_grad():
                a.copy_(b)
            for key, value in other.state[b].items():
                torch.testing.assert_close(one.state[a][key], value, rtol=8 * precision, atol=1e-30)
                one.state[a][key].copy_(value)
        for rate in rates:
            rate.step()


def on_gradients(change, **settings):
    draw = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.randn(6, 6, generator=draw))
    optimizer = make("AdamW", [weight], **settings)
    use_fused_kernels([optimizer])
    for _ in range(3):
        weight.grad = change(torch.randn(6, 6, generator=draw))
        optimizer.step()
    return weight.detach()


@pytest.mark.parametrize(
    "change",
    [torch.t, lambda g: g[:1].expand(6, 6), lambda g: torch.cat([g, g], 1)[:, ::2]],
    ids=["transposed", "expanded", "every second"],
)
@pytest.mark.parametrize("fused", [None, True], ids=["ours", "theirs"])
def test_gradients_in_another_memory_order_belong_to_their_numbers(change, fused):
    """Torch's kernel for the CPU reads memory in its order; a step of Adam is 0.02 large."""
    found, expected = on_gradients(change, fused=fused), on_gradients(change, fused=False)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("by_name", [True, False])
def test_a_closure_is_called_once_before_gradients_are_looked_at(by_name):
    """Also of a subclass whose step takes more."""

    class Scaled(torch.optim.AdamW):
        def step(self, closure=None, factor=1.0):
            self.factor = factor
            return super().step(closure)

    draw = torch.Generator().manual_seed(0)
    weights = [nn.Parameter(torch.ones(6, 6)) for _ in range(2)]
    optimizers = [Scaled(weights[:1], fused=True), torch.optim.AdamW(weights[1:], fused=False)]
    use_fused_kernels(optimizers)
    for _ in range(3):
        gradient, losses = torch.randn(6, 6, generator=draw), []

        def closure(gradient=gradient, losses=losses):
            weights[0].grad = gradient.t().contiguous().t()
            losses.append(1.5)
            return losses[-1]

        weights[1].grad = gradient.clone()
        step = optimizers[0].step
        loss = step(closure=closure, factor=2.0) if by_name else step(closure, 2.0)
        optimizers[1].step()
        assert (loss, losses, optimizers[0].factor) == (1.5, [1.5], 2.0)
    torch.testing.assert_close(*weights, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "build",
    [
        partial(make, "AdamW"),
        partial(make, "amsgrad"),
        partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
        partial(torch.optim.Adagrad, lr=0.1),
    ],
    ids=["AdamW", "amsgrad", "SGD", "Nesterov", "Adagrad"],
)
def test_states_in_another_memory_order_belong_to_their_numbers(build):
    """A parameter's data change their order in memory between two steps, as by ``to(memory_format=...)``."""

    def run(fused):
        draw = torch.Generator().manual_seed(0)
        weight = nn.Parameter(torch.randn(6, 6, generator=draw))
        optimizer = build([weight], fused=fused)
        use_fused_kernels([optimizer])
        for step in range(5):
            if step in (2, 4):
                weight.data = weight.data.t().contiguous().t() if step == 2 else weight.data.contiguous()
                assert weight.is_contiguous() == (step == 4)
            weight.grad = torch.randn(6, 6, generator=draw)
            optimizer.step()
        return weight.detach()

    torch.testing.assert_close(run(True), run(False), rtol=0, atol=1e-6)


def test_parameters_with_gaps_are_left_to_the_loop_or_refused():
    weight = nn.Parameter(torch.randn(6, 6)[:, :3])
    ours = make("AdamW", [weight])
    use_fused_kernels([ours])
    assert ours.param_groups[0]["fused"] is None
    theirs = make("AdamW", [weight], fused=True)
    use_fused_kernels([theirs])
    weight.grad = torch.ones(6, 3)
    with refusal(r"shape \(6, 3\) and strides \(6, 1\).* make it contiguous, or leave"):
        theirs.step()


def test_parameters_with_gaps_that_join_later_name_a_remedy_that_helps():
    def step(**options):
        optimizer = make("AdamW", [nn.Parameter(torch.ones(2))])
        use_fused_kernels([optimizer])
        late = nn.Parameter(torch.ones(6, 6)[:, :3])
        optimizer.add_param_group({"params": [late], **options})
        late.grad = torch.ones(6, 3)
        optimizer.step()
        return late.detach()

    with refusal(r"strides \(6, 1\).* or leave the kernel out with fused=False"):
        step()
    expected = 1 - 0.02 * 0.1 - 0.02  # weight decay of AdamW, and a first step of the rate
    torch.testing.assert_close(step(fused=False), torch.full((6, 3), expected), rtol=0, atol=1e-6)


class Own(torch.optim.Adam):
    pass


@pytest.mark.parametrize(
    "build",
    [
        lambda p: torch.optim.AdamW(p, fused=False),
        lambda p: torch.optim.AdamW(p, foreach=True),
        lambda p: torch.optim.AdamW(p, foreach=False),
        lambda p: torch.optim.AdamW([{"params": p[:1]}, {"params": p[1:], "fused": False}]),
        lambda p: torch.optim.AdamW(p, capturable=True),
        lambda p: torch.optim.AdamW(p, differentiable=True),
        lambda p: torch.optim.SGD(p, lr=0.1),  # and Adagrad: they take sparse gradients as well
        lambda p: torch.optim.Adagrad(p),
        lambda p: torch.optim.RMSprop(p),
        lambda p: Own(p),
        lambda p: torch.optim.AdamW([*p, nn.Parameter(torch.ones(1, device="meta"))]),
    ],
)
def test_what_is_decided_or_has_no_kernel_stays(build):
    optimizer = build([nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))])
    before = copy.deepcopy([{**group, "params": 0} for group in optimizer.param_groups])
    use_fused_kernels([optimizer])
    assert [{**group, "params": 0} for group in optimizer.param_groups] == before


def fit(rounds=2, algorithm=None, folder=None, ckpt_path=None, callbacks=(), run=None, **settings):
    """A federated run of a project's module; returns its optimizer and weights."""

    class Model(Regression):
        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.05, **settings)

    L.seed_everything(0, verbose=False)
    model = Model(dropout=0.0)
    loop = FederatedLoop(algorithm, clients_per_round=4, local_steps=3)
    more = run or {}
    if folder is not None:
        more = {"default_root_dir": folder, "enable_checkpointing": True}
    saves = [] if folder is None else [ModelCheckpoint(folder, "{epoch}", save_top_k=-1)]
    lightning = trainer(rounds, [loop, *callbacks, *saves], **more)
    lightning.fit(model, FederatedWrapper(Numbers(), ten_clients), ckpt_path=ckpt_path, weights_only=True)
    return lightning.optimizers[0], model.state_dict()


def test_groups_that_join_later_get_the_kernel_as_well():
    optimizer, _ = fit(rounds=1)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    assert [group["fused"] for group in optimizer.param_groups] == [True, True]


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_a_resumed_run_goes_on_as_its_file_says(tmp_path):
    """A file whose optimizers have no kernel chosen."""
    _, expected = fit(3, folder=tmp_path / "whole", fused=False)
    fit(1, folder=tmp_path / "first", fused=False)
    [file] = (tmp_path / "first").glob("*.ckpt")
    checkpoint = torch.load(file, weights_only=True)
    for group in checkpoint["optimizer_states"][0]["param_groups"]:
        assert group["fused"] is False
        group["fused"] = None
    torch.save(checkpoint, file)
    optimizer, found = fit(3, folder=tmp_path / "first", ckpt_path=file)
    assert optimizer.param_groups[0]["fused"] is None
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


@pytest.mark.parametrize("algorithm", [FedAvg, lambda: FedProx(0.5)], ids=["FedAvg", "FedProx"])
def test_the_loss_scale_divides_gradients_before_the_kernel_sees_them(algorithm):
    """A scale of 2**18 overflows in the first steps, which are left out; an algorithm adds to true gradients."""

    def run(**settings):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18)
        half = MixedPrecision("16-mixed", device="cpu", scaler=scaler)
        return *fit(algorithm=algorithm(), run={"plugins": [half]}, **settings), half

    (optimizer, found, scale), (_, expected, other) = run(), run(fused=False)
    assert optimizer.param_groups[0]["fused"] is True
    assert scale.state_dict() == other.state_dict()
    assert scale.state_dict()["scale"] < 2.0**18
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


class Transposing(L.Callback):
    """Gradients in another memory order, as products with a transposed matrix have them."""

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        for weight in pl_module.parameters():
            weight.grad = weight.grad.t().contiguous().t()


def test_a_later_callbacks_gradients_in_another_memory_order_belong_to_their_numbers():
    (_, found), (_, expected) = fit(callbacks=[Transposing()]), fit()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_clipped_steps_are_the_same(precision):
    settings = {"precision": precision, "gradient_clip_val": 0.01}
    (optimizer, found), (plain, expected) = fit(run=settings), fit(run=settings, fused=False)
    assert (optimizer.param_groups[0]["fused"], plain.param_groups[0]["fused"]) == (True, False)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
