"""Class names in configs: ``FedDCA``, ``fedlight.FedDCA`` and the whole path mean the same class.

Arguments of a class that a config or the command line replaces by another class are dropped. jsonargparse keeps those that
the new class takes as well, and has no setting for it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from fedlight import _FILES
from fedlight.further_names import FURTHER
from fedlight.support.pokes import parser_function, set_parser_function

CLASS_FILES = _FILES | FURTHER  # name that a config may give alone -> its file below ``fedlight``
THEIRS = "dropped arguments"
DROPPED: dict[str, tuple[str, set[str]]] = {}
"""What the command line that is being parsed has dropped so far: new class -> old class, and names of its arguments."""


def same_class(a: str, b: str) -> bool:
    """Return whether two names mean the same class; a name alone means fedlight's class of it, if there is one.

    Names in `CLASS_FILES` are compared without an import.

    Examples:
        >>> same_class("FedDCA", "fedlight.augmentation.feddca.FedDCA"), same_class("FedDCA", "mine.FedDCA")
        (True, False)
    """
    a, b = whole_path(a), whole_path(b)
    if a == b:
        return True
    if last_part(a) != last_part(b):
        return False
    if "." not in a or "." not in b:  # a class of another package, or one of fedlight's that no config names
        return True
    # Only an import shows that torch.optim.SGD and torch.optim.sgd.SGD are one class.
    first = find_object(a)
    return first is not None and first is find_object(b)


def whole_path(name: str) -> str:
    """Return the path of a class in `CLASS_FILES`; another name as it is."""
    last = last_part(name)
    if name in (last, f"fedlight.{last}") and last in CLASS_FILES:
        return f"fedlight.{CLASS_FILES[last]}.{last}"
    return name


def last_part(name: str) -> str:
    """Return a dotted name without its package."""
    return name.rpartition(".")[2]


def find_object(path: str) -> Any:
    """Return the object of a dotted name, or of a name in `CLASS_FILES`; None where it cannot be imported."""
    module, _, name = whole_path(path).rpartition(".")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError):  # ValueError: no module before the name
        return None


def class_of(path: str) -> type | None:
    """Return the class of such a name; None where it cannot be imported, or is no class."""
    kind = find_object(path)
    return kind if isinstance(kind, type) else None


@contextmanager
def arguments_go_with_their_class() -> Iterator[None]:
    """Have the parser drop all arguments of a class, at any depth, where another class is named."""
    theirs = parser_function(THEIRS)
    if theirs.__module__ == __name__:  # the parser of a nested class
        yield
        return
    DROPPED.clear()

    def drop(parser: Any, old: Any, new: Any) -> None:
        if not old or not old.get("class_path"):  # no class was named: the type of the value determines it
            theirs(parser, old, new)
        elif same_class(old["class_path"], new["class_path"]):
            # jsonargparse joins old and new dict_kwargs only if both have the same spelling of the name.
            old["class_path"] = new["class_path"]
        else:
            # With feddca.yaml and --data.augmentation DirectRetrieval, FedDCA's alpha would bound direct retrieval.
            before = [old.pop(key) for key in ("init_args", "dict_kwargs") if key in old]
            # items() of jsonargparse's Namespace has nested arguments as "a.b".
            names = {key.partition(".")[0] for given in before if given for key, _ in given.items()}
            if names:
                DROPPED[last_part(new["class_path"])] = (last_part(old["class_path"]), names)

    set_parser_function(THEIRS, drop)
    try:
        yield
    finally:
        set_parser_function(THEIRS, theirs)
