"""Augmentations: clients' further training rows, drawn, retrieved by similarity or gradients, or generated.

They know modules, datamodules and generators; the datamodule knows their base class ``Augmentation`` alone.
"""

from fedlight.support.lazy import lazy_names

_FILES = {
    "DirectRetrieval": "direct",
    "FedDCA": "feddca",
    "FedDCAStar": "feddca_star",
    "LESS": "less.less",
    "RandomSampling": "random_sampling",
    "SelfInstruct": "self_instruct.self_instruct",
}

__all__ = [*_FILES]
__getattr__ = lazy_names(__name__, _FILES)
