"""Dropped arguments of a class that a config or the command line replaces by another class.

jsonargparse keeps those that the new class takes as well, and has no setting for it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fedlight.lightning_cli.class_names import last_part, same_class
from fedlight.support.pokes import parser_function, set_parser_function

THEIRS = "dropped arguments"

DROPPED: dict[str, tuple[str, set[str]]] = {}
"""What the command line that is being parsed has dropped so far: new class -> old class, and names of its arguments."""


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
