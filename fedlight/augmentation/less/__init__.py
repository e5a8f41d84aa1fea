"""LESS, which selects public rows by the gradients they cause.

It knows ``fedlight.modules.SFTModule``, whose gradients it takes, and the datamodules' encoding of rows.
"""

from fedlight.support.lazy import room_names

__getattr__ = room_names(__name__)
