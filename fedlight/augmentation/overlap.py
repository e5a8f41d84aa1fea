"""Agreement of two augmentations on the rows of each client: FedDCA* should retrieve the rows of FedDCA.

Z. Wang et al. (FedDCA), 2024, https://arxiv.org/abs/2409.20135, section 4.3, replace the clients' large encoder by a small
one and a projector on the server, which changes the retrieved rows.
"""

from collections.abc import Collection, Mapping

from fedlight.datamodules.instructions.augmentation_record import AugmentationRecord


def overlap(
    retrieved: Mapping[str, Collection[int]], reference: Mapping[str, Collection[int]]
) -> dict[str, float]:
    """Return the share of each client's reference rows that were also found for it.

    Args:
        retrieved: client -> its rows.
        reference: client -> the rows to be found; clients without any are left out.

    Returns:
        Client -> share in [0, 1].

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

    Args:
        folder: ``augmentation_folder`` of a run.
        reference: ``augmentation_folder`` of the run to compare with.

    Raises:
        ValueError: a folder has no record.
    """
    shares = list(overlap(_read_rows(folder), _read_rows(reference)).values())
    return sum(shares) / len(shares)


def _read_rows(folder: str) -> dict[str, list[int]]:
    added = AugmentationRecord(folder).read()
    # A generated row has no index.
    return {client: [row.row for row in rows if row.row is not None] for client, rows in added.items()}
