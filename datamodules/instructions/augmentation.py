"""Augmentation: selection or generation of rows that clients train on besides their own.

An augmentation gets each client's training rows and the server's public rows, and returns each client's added rows. Wang et
al., "Federated Instruction Tuning of LLMs with Domain Coverage Augmentation" (FedDCA), https://arxiv.org/abs/2409.20135,
compares random rows, similarity, gradients and generation. `fedlight.augmentation` implements them; this file is their
interface.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedlight.support.checks import Checked, refuse_below
from fedlight.support.types import Fields


class Added(NamedTuple):
    """Row that a client trains on besides its own.

    Attributes:
        fields: the template's slots and ``response``.
        row: index in the public rows; None for a generated row.
        score: score of the selection, higher is better; None without one.
    """

    fields: Fields
    row: int | None = None
    score: float | None = None


class Augmentation(Checked, ABC):
    """Base class of augmentations.

    A subclass stores every argument of its constructor under the same name: `settings` reads them, and the record of an
    earlier run is used only with equal settings. ``without_effect`` names arguments that change no row (a batch size, a
    cache folder). ``needs_public`` tells whether it selects from public rows.

    Args:
        number: most rows added for each client, >= 1.

    Examples:
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
        refuse_below(1, number=number)
        self.number = number

    @abstractmethod
    def augment(
        self, clients: Mapping[str, Sequence[Fields]], public: Sequence[Fields], seed: int
    ) -> dict[str, list[Added]]:
        """Return the rows added for each client, best first.

        Args:
            clients: client -> its own training rows.
            public: rows of the server; may be empty.
            seed: the result is a function of texts, settings and seed.

        Returns:
            Client -> at most ``number`` rows, no public row twice, for every client of ``clients``.
        """

    def keep_in(self, folder: Path) -> None:
        """Keep unfinished work in this folder, unless a setting names another; a killed run continues from it."""

    def settings(self) -> dict[str, object]:
        """Return all that the result depends on besides rows and seed: the class and its arguments as plain values."""
        return settings_of(self, self.without_effect)

    def why_fewer(self) -> str:
        """Return why a client got fewer than ``number`` rows of a public set with enough rows: part of a sentence."""
        return "there were no more to choose from"

    def record(self) -> dict[str, object]:
        """Return notes on the last call for the record (bytes sent, rows refused): plain values by name."""
        return {}


def settings_of(thing: object, without_effect: Sequence[str] = ()) -> dict[str, object]:
    """Return the class of ``thing`` and the arguments of its constructor, read from attributes of the same names.

    An argument that is an object itself is described by its ``settings()``, plain values without secrets, or its
    ``identity``, a text that identifies its content, or is read in the same way. Those ``without_effect`` are left out.

    Examples:
        >>> from fedlight.datamodules.rows.exclusion import Holdout
        >>> settings_of(Holdout(column="topic", values=["a"]))
        {'class': 'Holdout', 'column': 'topic', 'values': ['a']}
    """
    names = [name for name in inspect.signature(type(thing).__init__).parameters if name != "self"]
    return {
        "class": type(thing).__name__,
        **{name: _to_plain(getattr(thing, name)) for name in names if name not in without_effect},
    }


def _to_plain(value: Any) -> object:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(name): _to_plain(entry) for name, entry in value.items()}
    if isinstance(value, Sequence):
        return [_to_plain(entry) for entry in value]
    if hasattr(value, "settings"):
        return value.settings()
    return value.identity if hasattr(value, "identity") else settings_of(value)
