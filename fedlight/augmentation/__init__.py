"""Augmentations: clients' further training rows, drawn, retrieved by similarity or gradients, or generated.

They know modules, datamodules and generators; the datamodule knows their base class ``Augmentation`` alone.
"""

from fedlight.support.lazy import room_names

__getattr__ = room_names(__name__)
