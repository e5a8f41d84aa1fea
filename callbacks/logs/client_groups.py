"""Who is in which group: as an algorithm has found it, as its log says, and as the data know it."""

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import lightning as L


@runtime_checkable
class GroupsClients(Protocol):
    """An algorithm that assigns each client to one of several selectors.

    Attributes:
        groups: client id -> number of its selector; empty before the first grouping.
        losses: client id -> its validation loss under each selector, at the last grouping; empty with one selector.
        grouped_round: the round of the last grouping, None before the first.
    """

    groups: Mapping[str, int]
    losses: Mapping[str, list[float]]
    grouped_round: int | None


@runtime_checkable
class RunsAlgorithm(Protocol):
    """What is needed of the federated loop: its algorithm."""

    algorithm: Any


@runtime_checkable
class KnowsGroups(Protocol):
    """What is needed of a datamodule that knows groups of clients: client id -> its group; None without such a column."""

    client_groups: Mapping[str, str] | None


def grouping_of(trainer: L.Trainer) -> GroupsClients | None:
    """The algorithm of the trainer's federated loop, if it groups clients."""
    callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    algorithms = [callback.algorithm for callback in callbacks if isinstance(callback, RunsAlgorithm)]
    return next((algorithm for algorithm in algorithms if isinstance(algorithm, GroupsClients)), None)


def known_groups(trainer: L.Trainer) -> Mapping[str, str]:
    """Client id -> the group that the data know, empty where they know none."""
    data = trainer.datamodule  # type: ignore[attr-defined]
    return (data.client_groups or {}) if isinstance(data, KnowsGroups) else {}


def read_selectors(file: Path) -> dict[str, int]:
    """Client id -> selector, of the last round in a ``groups.csv``.

    Raises:
        ValueError: there is no such file, or it has not the columns round, client and selector, or no row.
    """
    try:
        with file.open(newline="", encoding="utf-8") as lines:
            rows = list(csv.DictReader(lines))
        last = max(int(row["round"]) for row in rows)
        return {row["client"]: int(row["selector"]) for row in rows if int(row["round"]) == last}
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"groups={file} is not a file that GroupLog has written ({type(error).__name__}): give the groups.csv of the "
            "federated run, or leave it out"
        ) from None
