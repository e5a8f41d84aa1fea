"""Self-Instruct: a language model writes instructions like a client's own, and their responses.

It knows the datamodules' rows and templates, and asks a text generator of ``fedlight.generators``.
"""

from fedlight.support.lazy import room_names

__getattr__ = room_names(__name__)
