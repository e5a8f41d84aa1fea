from collections import namedtuple
from itertools import accumulate

import lightning as L
import pytest
import torch
from plain_lightning import trainer as make_trainer
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint
from torchmetrics import MeanMetric

from fedlight.callbacks.loop.fitted_step import (
    FittedStep,
    count_examples,
    join_results,
    reduce_parts,
    take_examples,
)

Pair = namedtuple("Pair", "x y")


class Net(L.LightningModule):
    """Squared error of a small network; one layer is frozen and one never used."""

    def __init__(self, width=8, dropout=0.0, returns="tensor", wide=0):
        super().__init__()
        self.first, self.second = nn.Linear(4, width), nn.Linear(width, 1)
        self.frozen, self.unused = nn.Linear(4, 4).requires_grad_(False), nn.Linear(2, 2)
        self.dropout = nn.Dropout(dropout)
        self.returns, self.wide = returns, wide
        self.checkpointing, self.seen, self.mean = False, [], MeanMetric()

    def checkpoint_gradients(self, enabled):
        self.checkpointing = enabled

    def body(self, x):
        return self.dropout(torch.tanh(self.first(self.frozen(x))))

    def training_step(self, batch, batch_idx):
        x, y = batch["pair"]
        self.seen.append(len(x))
        hidden = checkpoint(self.body, x, use_reentrant=False) if self.checkpointing else self.body(x)
        errors = (self.second(hidden)[:, 0] - y).square()
        loss = errors.mean() * batch["scale"]
        self.mean.update(errors.detach())
        self.log("error", errors.mean(), on_step=True, on_epoch=True, batch_size=len(x))
        self.log("worst", errors.max(), reduce_fx="max")
        self.log("metric", self.mean, on_step=False, on_epoch=True)
        if self.returns == "none":
            return None
        return loss if self.returns == "tensor" else {"loss": loss, "errors": errors, "note": batch["note"]}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def make(**settings):
    torch.manual_seed(0)
    return Net(**settings)


