import itertools

import torch
from adapted import ready
from text_batches import make_sft_batch

from fedlight.augmentation.less.warm_up import linear_lr, warm_up
from fedlight.modules.language.adapters import Lora, trained_parameters
from fedlight.modules.sft import SFTModule


def make_module(model, **options):
    return ready(SFTModule(model, **{"dtype": "fp32", "lora": Lora(rank=2), **options}))


def test_equals_plain_adam(llama):
    batches = [make_sft_batch(seed=seed) for seed in range(3)]
    epochs, rates = [[0, 1, 2], [2, 0, 1]], [0.01, 0.01 * 5 / 6, 0.01 * 4 / 6, 0.005, 0.01 * 2 / 6, 0.01 / 6]
    module, expected = (make_module(llama, lora=Lora(rank=2, dropout=0)) for _ in range(2))
    weights = trained_parameters(expected)
    optimizer = torch.optim.Adam(weights.values(), lr=1)
    step = 0
    for number, epoch in enumerate(warm_up(module, epochs, batches.__getitem__, lr=0.01)):
        losses = []
        for batch in epochs[number]:
            optimizer.param_groups[0]["lr"] = rates[step]
            optimizer.zero_grad()
            loss = expected.example_losses(batches[batch]).mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            step += 1
        # The module is where it was at the end of this epoch, and so are the moments.
        assert epoch.mean_loss == sum(losses) / 3
        assert abs(epoch.mean_lr - sum(rates[3 * number : 3 * number + 3]) / 3) < 1e-9
        assert epoch.moments.steps == step
        for name, weight in trained_parameters(module).items():
            assert torch.equal(weight, weights[name])
            assert torch.equal(epoch.moments.first[name], optimizer.state[weights[name]]["exp_avg"])
            assert torch.equal(epoch.moments.second[name], optimizer.state[weights[name]]["exp_avg_sq"])
            assert weight.grad is None
    assert number == 1


def test_dropout_follows_from_the_seed_alone(llama):
    found = []
    for seed in (0, 0, 1):
        torch.rand(3)
        module = make_module(llama, lora=Lora(rank=2, dropout=0.5), seed=seed)
        for name, weight in trained_parameters(module).items():
            weight.data.fill_(0.1 if "lora_A" in name else 0.0)  # so that the seed is that of dropout alone
        state = torch.get_rng_state()
        list(warm_up(module, [[0], [0]], lambda _: make_sft_batch(), lr=0.01))
        assert torch.equal(torch.get_rng_state(), state)
        found.append([weight.clone() for weight in trained_parameters(module).values()])
    assert all(map(torch.equal, found[0], found[1]))
    assert not all(map(torch.equal, found[0], found[2]))


def test_learning_rate_of_a_long_training():
    """Up over 6 of 200 steps, then down by equal amounts; its sum over all steps is about half of the highest."""
    rates = [linear_lr(step, 200, 2.0) for step in range(200)]
    assert rates[5] == 2.0 == max(rates)
    assert abs(rates[4] - 2 * 5 / 6) < 1e-12
    falls = {round(a - b, 9) for a, b in itertools.pairwise(rates[5:])}
    assert falls == {round(2 / 195, 9)}
    assert 0 < rates[-1] < 0.011
