import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fedlight.stacking import DropoutMasks, SeededDropout
from fedlight.stacking.dropout import seed_dropout


def mask(masks, number=0, shape=(64, 32, 48), rate=0.3, seed=1):
    with masks.seeded(seed):
        return masks.drop(torch.ones(shape), rate, number)


@pytest.mark.parametrize("rate", [0.05, 0.3, 0.5, 0.9])
def test_the_rate_and_the_scale(rate):
    """98,304 draws: the share of zeros is within four standard deviations."""
    dropped = mask(DropoutMasks(), rate=rate) == 0
    assert abs(float(dropped.float().mean()) - rate) < 4 * (rate * (1 - rate) / dropped.numel()) ** 0.5
    kept = mask(DropoutMasks(), rate=rate).unique()[1:]
    assert len(kept) == 1
    assert float(kept) == pytest.approx(1 / (1 - rate), rel=2e-4)  # the rate is a multiple of 1 / 65536


def test_a_rate_of_one_drops_everything_and_of_zero_nothing():
    assert not mask(DropoutMasks(), rate=1).any()
    assert (mask(DropoutMasks(), rate=0) == 1).all()


def agreement(one, other):
    """Return the correlation of two masks, 0 for independent ones with a standard error of 1 / 313."""
    return float(torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1])


def test_layers_clients_steps_rows_tokens_and_features_are_independent():
    masks, limit = DropoutMasks(), 4 / 98304**0.5
    one = mask(masks)
    assert abs(agreement(one, mask(masks, number=1))) < limit
    assert abs(agreement(one, mask(masks, seed=2))) < limit
    assert abs(agreement(mask(masks, number=1, seed=1), mask(masks, number=0, seed=2))) < limit
    for dim in range(3):
        for shift in (1, 2, 3, 4, 8):
            assert abs(agreement(one, one.roll(shift, dim))) < 1.1 * limit
    rows = (one == 0).float().mean(dim=(1, 2))
    assert float((rows - 0.3).abs().max()) < 5 * (0.21 / (32 * 48)) ** 0.5


def splitmix(seed, index):
    """Return output ``index`` of SplitMix64 as in the paper: 0 is of the seed itself, without a step."""
    z = (seed + index * 0x9E3779B97F4A7C15) % 2**64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
    return z ^ (z >> 31)


