"""What an augmentation gave, in one line; and what it must not give, refused in one line."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from fedlight.datamodules.instructions.augmentation import Added, Augmentation


def report(augmentation: Augmentation, added: Mapping[str, Sequence[Added]], num_public: int) -> str:
    """How many rows the clients got, how good they are, how many got fewer than wanted, and why.

    Args:
        augmentation: that gave them.
        added: what each client got.
        num_public: rows that were chosen from.
    """
    name, wanted = type(augmentation).__name__, augmentation.number
    sizes = np.array([len(rows) for rows in added.values()])
    scores = np.array([row.score for rows in added.values() for row in rows if row.score is not None])
    chosen = {row.row for rows in added.values() for row in rows if row.row is not None}
    said = [f"{name}: {sizes.min():,} to {sizes.max():,} rows for each client (mean {sizes.mean():,.1f})"]
    if len(chosen):
        said.append(f"{len(chosen):,} different public rows in all")
    if len(scores):
        said.append(f"scores {scores.min():.3f} to {scores.max():.3f}")
    if fewer := int((sizes < wanted).sum()):
        small = augmentation.needs_public and num_public < wanted
        why = f"only {num_public:,} rows are public" if small else augmentation.why_fewer()
        said.append(f"fewer than number={wanted} for {fewer:,} of {len(sizes):,} clients: {why}")
    return "; ".join(said)


def check_added(
    augmentation: Augmentation, added: Mapping[str, Sequence[Added]], clients: Iterable[str], num_public: int
) -> None:
    """Every client at most ``number`` rows, no public row twice, none that there is not.

    Raises:
        ValueError: the augmentation broke its word.
    """
    name = type(augmentation).__name__
    for client in clients:
        if client not in added:
            raise ValueError(
                f"{name} gave nothing for client {client}: an empty list says that it gets nothing."
            )
        rows = [row.row for row in added[client] if row.row is not None]
        if len(added[client]) > augmentation.number:
            raise ValueError(
                f"{name} gave client {client} {len(added[client])} rows, more than number={augmentation.number}."
            )
        if len(set(rows)) < len(rows):
            raise ValueError(f"{name} gave client {client} a public row twice.")
        if rows and not 0 <= min(rows) <= max(rows) < num_public:
            raise ValueError(
                f"{name} gave client {client} row {max(rows)} of {num_public} public rows, counted from 0."
            )


def nothing_public(augmentation: Augmentation) -> str:
    """The line for an empty public set."""
    return (
        f"{type(augmentation).__name__} chooses from public rows, but there are none: set public_source, or private_rows "
        "so that the rest of source is public, or augmentation to null."
    )
