"""LightningModules of fedlight, one training task each, imported as ``fedlight.modules``.

They know nothing of the federation; ``fedlight.modules.language`` has the language model that most of them extend.
"""

from fedlight.support.lazy import room_names

__getattr__ = room_names(__name__)
