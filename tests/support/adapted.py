"""What tests of language modules look at: the frozen base, and whether two states are the same."""

import torch


def ready(module):
    """The module with its network."""
    module.configure_model()
    return module


def base_state(module) -> dict[str, torch.Tensor]:
    """A copy of what is frozen."""
    return {n: p.detach().clone() for n, p in module.named_parameters() if not p.requires_grad}


def same(one: dict, other: dict) -> bool:
    """Whether the names and each bit are."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
