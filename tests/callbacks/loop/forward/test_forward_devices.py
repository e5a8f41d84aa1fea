import pytest
import torch
from fleets import make_fleet, rounds_of
from lightning.pytorch.callbacks import LambdaCallback
from plain_lightning import Regression, federate, module, weights
from stacked import fit, tiny_sft

from fedlight import FedProx
from fedlight.callbacks.loop.fitted_step import FittedStep
from fedlight.federation.forward import ZerothOrder

GIB = 2**30
SETTINGS = {"forward": ZerothOrder(1e-2, perturbations=2, only_where_needed=True)}


@pytest.fixture(scope="module")
def peaks(tmp_path_factory):
    """Bytes of the smallest visit by backpropagation, and by forward passes alone."""
    folder = tmp_path_factory.mktemp("peaks")

    def smallest(train):
        fleet = make_fleet(folder / train, tiny={"memory_gib": 1 / GIB})
        more = {} if train == "backprop" else {"forward": ZerothOrder(only_where_needed=True)}
        rows, *_ = rounds_of(1, model=module(), fleet=fleet, clients_per_round=10, **more)
        assert {row["reason"] for row in rows} == {"out_of_memory"}
        return max(row["peak_bytes"] for row in rows)

    return smallest("backprop"), smallest("auto")


def fleet_of_three(folder, peaks):
    """Devices for backpropagation, for forward passes alone, and with a byte less than these need."""
    back, forward = peaks
    large, small = {"memory_gib": back / GIB}, {"memory_gib": forward / GIB}
    return make_fleet(folder, large=large, small=small, none={"memory_gib": (forward - 1) / GIB})


def test_each_device_trains_as_it_can(tmp_path, peaks):
    assert peaks[1] < 0.8 * peaks[0]
    fleet = fleet_of_three(tmp_path, peaks)
    model = module()
    numel = sum(p.numel() for p in model.parameters())
    rows, _, _, _ = rounds_of(2, model=model, fleet=fleet, clients_per_round=10, **SETTINGS)
    how = {(row["device"], row["train"], row["reason"]) for row in rows}
    assert how == {("large", "backprop", ""), ("small", "forward", ""), ("none", "forward", "out_of_memory")}
    for row in rows:
        assert row["peak_bytes"] <= row["budget_bytes"] or row["device"] == "none"
        resting = tuple(row[f"{part}_bytes"] for part in ("base", "adapter", "gradient", "moment"))
        alone = (0, 8 * numel, 0, 0)
        assert resting == ((0, 4 * numel, 4 * numel, 8 * numel) if row["device"] == "large" else alone)
        if row["device"] == "small":
            own = row["examples"]
            seen = 2 * own if own <= 4 else min(own, 8)
            # Two forward passes for each of two directions; 4 -> 8 and 8 -> 1.
            assert row["flops"] == 2 * 2 * 2 * seen * (4 * 8 + 8)
            assert row["steps"] == 2


def test_parts_of_a_batch_give_its_loss_without_gradients():
    model, batch = module(dropout=0.0), [torch.randn(5, 4), torch.randn(5, 1)]
    whole = model.training_step(batch, 0)
    fitted = FittedStep(model)
    fitted.enter(2, checkpointing=False)
    with torch.no_grad():
        parts = model.training_step(batch, 0)
    assert not parts.requires_grad
    torch.testing.assert_close(parts, whole.detach())
    assert model.training_step(batch, 0).requires_grad
    fitted.leave()


class TakesBatchAlone(Regression):
    def training_step(self, batch):
        return super().training_step(batch, 0)


def test_a_step_that_takes_a_batch_alone_gets_no_number_in_parts_either():
    model, seen = TakesBatchAlone(optimizer="SGD", dropout=0.0), []
    fitted = FittedStep(model)
    fits = LambdaCallback(
        on_fit_start=lambda *_: fitted.enter(2, checkpointing=False),
        on_train_batch_end=lambda trainer, module, outputs, *_: seen.append(outputs["loss"].item()),
    )
    federate(1, model=model, callbacks=[fits], forward=ZerothOrder())
    fitted.leave()
    assert len(seen) == 6


@pytest.mark.parametrize("bits", [8, 4])
def test_forward_passes_on_a_quantized_base(bits, tiny_model, tmp_path):
    """At hardly any rate the mean loss of the passes is that of backpropagation, up to the square of eps."""

    def losses(forward):
        fleet = make_fleet(tmp_path / str(forward is None), phone={"weight_bits": bits})
        loop = {"clients_per_round": 2, "local_steps": 2, "rounds": 1, "fleet": fleet, "forward": forward}
        _, rows, *_ = fit(*tiny_sft(tiny_model, 2, lr=1e-12), **loop)
        assert {row["weight_bits"] for row in rows} == {bits}
        return [row["loss"] for row in rows]

    found, expected = losses(ZerothOrder()), losses(None)
    assert found == pytest.approx(expected, abs=1e-2)
    assert found != expected


def test_a_mixed_round_weighs_both_kinds(tmp_path, peaks):
    """With a weight of 0 a forward-only visit counts as a client, and moves nothing."""

    def run(factor):
        forward = ZerothOrder(1e-2, forward_weight=factor, only_where_needed=True)
        fleet = fleet_of_three(tmp_path / str(factor), peaks)
        loop = {"fleet": fleet, "forward": forward, "clients_per_round": 10}
        rows, model, _, _ = rounds_of(1, model=module(), **loop)
        return rows, weights(model)

    before = weights(module())
    (rows, none), (_, half), (_, whole) = run(0.0), run(0.5), run(1.0)
    assert {row["train"] for row in rows if not row["reason"]} == {"backprop", "forward"}
    for name in before:
        middle = (none[name].double() + whole[name].double()) / 2
        assert (half[name].double() - middle).abs().max() < 1e-6
        assert not torch.equal(none[name], before[name])
        assert not torch.equal(none[name], whole[name])


@pytest.mark.slow
def test_groups_hold_one_kind_of_training(tiny_model, tmp_path):
    """Language models with seeded dropout: alone and side by side the same, also in fleets with both kinds."""

    def run(at_once, folder, **devices):
        loop = {"clients_per_round": 6, "local_steps": 2, "rounds": 1, "algorithm": FedProx(0.1)}
        fleet = make_fleet(tmp_path / folder, **devices)
        return fit(*tiny_sft(tiny_model, 2, lr=1e-3), at_once, fleet=fleet, **loop, **SETTINGS)

    large = {"memory_gib": 1}
    _, rows, *_ = run(1, "all", large=large)
    parts = ("base_bytes", "adapter_bytes", "gradient_bytes", "moment_bytes")
    resting = max(sum(row[part] for part in parts) for row in rows)
    activations = min(row["activation_bytes"] for row in rows)
    small = {"memory_gib": (resting + activations // 8) / GIB}
    alone, rows, *_ = run(1, "alone", large=large, small=small)
    beside, others, groups, _ = run(3, "beside", large=large, small=small)
    how = {row["client"]: row["train"] for row in others}
    assert {*how.values()} == {"backprop", "forward"}
    assert {row["client"]: row["train"] for row in rows} == how
    assert all(len({how[name] for name in group}) == 1 for group in groups[0])
    assert any(len(group) > 1 for group in groups[0])
    for name, value in beside.items():
        torch.testing.assert_close(value, alone[name], rtol=0, atol=1e-4)
