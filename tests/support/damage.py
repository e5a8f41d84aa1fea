"""What disks and people do to files: flipped bits, zeros, cuts, nothing left; at seeded places."""

import random
from collections.abc import Iterator


def damaged(content: bytes, flips: int, seed: int = 0) -> Iterator[tuple[str, bytes]]:
    """What was done and what is left, for one file after the other.

    Args:
        content: of the whole file.
        flips: how many files with one flipped bit each.
        seed: of the places.
    """
    draw = random.Random(f"{seed} {len(content)}")
    yield "empty", b""
    for share in (0.3, 0.9):
        yield f"cut at {share}", content[: int(share * len(content))]
    yield "last byte gone", content[:-1]
    start = draw.randrange(len(content))
    length = max(1, min(64, len(content) - start))
    yield f"{length} zeros at {start}", content[:start] + bytes(length) + content[start + length :]
    yield "all zeros", bytes(len(content))
    for _ in range(flips):
        place, bit = draw.randrange(len(content)), draw.randrange(8)
        yield (
            f"bit {bit} of byte {place}",
            content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :],
        )
