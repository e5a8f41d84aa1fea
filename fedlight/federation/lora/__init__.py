"""LoRA in a federation: which tensors of a state are a pair of factors, and sums of the products of pairs."""

from fedlight.support.lazy import lazy_names

_FILES = {
    "LoraPair": "pairs",
    "LoraPairs": "pairs",
    "find_pairs": "pairs",
    "ProductSums": "products",
    "ProductError": "product_error",
}

__all__ = [*_FILES]
__getattr__ = lazy_names(__name__, _FILES)
