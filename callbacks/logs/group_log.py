"""The group log: which client trains which selector, and why, at every grouping of a federated run.

For algorithms that group clients, such as FedBiscuit (Wu et al., "Towards Federated RLHF with Aggregated Client
Preference for LLMs", ICLR 2025, https://arxiv.org/abs/2407.03038). Where the data know a group of each client, the
log says how well the found groups agree with it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.utilities import rank_zero_info

from fedlight.callbacks.logs.client_groups import GroupsClients, grouping_of, known_groups
from fedlight.callbacks.loop.round_table import RoundTable, Row
from fedlight.evaluation.agreement import agreement


class GroupLog(L.Callback):
    """Writes ``groups.csv``: round, client, selector, its loss under each selector, and its known group if there is one.

    Logs in the round of a grouping ``fed/groups_moved``, the share of clients that changed their selector (from the
    second grouping on), and where groups are known ``fed/group_ari``, the adjusted Rand index, and ``fed/groups_found``,
    the share of clients that sit with their group under the best matching of selectors to groups. Without an algorithm
    that groups clients it says so and does nothing. A killed and resumed run leaves the same file as an uninterrupted one.

    Args:
        path: the file; ``groups.csv`` in the trainer's ``default_root_dir`` if not given.
    """

    log_name = "groups.csv"

    def __init__(self, path: str | None = None) -> None:
        self.path = path
        self._grouping: GroupsClients | None = None
        self._written: dict[str, Any] = {"round": -1, "groups": {}}
        self._before: str | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        self._grouping = grouping_of(trainer)
        self._table = RoundTable(Path(self.path or Path(trainer.default_root_dir) / self.log_name))
        if trainer.current_epoch == 0:  # a checkpoint is loaded later
            self._written, self._before = {"round": -1, "groups": {}}, None
        if self._grouping is None:
            rank_zero_info("GroupLog: no algorithm that groups clients, so there are no groups to log")

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._grouping is not None:
            self._table.restart(self._written["round"], self._before)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Also the first thing in a run that goes on from a checkpoint taken after validation."""
        found = self._grouping
        if found is None or found.grouped_round is None or found.grouped_round <= self._written["round"]:
            return
        known = known_groups(trainer)
        self._table.append(group_rows(found, known))
        metrics = agreement(found.groups, self._written["groups"], known)
        pl_module.log_dict(metrics, on_step=False, on_epoch=True, batch_size=1)
        self._written = {"round": found.grouped_round, "groups": dict(found.groups)}

    def state_dict(self) -> dict[str, Any]:
        """The round of the last grouping that is in the file, that grouping, and a digest of the rows so far."""
        if self._grouping is None:
            return self._written
        return {**self._written, "before": self._table.digest(self._written["round"])}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._written = {key: state_dict[key] for key in ("round", "groups")}
        self._before = state_dict.get("before")


def group_rows(found: GroupsClients, known: Mapping[str, str]) -> list[Row]:
    """The rows of one grouping, in the order of the clients."""
    rows: list[Row] = []
    for client, selector in found.groups.items():
        losses = {f"loss_{index}": loss for index, loss in enumerate(found.losses.get(client, ()))}
        row: Row = {"round": found.grouped_round or 0, "client": client, "selector": selector, **losses}
        rows.append(row | ({"known_group": known.get(client, "")} if known else {}))
    return rows
