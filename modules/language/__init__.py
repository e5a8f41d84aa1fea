"""Language model under most modules: frozen base, LoRA adapters, checkpoints, generation, scoring.

It knows ``fedlight.modules.functional`` and nothing of the modules that extend it.
"""

from fedlight.support.lazy import room_names

_FILES = {"LanguageModule": "module"}
__getattr__ = room_names(__name__, _FILES)