def test_masks_are_those_of_splitmix64():
    """Written out with Python's numbers, entry by entry; another mask would change every run with dropout."""
    seed, number, rate = 2**63 + 7, 3, 0.3
    found = mask(DropoutMasks(), number=number, shape=(2, 2, 5), rate=rate, seed=seed) > 0
    assert found.long().tolist() == [[[0, 0, 1, 1, 1], [1, 1, 1, 1, 0]], [[1, 1, 0, 1, 1], [0, 0, 0, 1, 1]]]
    for row in range(2):
        start = splitmix(splitmix(splitmix(seed, 0), row), number)
        for entry in range(10):
            lane = splitmix(start, entry // 4) >> (16 * (entry % 4)) & 0xFFFF
            signed = lane - 2**16 if lane >= 2**15 else lane
            assert bool(found[row].flatten()[entry]) == (signed + 2**15 >= round(rate * 2**16))


def test_padding_to_the_right_adds_to_a_mask_and_changes_nothing():
    masks = DropoutMasks()
    short, padded = mask(masks, shape=(3, 5, 6)), mask(masks, shape=(3, 9, 6))
    assert torch.equal(padded[:, :5], short)
    assert not torch.equal(padded[:, 4:9], short)


def test_tokens_in_one_dimension_have_the_masks_of_their_texts():
    masks, ones = DropoutMasks(), torch.ones(3, 5, 4)
    with masks.seeded(1):
        whole, flat = masks.drop(ones, 0.5, 2), masks.drop(ones.flatten(0, 1), 0.5, 2)
    assert torch.equal(flat.view_as(whole), whole)


@pytest.mark.parametrize(("counts", "tiles"), [((2, 2), 1), ((1, 3), 1), ((2, 1), 2), ((2, 2), 2)])
def test_a_clients_mask_does_not_depend_on_who_is_in_the_batch(counts, tiles):
    masks, shape = DropoutMasks(), (4, 6)
    masks.set_rows(counts, [5, 6])
    joint = masks.drop(torch.ones(tiles * sum(counts), *shape), 0.5, 2)
    parts = joint.view(tiles, sum(counts), *shape).split(counts, dim=1)
    for part, seed in zip(parts, (5, 6), strict=True):
        rows = part.flatten(0, 1)
        assert torch.equal(rows, mask(DropoutMasks(), number=2, shape=rows.shape, rate=0.5, seed=seed))
    with pytest.raises(ValueError, match="dropout of 7 rows"):
        masks.drop(torch.ones(7, 2), 0.5, 0)


def test_layers_with_the_same_input_share_one_product():
    masks, x = DropoutMasks(), torch.randn(2, 3, 8)
    with masks.seeded(1):
        first = masks.drop(x, 0.5, 0)
        assert masks.drop(x, 0.5, 1) is first
        assert not torch.equal(masks.drop(x.clone(), 0.5, 1), first)
        assert masks.drop(x, 0.25, 1) is not first
        x += 1
        changed = masks.drop(x, 0.5, 0)
        assert torch.equal(changed[first != 0], 2 * x[first != 0])
    with masks.seeded(2):
        assert not torch.equal(masks.drop(x, 0.5, 0), changed)


def test_without_a_seed_masks_come_from_the_global_stream():
    masks, x = DropoutMasks(), torch.ones(2, 3, 8)
    torch.manual_seed(3)
    one, two = masks.drop(x, 0.5, 0), masks.drop(x, 0.5, 0)
    assert not torch.equal(one, two)
    torch.manual_seed(3)
    assert torch.equal(masks.drop(x, 0.5, 0), one)
    after = torch.get_rng_state()
    with masks.seeded(1):
        masks.drop(x, 0.5, 0)
    assert torch.equal(torch.get_rng_state(), after)


def test_bf16_is_scaled_in_fp32():
    masks, x = DropoutMasks(), torch.full((2, 3, 8), 3.0, dtype=torch.bfloat16)
    with masks.seeded(1):
        kept = masks.drop(x, 0.05, 0).unique()
        assert kept[1] == torch.tensor(3 * 65536 / (65536 - round(0.05 * 65536))).bfloat16()
        assert masks.drop(x, 0.05, 0, torch.float32).dtype == torch.float32


def make_layers(rate=0.3):
    """Return a PEFT model of two layers with seeded dropout, and one with torch's."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    config = LoraConfig(r=2, lora_dropout=rate, target_modules=["0", "2"], init_lora_weights=False)
    plain = get_peft_model(network, config).train()
    seeded, masks = copy.deepcopy(plain), DropoutMasks()
    seed_dropout(seeded, masks)
    return seeded, plain, masks


def test_peft_layers_get_seeded_dropout():
    seeded, plain, masks = make_layers()
    x = torch.randn(4, 6)
    layers = [layer for layer in seeded.modules() if isinstance(layer, SeededDropout)]
    assert [layer.number for layer in layers] == [0, 1]
    assert "rate=0.3" in repr(seeded)
    assert list(seeded.state_dict()) == list(plain.state_dict())
    assert torch.equal(seeded.eval()(x), plain.eval()(x))
    seeded.train()
    with masks.seeded(1):
        one, again = seeded(x), seeded(x.clone())
    assert torch.equal(one, again)
    assert not torch.equal(one, seeded(x))
    other = copy.deepcopy(seeded)
    [first, _] = [layer for layer in other.modules() if isinstance(layer, SeededDropout)]
    assert first.masks is not masks
    with first.masks.seeded(1):
        assert torch.equal(other(x), one)
    assert torch.equal(other.half().eval()(x.half()), seeded.half().eval()(x.half()))


def test_what_is_computed_again_has_the_same_masks():
    seeded, _, masks = make_layers()
    x = torch.randn(4, 6)
    again = partial(checkpoint, seeded, use_reentrant=False, context_fn=masks.checkpoint_contexts)

    def gradients(run, times=1):
        seeded.zero_grad()
        with masks.seeded(9):
            loss = run(x.clone()).square().sum()
        with masks.seeded(10):  # the next forward pass may begin before the backward pass
            for left in reversed(range(times)):
                loss.backward(retain_graph=left > 0)
        return [weight.grad for weight in seeded.parameters() if weight.grad is not None]

    expected = gradients(seeded)
    assert len(expected) == 4
    assert all(map(torch.equal, expected, gradients(again)))
    twice = gradients(again, times=2)
    assert all(torch.equal(2 * one, two) for one, two in zip(expected, twice, strict=True))
