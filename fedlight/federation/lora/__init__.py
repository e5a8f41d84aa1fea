"""LoRA in a federation: which tensors of a state are a pair of factors, and clients of unlike ranks."""

from fedlight.support.lazy import lazy_names

_FILES = {
    "LoraPair": "pairs",
    "LoraPairs": "pairs",
    "find_pairs": "pairs",
    "ProductSums": "products",
    "LoraRanks": "ranks",
    "rank_of": "ranks",
    "cut_to_rank": "ranks",
    "pad_like": "ranks",
}

__all__ = [*_FILES]
__getattr__ = lazy_names(__name__, _FILES)
