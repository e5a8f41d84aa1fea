"""Algorithms that treat a LoRA adapter as a pair of factors, and not as any two tensors."""

from fedlight.support.lazy import lazy_names

_FILES = {
    "FFALoRA": "ffa_lora",
    "RoLoRA": "ro_lora",
    "FedSALoRA": "fedsa_lora",
    "ProductAverage": "product_average",
    "HetLoRA": "hetlora",
    "FlexLoRA": "flexlora",
}

__all__ = [*_FILES]
__getattr__ = lazy_names(__name__, _FILES)
