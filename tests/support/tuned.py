"""Language modules with adapters that compute something: at the start B is 0."""

import torch
from adapted import ready


def tuned(module, std=0.1, seed=8, parts=("lora_B",)):
    """Load the network, add normal numbers to weights whose names have one of the parts, and return the module."""
    stream = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in ready(module).named_parameters():
            if any(part in name for part in parts):
                weight.add_(std * torch.randn(weight.shape, generator=stream))
    return module
