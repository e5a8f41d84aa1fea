import copy

import pytest
import torch
from adapted import ready
from text_batches import make_sft_batch

from fedlight.augmentation.less.features import Moments, RandomProjection, adam_direction, gradient_features
from fedlight.modules.language.adapters import Lora, trained_parameters
from fedlight.modules.sft import SFTModule


def test_direction_is_the_step_that_torch_takes():
    """Up to epsilon, which torch adds to the root; with gradients of 1 that is 1e-8."""
    stream = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(6, generator=stream))
    optimizer = torch.optim.Adam([weight], lr=0.1)
    for _ in range(7):
        weight.grad = torch.randn(6, generator=stream) + 2
        optimizer.step()
    state, gradients = optimizer.state[weight], torch.randn(3, 6, generator=stream)
    found = adam_direction(gradients, state["exp_avg"], state["exp_avg_sq"], steps=7)
    for row in range(3):
        other = torch.nn.Parameter(weight.detach().clone())
        alone = torch.optim.Adam([other], lr=0.1)
        alone.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        other.grad = gradients[row].clone()
        alone.step()
        torch.testing.assert_close((weight.detach() - other.detach()) / 0.1, found[row], rtol=1e-4, atol=1e-5)


def test_epsilon_stands_inside_the_root():
    """m' = 1e-6 and v' = 1e-12: 1e-6 / sqrt(1e-12 + 1e-8) = 0.0099995; outside it would be 0.990."""
    nothing = torch.zeros(1)
    found = adam_direction(torch.tensor([[1e-6]]), nothing, nothing, steps=0)
    assert found.item() == pytest.approx(0.0099995, rel=1e-4)


def test_features(llama):
    module = ready(SFTModule(llama, dtype="fp32", lora=Lora(rank=2, dropout=0.5)))
    weights, batch = trained_parameters(module), make_sft_batch()
    stream = torch.Generator().manual_seed(1)
    for weight in weights.values():
        weight.data.normal_(0, 0.1, generator=stream)
    module.train()
    project = RandomProjection({name: weight.numel() for name, weight in weights.items()}, 64, seed=0)
    first = {name: torch.randn(weight.shape, generator=stream) for name, weight in weights.items()}
    second = {name: torch.rand(weight.shape, generator=stream) for name, weight in weights.items()}
    plain = gradient_features(module, batch, project)
    step = gradient_features(module, batch, project, Moments(first, second, steps=4), way="layers")
    assert module.training  # and yet there was no dropout
    module.eval()
    for row in range(3):
        one = {name: part[row : row + 1] for name, part in batch.items()}
        found = torch.autograd.grad(module.example_losses(one).sum(), list(weights.values()))
        gradients = {name: gradient[None] for name, gradient in zip(weights, found, strict=True)}
        torch.testing.assert_close(plain[row], project(gradients)[0], rtol=1e-3, atol=1e-5)
        for name, gradient in gradients.items():
            mean = (0.9 * first[name] + 0.1 * gradient) / (1 - 0.9**5)
            square = (0.999 * second[name] + 0.001 * gradient**2) / (1 - 0.999**5)
            gradients[name] = mean / torch.sqrt(square + 1e-8)
        torch.testing.assert_close(step[row], project(gradients)[0], rtol=1e-3, atol=1e-2)
