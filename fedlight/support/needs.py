"""What a class of a config needs of the world, said by the class itself, so that a dry run can check it beforehand.

A class that needs something has a classmethod `requires`; one without it needs nothing. It is called with the settings,
before any object is made, so it may name what an earlier stage has not written yet.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable


class Rows(NamedTuple):
    """Rows that are read.

    Attributes:
        source: see `fedlight.datamodules.rows.rows`.
        split: of a hub data set.
        columns: what fedlight calls it -> where a row has it; only what the settings name.
    """

    source: str
    split: str = "train"
    columns: tuple[tuple[str, str], ...] = ()


class Model(NamedTuple):
    """Weights that are read.

    Attributes:
        name: hub name, folder or ``toy``.
        is_encoder: of sentences, rather than a language model.
    """

    name: str
    is_encoder: bool = False


class Server(NamedTuple):
    """A chat endpoint that is asked.

    Attributes:
        url: where it is.
        key: the environment variable that holds the key, if it wants one.
    """

    url: str
    key: str | None = None


class Package(NamedTuple):
    """A Python package that fedlight does not install.

    Attributes:
        name: as it is imported.
        install: what to install for it, ``pip install`` put before it.
    """

    name: str
    install: str


class Memory(NamedTuple):
    """Memory of this machine.

    Attributes:
        bytes: at the peak.
        what: takes it, in words.
    """

    bytes: int
    what: str


Need = Rows | Model | Server | Package | Memory


@runtime_checkable
class Requires(Protocol):
    """A class that says what it needs."""

    @classmethod
    def requires(cls, settings: Mapping[str, Any]) -> Iterable[Need]:
        """What an object with these settings needs.

        Args:
            settings: arguments of the constructor by name, its defaults included; other classes as ``class_path`` and
                ``init_args``, and what these need they say themselves.
        """


@runtime_checkable
class KeepsLog(Protocol):
    """A class that writes a file into the trainer's ``default_root_dir``, unless a setting names another place.

    Attributes:
        log_name: name of the file.
    """

    log_name: str
