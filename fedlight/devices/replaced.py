"""An attribute exchanged for a while."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of an object or Python module inside the body, then restore or remove it.

    Example:
        >>> from types import SimpleNamespace
        >>> owner = SimpleNamespace(x=1)
        >>> with replaced(owner, "x", 2), replaced(owner, "y", 3):
        ...     print(owner)
        namespace(x=2, y=3)
        >>> owner
        namespace(x=1)
    """
    own = vars(owner)
    before = {name: own[name]} if name in own else {}
    own[name] = value
    try:
        yield
    finally:
        own.pop(name, None)
        own.update(before)
