"""Instructions: rows with responses by client, rows that augmentations add, their record, and tasks as test rows.

Knows rows, text, clients and the federated datamodule; `fedlight.augmentation` implements `Augmentation`.
"""

from fedlight.support.lazy import lazy_names

_FILES = {
    "EmbeddingDataModule": "embeddings",
    "InstructionDataModule": "datamodule",
    "AugmentedInstructionDataModule": "augmented",
    "TaskDataModule": "task_data",
    "Augmentation": "augmentation",
    "Added": "augmentation",
}

__all__ = [*_FILES]
__getattr__ = lazy_names(__name__, _FILES)
