"""Table of the groups that an algorithm finds: each client's selector at every grouping of a run.

For algorithms that group clients, such as FedBiscuit (Wu et al., "Towards Federated RLHF with Aggregated Client
Preference for LLMs", ICLR 2025, https://arxiv.org/abs/2407.03038).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import lightning as L
from lightning.pytorch.utilities import rank_zero_info

from fedlight.callbacks.loop.round_table import Record, RoundLog
from fedlight.evaluation.agreement import group_metrics
from fedlight.federation.protocols import NamesGroups
from fedlight.support.files import read_csv


@runtime_checkable
class GroupsClients(Protocol):
    """Algorithm that assigns each client to one of several selectors."""

    groups: Mapping[str, int]  # client id -> number of its selector; empty before the first grouping
    # client id -> its validation loss under each selector at the last grouping; empty with one selector
    losses: Mapping[str, list[float]]
    grouped_round: int | None  # round of the last grouping, None before the first


class GroupLog(RoundLog):
    """Lightning callback that writes ``groups.csv`` and logs how far a grouping agrees with the last and the known one.

    Columns: round, client, selector, the client's loss under each selector, its weight for each where it has such weights
    (FedBiscuit with `SoftGroups`; ``selector`` is then that of largest weight), and its known group where there is one. In
    the round of a grouping it logs ``fed/groups_moved``, the share of clients that changed their selector (from the second
    grouping on). Where groups are known it logs ``fed/group_ari``, the adjusted Rand index. Without an
    algorithm that groups clients, the callback says so and does nothing. A killed and resumed run leaves the same file as
    an uninterrupted one.

    Args:
        path: the file; None: ``groups.csv`` in the trainer's ``default_root_dir``.
    """

    log_name = "groups.csv"

    def __init__(self, path: str | None = None) -> None:
        super().__init__(path)
        self._grouping: GroupsClients | None = None
        self._written: dict[str, Any] = {"round": -1, "groups": {}}

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        super().setup(trainer, pl_module, stage)
        self._grouping = find_grouping(trainer)
        if self._grouping is None:
            rank_zero_info("GroupLog: no algorithm that groups clients, so there are no groups to log")

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._grouping is not None:
            super().on_train_start(trainer, pl_module)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # A run resumed from a checkpoint taken after validation calls this hook first.
        last = self._grouping
        if last is None or last.grouped_round is None or last.grouped_round <= self._written["round"]:
            return
        known = known_groups(trainer)
        self._table.append(group_rows(last, known))
        metrics = group_metrics(last.groups, self._written["groups"], known)
        pl_module.log_dict(metrics, on_step=False, on_epoch=True, batch_size=1)
        self._written = {"round": last.grouped_round, "groups": dict(last.groups)}

    def state_dict(self) -> dict[str, Any]:
        """Return the last grouping in the file and its round as well."""
        return super().state_dict() | self._written  # a resumed run compares its next grouping

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._written = {"round": state_dict.get("round", -1), "groups": state_dict.get("groups", {})}


def group_rows(grouping: GroupsClients, known: Mapping[str, str]) -> list[Record]:
    """Return the rows of one grouping, in the order of the clients."""
    rows: list[Record] = []
    for client, selector in grouping.groups.items():
        row: Record = {"round": grouping.grouped_round or 0, "client": client, "selector": selector}
        for name, values in (("loss", grouping.losses), ("weight", weights_of(grouping))):
            row |= {f"{name}_{index}": value for index, value in enumerate(values.get(client, ()))}
        rows.append(row | ({"known_group": known.get(client, "")} if known else {}))
    return rows


def weights_of(grouping: Any) -> Mapping[str, list[float]]:
    """Return client id -> its weights over the selectors, of sum 1; empty where each client has one selector."""
    return getattr(grouping, "weights", {})


def find_grouping(trainer: L.Trainer) -> GroupsClients | None:
    """Return the algorithm of the trainer's federated loop if it groups clients."""
    callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    algorithms = [getattr(callback, "algorithm", None) for callback in callbacks]
    return next((algorithm for algorithm in algorithms if isinstance(algorithm, GroupsClients)), None)


def known_groups(trainer: L.Trainer) -> Mapping[str, str]:
    """Return client id -> known group; empty where the data have no groups."""
    data = trainer.datamodule  # type: ignore[attr-defined]
    return (data.client_groups or {}) if isinstance(data, NamesGroups) else {}


def read_selectors(file: Path) -> tuple[dict[str, int], dict[str, list[float]]]:
    """Return client id -> selector, and -> weights over selectors if there are some, of the last round of ``groups.csv``.

    Raises:
        ValueError: this is another file.
    """
    try:
        rows = read_csv(file)
        last = max(int(row["round"]) for row in rows)  # the last grouping
        rows = [row for row in rows if int(row["round"]) == last]
        names = [name for name in rows[0] if name.startswith("weight_")]
        weights = {row["client"]: [float(row[name]) for name in names] for row in rows} if names else {}
        return {row["client"]: int(row["selector"]) for row in rows}, weights
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"groups={file} is not a file that GroupLog has written ({type(error).__name__}): give the groups.csv of the "
            "federated run, or leave it out"
        ) from None