def make_batch(n=7, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(n, 4, generator=generator), torch.randn(n, generator=generator)
    return {"pair": Pair(x, y), "scale": 0.5, "note": [f"example {i}" for i in range(n)]}


def gradients(module, batch, micro_batch=None, checkpointing=False):
    fitted = FittedStep(module)
    fitted.enter(micro_batch, checkpointing)
    module.zero_grad()
    torch.manual_seed(5)  # of dropout
    with pytest.warns(UserWarning, match="self.trainer"):
        result = module.training_step(batch, 0)
    loss = result["loss"] if isinstance(result, dict) else result
    loss.backward()
    fitted.leave()
    assert "training_step" not in vars(module)
    assert "log" not in vars(module)
    assert not vars(module).get("checkpointing")
    return result, {name: weight.grad for name, weight in module.named_parameters()}


def close(one, other):
    assert one.keys() == other.keys()
    for name in one:
        if one[name] is None:
            assert other[name] is None, name
        else:
            torch.testing.assert_close(one[name], other[name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("micro_batch", [1, 2, 3, 6])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_are_those_of_the_whole_batch(micro_batch, checkpointing):
    """Seven examples leave a last micro-batch of another size in each case but one."""
    module = make()
    whole, expected = gradients(module, make_batch())
    module.seen.clear()
    loss, got = gradients(module, make_batch(), micro_batch, checkpointing)
    assert module.seen == [micro_batch] * (7 // micro_batch) + [7 % micro_batch] * (7 % micro_batch > 0)
    assert loss.item() == pytest.approx(whole.item(), rel=1e-6)
    assert got["unused.weight"] is None
    assert got["frozen.weight"] is None
    close(got, expected)
    assert got["first.weight"].abs().max() > 0.01


def test_by_hand():
    """Loss (w x - y)^2 / 2: gradients of examples (1, 0), (2, 0), (3, 3) at w = 1 are 1, 4 and 0; their mean is 5/3."""

    class Line(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(()))

        def training_step(self, batch, batch_idx):
            return ((self.w * batch[0] - batch[1]).square() / 2).mean()

    module = Line()
    FittedStep(module).enter(2, checkpointing=False)
    loss = module.training_step([torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.0, 0.0, 3.0])], 0)
    assert loss.item() == pytest.approx(5 / 6)
    (loss * 3).backward()  # what comes after the step, such as accumulation, scales its gradient
    assert module.w.grad.item() == pytest.approx(5)


def test_a_batch_that_fits_is_run_as_it_is():
    module = make()
    whole, expected = gradients(module, make_batch())
    loss, got = gradients(module, make_batch(), micro_batch=7)
    assert module.seen == [7, 7]
    assert loss.item() == whole.item()
    assert all(got[name] is None or torch.equal(got[name], expected[name]) for name in expected)


def test_what_was_put_on_the_object_comes_back():
    module, logged = make(), []
    original = module.training_step

    def step(batch, batch_idx):
        return original(batch, batch_idx)

    def log(name, value, **options):
        logged.append((name, value, options.get("batch_size")))

    module.training_step, module.log = step, log
    fitted = FittedStep(module)
    for _ in range(2):  # the second time without leaving before
        fitted.enter(2, checkpointing=True)
    assert module.checkpointing
    loss = module.training_step(make_batch(5), 0)
    assert module.seen == [2, 2, 1]
    assert [(name, size) for name, _, size in logged] == [("error", 5), ("worst", 5), ("metric", None)]
    assert float(logged[0][1]) == pytest.approx(loss.item() / 0.5)
    assert module.log is log
    for _ in range(2):
        fitted.leave()
        assert module.training_step is step
        assert not module.checkpointing
    module.training_step(make_batch(5), 0).backward()
    assert module.seen == [2, 2, 1, 5]
    assert len(logged) == 6


def test_a_log_of_its_own_comes_back_after_an_error():
    module = make()
    module.log = log = lambda *args, **options: None
    FittedStep(module).enter(1, checkpointing=False)
    with pytest.raises(RuntimeError, match="shapes"):
        module.training_step({"pair": Pair(torch.ones(2, 5), torch.ones(2)), "scale": 1.0}, 0)
    assert module.log is log


def test_checkpointing_draws_the_same_dropout():
    module = make(dropout=0.5)
    whole, expected = gradients(module, make_batch())
    loss, got = gradients(module, make_batch(), checkpointing=True)
    assert loss.item() == whole.item()
    close(got, expected)
    _, other = gradients(make(), make_batch())
    assert not torch.allclose(other["first.weight"], expected["first.weight"])  # dropout did something


def test_mappings_come_back_whole():
    module = make(returns="mapping")
    result, expected = gradients(module, make_batch())
    parts, got = gradients(module, make_batch(), micro_batch=3)
    close(got, expected)
    torch.testing.assert_close(parts["errors"], result["errors"].detach())
    assert not parts["errors"].requires_grad  # or it would hold the activations of each micro-batch
    assert parts["loss"].item() == pytest.approx(result["loss"].item(), rel=1e-6)
    assert parts["note"] == ["example 6"]  # of the last micro-batch


def peak_bytes(module, batch, micro_batch, checkpointing):
    """What the allocator of torch held at most at once in forward and backward, beyond what was there before."""
    fitted = FittedStep(module)
    fitted.enter(micro_batch, checkpointing)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        module.training_step(batch, 0).backward()
    fitted.leave()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(accumulate(event.nbytes() for event in events))


class Deep(L.LightningModule):
    """Sixteen layers of activations as large as the batch."""

    def __init__(self):
        super().__init__()
        self.scales, self.checkpointing = nn.Parameter(torch.ones(16)), False

    def checkpoint_gradients(self, enabled):
        self.checkpointing = enabled

    def training_step(self, batch, batch_idx):
        values = batch
        for scale in self.scales:

            def layer(inputs, scale=scale):
                return torch.sin(torch.sin(inputs * scale))

            values = checkpoint(layer, values, use_reentrant=False) if self.checkpointing else layer(values)
        return values.square().mean()


def test_memory_is_smaller():
    module, batch = Deep(), torch.ones(8, 5_000)
    whole = peak_bytes(module, batch, None, False)
    assert whole > 40 * 8 * 5_000 * 4  # three tensors a layer
    assert peak_bytes(module, batch, 2, False) < 1.1 * whole / 4
    assert peak_bytes(module, batch, 1, False) < 1.1 * whole / 8
    assert peak_bytes(module, batch, None, True) < 0.5 * whole
    assert peak_bytes(module, batch, 2, True) < 0.5 * whole / 4


class Fits(L.Callback):
    """Makes each batch fit in turn: whole, in twos, in ones with checkpointing."""

    def __init__(self, on):
        self.on, self.norms, self.logged = on, [], []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.fitted = FittedStep(pl_module)
        if self.on:
            self.fitted.enter(*[(None, False), (2, False), (1, True)][batch_idx % 3])

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.norms.append(pl_module.first.weight.grad.norm().item())

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.fitted.leave()
        metrics = trainer.callback_metrics
        self.logged.append([outputs["loss"].item(), metrics["error_step"].item(), metrics["worst"].item()])


def fit(on, **options):
    module, callback = make(), Fits(on)
    trainer = make_trainer(2, [callback], **options)
    batches = [make_batch(n, seed=n) for n in (7, 5, 6, 4)]
    trainer.fit(module, torch.utils.data.DataLoader(batches, batch_size=None))
    return module, callback, {name: value.item() for name, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize("options", [{}, {"gradient_clip_val": 0.05}, {"accumulate_grad_batches": 2}])
def test_in_a_trainer_nothing_but_memory_changes(options):
    plain, seen, metrics = fit(False, **options)
    fitted, got, same_metrics = fit(True, **options)
    assert fitted.seen == 2 * [7, 2, 2, 1, *[1] * 6, 4]
    assert got.norms == pytest.approx(seen.norms, rel=1e-4)
    if "gradient_clip_val" in options:
        assert max(got.norms) > 0.05  # the hook comes before clipping
    torch.testing.assert_close(got.logged, seen.logged, rtol=1e-5, atol=1e-7)
    assert same_metrics == pytest.approx(metrics, rel=1e-5)
    assert {"error_epoch", "metric", "worst"} <= metrics.keys()
    for one, other in zip(plain.parameters(), fitted.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def test_a_step_that_passes_over_a_batch_does_so():
    module = make(returns="none")
    FittedStep(module).enter(2, checkpointing=False)
    with pytest.warns(UserWarning, match="self.trainer"):
        assert module.training_step(make_batch(), 0) is None


def test_refusals():
    module = make()
    module._trainer = type("Trainer", (), {"precision": "16-mixed"})()
    with pytest.raises(ValueError, match="precision='16-mixed' scales the loss"):
        FittedStep(module).enter(2, checkpointing=False)
    module.automatic_optimization = False
    with pytest.raises(ValueError, match="micro_batch=2 cannot cut the steps of Net, whose automatic_opt"):
        FittedStep(module).enter(2, checkpointing=False)


def test_batches_are_cut_in_any_nesting():
    from transformers import BatchEncoding

    inner = {"x": torch.arange(6).view(3, 2), "texts": ["a", "b", "c"]}
    batch = BatchEncoding(
        {"inner": [inner, (torch.arange(3), 7)], "pair": Pair(torch.arange(3), ("a", "b")), "none": None}
    )
    part = take_examples(batch, 1, 3)
    assert type(part) is BatchEncoding
    assert part.inner[0]["x"].tolist() == [[2, 3], [4, 5]]
    assert part.inner[0]["texts"] == ["b", "c"]
    assert part.inner[1][0].tolist() == [1, 2]
    assert part.inner[1][1] == 7
    assert part["pair"].x.tolist() == [1, 2]
    assert part["pair"].y == ("a", "b")  # not one per example
    assert part["none"] is None
    assert take_examples((torch.arange(2), Pair("a", "b")), 0, 1)[1] == Pair(
        "a", "b"
    )  # fields are no examples
    assert inner["texts"] == ["a", "b", "c"]
    assert batch.inner[0]["x"].shape == (3, 2)


@pytest.mark.parametrize(
    ("how", "expected"),
    [("mean", 2.25), (torch.mean, 2.25), ("sum", 7), (sum, 7), ("min", 2), (torch.max, 5), (torch.prod, 10)],
)
def test_parts_of_what_is_logged(how, expected):
    """2 over eleven examples and 5 over one: their mean is 27 / 12."""
    assert float(reduce_parts([2, torch.tensor(5.0)], [11, 1], how)) == expected


def test_what_cannot_be_cut():
    with pytest.raises(ValueError, match=r"type dict cannot be cut .* have 2 and 3 rows: give each"):
        count_examples({"x": torch.zeros(2), "y": torch.zeros(3)})
    with pytest.raises(ValueError, match=r"type str cannot be cut .* have no rows"):
        count_examples("text")


def test_results_are_joined():
    """Single numbers count by their share of the examples; rows follow each other; of the rest the last is kept."""
    parts = [{"loss": torch.tensor(1.0), "rows": torch.tensor([1, 2]), "note": "a"}]
    parts += [{"loss": torch.tensor(4.0), "rows": torch.tensor([3]), "note": "b"}]
    whole = join_results(parts, [2 / 3, 1 / 3])
    assert whole["loss"].item() == pytest.approx(2.0)
    assert whole["rows"].tolist() == [1, 2, 3]
    assert whole["note"] == "b"
    assert join_results([torch.tensor(1.0), torch.tensor(2.0)], [0.25, 0.75]).item() == 1.75
