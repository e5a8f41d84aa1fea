"""How much two augmentations agree on what each client gets: FedDCA* should retrieve what FedDCA retrieves.

Z. Wang et al. (FedDCA), 2024, https://arxiv.org/abs/2409.20135, section 4.3, trade the clients' large encoder for a
small one and a projector on the server; what that changes is what is retrieved.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from fedlight.datamodules.instructions.augmentation_record import AugmentationRecord


def overlap(
    found: Mapping[str, Collection[int]], reference: Mapping[str, Collection[int]]
) -> dict[str, float]:
    """Share of a client's reference rows that were found for it as well.

    Args:
        found: client -> its rows.
        reference: client -> the rows to be found; clients without any are left out.

    Returns:
        Client -> share in [0, 1].

    Raises:
        ValueError: no client has reference rows.

    Example:
        >>> overlap({"u": [1, 2, 3], "v": []}, {"u": [3, 2, 7, 8], "v": [1], "w": []})
        {'u': 0.5, 'v': 0.0}
    """
    shares = {
        client: len(set(rows) & set(found.get(client, ()))) / len(set(rows))
        for client, rows in reference.items()
        if rows
    }
    if not shares:
        raise ValueError("no client has rows in the reference: there is nothing to compare with")
    return shares


def retrieval_overlap(records: dict[str, str], reference: str) -> dict[str, Any]:
    """Compares what augmentations retrieved with what another one did; a stage of recipes.

    Args:
        records: label -> ``augmentation_folder`` of a run.
        reference: that of the run to compare with; its public rows were the same.

    Returns:
        ``rows``: for each label the ``mean``, ``min`` and ``max`` of the clients' `overlap`; ``table``: label -> client ->
        overlap.

    Raises:
        ValueError: a folder has no record.
    """
    chosen = {label: _rows(folder) for label, folder in {**records, "": reference}.items()}
    against = chosen.pop("")
    table = {label: overlap(rows, against) for label, rows in chosen.items()}
    rows = [
        {
            "method": label,
            "mean": sum(shares.values()) / len(shares),
            "min": min(shares.values()),
            "max": max(shares.values()),
        }
        for label, shares in table.items()
    ]
    return {"rows": rows, "table": table}


def _rows(folder: str) -> dict[str, list[int]]:
    record = AugmentationRecord(Path(folder))
    if not record.added.is_file():
        raise ValueError(f"{record.added}: there is no such file: give the augmentation_folder of a run")
    return {
        client: [row.row for row in added if row.row is not None] for client, added in record.read().items()
    }
