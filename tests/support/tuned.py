"""Language modules after training: their adapters are not at the start, where B is 0 and each computes the base."""

import torch
from adapted import ready


def tuned(module, std=0.1, seed=8, parts=("lora_B",)):
    """The module with its network, and normal numbers added to the weights whose names have one of the parts."""
    stream = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in ready(module).named_parameters():
            if any(part in name for part in parts):
                weight.add_(std * torch.randn(weight.shape, generator=stream))
    return module
