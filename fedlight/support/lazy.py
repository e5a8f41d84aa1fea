"""Public names of a package, imported when they are first asked for (PEP 562)."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(
    package: str, files: Mapping[str, str], elsewhere: Mapping[str, str] | None = None
) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package that imports on first use.

    So ``import fedlight`` loads neither torch nor Lightning, and rooms do not import each other through their packages.
    ``files`` has the package's module of each public name; names of ``elsewhere``, which are imported from the module's own
    package, are refused with that line.
    """

    def __getattr__(name: str) -> Any:
        if name in files:
            value = getattr(import_module(f"{package}.{files[name]}"), name)
            setattr(sys.modules[package], name, value)
            return value
        if name == "__all__":
            return [*files]
        reason = f"module {package!r} has no attribute {name!r}"
        if elsewhere is None or name not in elsewhere:
            raise AttributeError(reason)
        room = f"{package}.{elsewhere[name].rpartition('.')[0]}"
        reason += f": write `from {room} import {name}`, and in a config {room}.{name}"
        # `from fedlight import FedKSeed` asks here first, and would replace the text of an AttributeError by its own.
        is_import = sys._getframe(1).f_code.co_name == "_handle_fromlist"
        raise ImportError(reason) if is_import else AttributeError(reason)

    return __getattr__


def room_names(room: str, files: Mapping[str, str] | None = None) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a room, for the names in it, and those of ``files``; see `names_in`."""
    return lambda name: lazy_names(room, names_in(room, files))(name)


def names_in(room: str, files: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the names of `fedlight` and of `further_names` whose files are in a room, with their modules there.

    ``files`` are further ones, which these tables do not have.
    """
    public, begin = import_module("fedlight"), f"{room.removeprefix('fedlight.')}."
    tables = (public._FILES | public.FURTHER).items()
    return {name: file.removeprefix(begin) for name, file in tables if file.startswith(begin)} | dict(
        files or {}
    )
