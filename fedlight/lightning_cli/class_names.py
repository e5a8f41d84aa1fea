"""Comparison of class names in configs: ``FedDCA``, ``fedlight.FedDCA`` and the whole path mean the same class."""

from importlib import import_module
from typing import Any

from fedlight import _FILES


def same_class(a: str, b: str) -> bool:
    """Return whether two names mean the same class; a name alone means fedlight's public class of it, if there is one.

    Names of fedlight's public classes are compared without an import. Two paths of other packages are imported only if their
    last parts are equal, as of ``torch.optim.SGD`` and ``torch.optim.sgd.SGD``.

    Examples:
        >>> same_class("FedDCA", "fedlight.augmentation.feddca.FedDCA"), same_class("FedDCA", "mine.FedDCA")
        (True, False)
    """
    a, b = _whole(a), _whole(b)
    if a == b:
        return True
    if last_part(a) != last_part(b):
        return False
    if (
        "." not in a or "." not in b
    ):  # a class of another package, or one of fedlight's own that is not public
        return True
    first = find_object(a)
    return first is not None and first is find_object(b)


def _whole(name: str) -> str:
    """Return the path of one of fedlight's public classes; another name as it is."""
    last = last_part(name)
    return (
        f"fedlight.{_FILES[last]}.{last}" if name in (last, f"fedlight.{last}") and last in _FILES else name
    )


def last_part(name: str) -> str:
    """Return a dotted name without its package."""
    return name.rpartition(".")[2]


def find_object(path: str) -> Any:
    """Return the object of a dotted name; None where it cannot be imported."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError):
        return None


def class_of(path: str) -> type | None:
    """Return the class of a dotted name; None where it cannot be imported, or is no class."""
    kind = find_object(path)
    return kind if isinstance(kind, type) else None
