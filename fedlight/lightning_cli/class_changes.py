"""Arguments go with their class: where a config or the command line names another class, those of the old one are dropped.

jsonargparse keeps those that the new class takes as well, and has no setting for it. With
``--config feddca.yaml --data.augmentation DirectRetrieval`` direct retrieval, which has no bound on similarity by itself,
would then be bound by FedDCA's alpha.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from jsonargparse import _typehints

from fedlight.lightning_cli.class_names import same_class

THEIRS = "discard_init_args_on_class_path_change"
"""jsonargparse's function that all its ways of merging ask which arguments of an old class may stay."""

Dropped = dict[str, tuple[str, set[str]]]
"""Name of a new class -> the name of the old one, and the names of its arguments."""


class DropArguments:
    """Stands in for jsonargparse's function.

    Args:
        theirs: that function.
    """

    def __init__(self, theirs: Callable[[Any, Any, Any], None]) -> None:
        self.theirs = theirs
        self.dropped: Dropped = {}

    def __call__(self, parser: Any, old: Any, new: Any) -> None:
        """Drops all arguments of the old class, in place, unless the new one is the same."""
        if not old or not old.get(
            "class_path"
        ):  # no class was named, and the type of the value says which it is
            self.theirs(parser, old, new)
        elif same_class(old["class_path"], new["class_path"]):
            # Its dict_kwargs are joined with new ones under one name alone.
            old["class_path"] = new["class_path"]
        else:
            before = [old.pop(key) for key in ("init_args", "dict_kwargs") if key in old]
            names = {key.partition(".")[0] for given in before if given for key, _ in given.items()}
            if names:
                self.dropped[_name(new["class_path"])] = (_name(old["class_path"]), names)


@contextmanager
def arguments_go_with_their_class() -> Iterator[None]:
    """While a command line is parsed: naming another class drops all arguments of the old one, at any depth."""
    theirs = getattr(_typehints, THEIRS)
    if isinstance(theirs, DropArguments):  # the parser of a nested class
        yield
        return
    setattr(_typehints, THEIRS, DropArguments(theirs))
    try:
        yield
    finally:
        setattr(_typehints, THEIRS, theirs)


def dropped_so_far() -> Dropped:
    """What was dropped from the command line that is being parsed."""
    asked = getattr(_typehints, THEIRS)
    return asked.dropped if isinstance(asked, DropArguments) else {}


def _name(path: str) -> str:
    return path.rpartition(".")[2]
