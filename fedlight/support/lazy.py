"""Public names of a package, imported when they are first asked for (PEP 562)."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(package: str, files: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package that imports on first use; ``files`` is public name -> module in the package.

    So ``import fedlight`` loads neither torch nor Lightning, and rooms do not import each other through their packages.
    """

    def __getattr__(name: str) -> Any:
        if name not in files:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(f"{package}.{files[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return __getattr__
