"""LightningModules of fedlight, one training task each, imported as ``fedlight.modules``.

They know nothing of the federation; ``fedlight.modules.language`` has the language model that most of them extend.
"""

from fedlight.support.lazy import lazy_names

_FILES = {
    "DPOModule": "dpo",
    "FeatureSelectorModule": "feature_selector",
    "ProjectorModule": "projector",
    "RewardModule": "reward",
    "SFTModule": "sft",
    "SelectorModule": "selector",
}

__all__ = [*_FILES]
__getattr__ = lazy_names(__name__, _FILES)
