"""Agreement of two augmentations on the rows of each client: FedDCA* should retrieve the rows of FedDCA.

Z. Wang et al. (FedDCA), 2024, https://arxiv.org/abs/2409.20135, section 4.3, replace the clients' large encoder by a small
one and a projector on the server, which changes the retrieved rows.
"""

from collections.abc import Collection, Mapping

from fedlight.datamodules.instructions.augmentation_record import AugmentationRecord


def overlap(
    retrieved: Mapping[str, Collection[int]], reference: Mapping[str, Collection[int]]
) -> dict[str, float]:
    """Return for each client with rows in the reference the share of these, in [0, 1], that were also retrieved for it.

    Raises:
        ValueError: no client has reference rows.

    Examples:
        >>> overlap({"u": [1, 2, 3], "v": []}, {"u": [3, 2, 7, 8], "v": [1], "w": []})
        {'u': 0.5, 'v': 0.0}
    """
    shares = {
        client: len(set(rows) & set(retrieved.get(client, ()))) / len(set(rows))
        for client, rows in reference.items()
        if rows
    }
    if not shares:
        raise ValueError("no client has rows in the reference: there is nothing to compare with")
    return shares


def retrieval_overlap(folder: str, reference: str) -> float:
    """Return the clients' mean `overlap` of the rows that two augmentations retrieved from the same public rows.

    Both are given by the ``augmentation_folder`` of their run.

    Raises:
        ValueError: a folder has no record.
    """
    shares = list(overlap(_read_rows(folder), _read_rows(reference)).values())
    return sum(shares) / len(shares)


def _read_rows(folder: str) -> dict[str, list[int]]:
    added = AugmentationRecord(folder).read()
    # A generated row has no index.
    return {client: [row.row for row in rows if row.row is not None] for client, rows in added.items()}
