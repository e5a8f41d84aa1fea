"""Needs of a config's classes, stated by the classes themselves, so that a dry run can check them beforehand.

A class that needs something has a classmethod `requires`. It is called with the settings, before any object is made, so it
may name files that an earlier stage has not written yet.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable


class RowSource(NamedTuple):
    """Source of rows that are read: see `fedlight.datamodules.rows`."""

    source: str
    split: str = "train"  # split of a hub data set
    # pairs of fedlight's name of a column and its name in the rows; only those that settings name
    columns: tuple[tuple[str, str], ...] = ()


class Model(NamedTuple):
    """Weights that are read, of a language model or a sentence encoder; ``name`` is that at the hub, a folder or ``toy``."""

    name: str
    is_encoder: bool = False


class Server(NamedTuple):
    """Chat endpoint that is asked; ``key`` is the environment variable that holds the key, if one is needed."""

    url: str
    key: str | None = None


class Package(NamedTuple):
    """Python package that fedlight does not install: name of its import, and argument of ``pip install``."""

    name: str
    install: str


class Memory(NamedTuple):
    """Memory of this machine: bytes at the peak, and their use, in words."""

    bytes: int
    what: str


Need = RowSource | Model | Server | Package | Memory


@runtime_checkable
class Requires(Protocol):
    """Class that states its needs."""

    @classmethod
    def requires(cls, settings: Mapping[str, Any]) -> Iterable[Need]:
        """Return the needs of an object with these settings.

        Args:
            settings: arguments of the constructor by name, with defaults; other classes are ``class_path`` and
                ``init_args``, and state their needs themselves.
        """


class ReadsModel:
    """Base of the classes that read the weights which their setting ``model`` names."""

    @classmethod
    def requires(cls, settings: Mapping[str, Any]) -> list[Need]:
        """Return the model, which a dry run looks for."""
        return [Model(settings["model"])]


@runtime_checkable
class KeepsLog(Protocol):
    """Class that writes a file into the trainer's ``default_root_dir``, unless a setting names another place."""

    log_name: str
