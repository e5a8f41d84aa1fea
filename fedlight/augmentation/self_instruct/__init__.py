"""Self-Instruct: a language model writes instructions like a client's own, and their responses.

It knows the datamodules' rows and templates, and asks a text generator of ``fedlight.generators``.
"""

from fedlight.support.lazy import lazy_names

_FILES = {"SelfInstruct": "self_instruct"}

__all__ = [*_FILES]
__getattr__ = lazy_names(__name__, _FILES)
