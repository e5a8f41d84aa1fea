"""Augmentation: how the clients of a federation come by instructions beyond their own, with one interface for all ways.

An augmentation sees each client's training rows and the server's public rows and says which rows each client trains on in
addition. Wang et al., "Federated Instruction Tuning of LLMs with Domain Coverage Augmentation" (FedDCA),
https://arxiv.org/abs/2409.20135, compares ways of doing so: at random, by similarity, by gradients, by generation. They
stand in `fedlight.augmentation`; this file is what they have in common.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

from fedlight.support.types import Fields


class Added(NamedTuple):
    """A row that a client trains on besides its own."""

    fields: Fields
    row: int | None = None
    """Its index in the public rows; None where it was generated."""
    score: float | None = None
    """What it was chosen by, higher is better; None where nothing was compared."""


@runtime_checkable
class Described(Protocol):
    """What says itself which of its settings a result depends on: augmentations, text generators."""

    def settings(self) -> dict[str, object]:
        """Plain values by name; no secrets."""


@runtime_checkable
class Identified(Protocol):
    """What is known by a name of its content, as an encoder by its model's."""

    identity: str


class Augmentation(ABC):
    """Says which rows each client trains on in addition to its own.

    A subclass keeps every argument of its constructor under the same name: `settings` reads them, and what was added is
    taken from the record of an earlier run only where they are equal. Arguments that change no row (a batch size, a folder
    for a cache) are named in ``without_effect``.

    Args:
        number: rows wanted for each client, >= 1.

    Example:
        >>> class FirstRows(Augmentation):
        ...     def augment(self, clients, public, seed):
        ...         first = [Added(fields, row) for row, fields in enumerate(public[: self.number])]
        ...         return {client: first for client in clients}
        >>> FirstRows(number=1).augment({"c0": []}, [{"instruction": "Add.", "response": "3"}], seed=0)["c0"][0].row
        0
        >>> FirstRows(number=1).settings()
        {'class': 'FirstRows', 'number': 1}
    """

    needs_public: bool = True
    without_effect: tuple[str, ...] = ()

    def __init__(self, number: int) -> None:
        if number < 1:
            raise ValueError(f"number={number}: an augmentation adds rows. Set number to 1 or more.")
        self.number = number

    @abstractmethod
    def augment(
        self, clients: Mapping[str, Sequence[Fields]], public: Sequence[Fields], seed: int
    ) -> dict[str, list[Added]]:
        """The rows that each client gets, best first.

        Args:
            clients: each client's own training rows.
            public: the rows that the server holds; empty where there are none.
            seed: the result is a function of the texts, the settings and it.

        Returns:
            For every client of ``clients`` at most ``number`` rows, no public row twice; fewer where there are no more.
        """

    def keep_in(self, folder: Path) -> None:  # noqa: B027 (most are done in no time)
        """Where to keep unfinished work, unless the augmentation was given a place: a run that was killed goes on there."""

    def settings(self) -> dict[str, object]:
        """What the result depends on besides rows and seed: the class and its arguments as plain values."""
        return settings_of(self, self.without_effect)

    def why_fewer(self) -> str:
        """Why a client got fewer than ``number`` rows of a public set that has as many: part of a sentence."""
        return "there were no more to choose from"

    def record(self) -> dict[str, object]:
        """What else is worth keeping of the last call (bytes sent, rows refused): plain values, by name."""
        return {}


def settings_of(thing: object, without_effect: Sequence[str] = ()) -> dict[str, object]:
    """The class of ``thing`` and the arguments of its constructor, read from attributes of the same names.

    Args:
        thing: an object that keeps its arguments. Arguments that are objects themselves say what they are by their own
            ``settings()`` or ``identity``, see `Described` and `Identified`, or are read in the same way.
        without_effect: arguments to leave out.

    Example:
        >>> from fedlight.datamodules.rows.exclusion import Holdout
        >>> settings_of(Holdout(column="topic", values=["a"]))
        {'class': 'Holdout', 'column': 'topic', 'values': ['a']}
    """
    names = [name for name in inspect.signature(type(thing).__init__).parameters if name != "self"]
    return {
        "class": type(thing).__name__,
        **{name: _plain(getattr(thing, name)) for name in names if name not in without_effect},
    }


def _plain(value: object) -> object:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(name): _plain(entry) for name, entry in value.items()}
    if isinstance(value, Sequence):
        return [_plain(entry) for entry in value]
    if isinstance(value, Described):
        return value.settings()
    return value.identity if isinstance(value, Identified) else settings_of(value)
