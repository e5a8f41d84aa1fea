"""Instructions: rows with responses by client, rows that augmentations add, their record, and tasks as test rows.

Knows rows, text, clients and the federated datamodule; `fedlight.augmentation` implements `Augmentation`.
"""

from fedlight.support.lazy import room_names

_FILES = {"Added": "augmentation"}
__getattr__ = room_names(__name__, _FILES)
