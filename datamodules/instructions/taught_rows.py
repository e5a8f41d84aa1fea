"""Rows and turns that clients train on: settings that YAML nests below ``rows``."""

from dataclasses import dataclass

from fedlight.datamodules.clients.few_shot import FewShot
from fedlight.datamodules.rows.canaries import Canaries
from fedlight.datamodules.rows.poison import Backdoor
from fedlight.datamodules.text.encoding import TaughtTurns
from fedlight.datamodules.vectors.clusters import PseudoLabels
from fedlight.support.checks import Settings


@dataclass(frozen=True)
class TaughtRows(Settings):
    """Rows and turns that clients train on; in YAML ``rows: {canaries: {repeats: 2}}``.

    Args:
        few_shot: selection of a few rows of each cluster of ``source``, with the clusters as categories.
        pseudo_labels: categories for ``partition.by: dirichlet`` of rows without a category column.
        canaries: artificial rows that some clients train on besides their own; attacks search for them.
        backdoor: rows with a trigger that clients which lie train on besides their own; ``BackdoorSuccess`` measures it.
        taught_turns: of a conversation, train on ``all`` answers, or on the ``last``.
    """

    few_shot: FewShot | None = None
    pseudo_labels: PseudoLabels | None = None
    canaries: Canaries | None = None
    backdoor: Backdoor | None = None
    taught_turns: TaughtTurns = "all"
