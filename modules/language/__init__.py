"""Language model under most modules: frozen base, LoRA adapters, checkpoints, generation, scoring.

It knows ``fedlight.modules.functional`` and nothing of the modules that extend it.
"""

from fedlight.support.lazy import lazy_names

_FILES = {
    "LanguageModule": "module",
    "Lora": "adapters",
    "Optimization": "optimizers",
    "Execution": "base_model",
}

__all__ = [*_FILES]
__getattr__ = lazy_names(__name__, _FILES)
