"""Updates of a few numbers, what aggregations make of them, and rounds whose parts are merged."""

import torch
from memories import through_a_file

from fedlight.federation.client import Update


def update(client, weight=1.0, **tensors):
    """Return an update in fp64."""
    return Update(client, {k: torch.as_tensor(v, dtype=torch.float64) for k, v in tensors.items()}, weight)


def result(aggregation, *updates):
    """Return the numbers that a round of updates gives, by name."""
    for each in updates:
        aggregation.add(each)
    return {name: value.tolist() for name, value in aggregation.result().items()}


def bits(aggregation, *updates):
    """Return the bytes that a round of updates gives, by name."""
    for each in updates:
        aggregation.add(each)
    torch.manual_seed(1)  # of noise
    return {name: value.double().numpy().tobytes() for name, value in aggregation.result().items()}


def assert_parts_change_no_bit(make, updates, rng):
    """Check that any order and any cut of a round into parts, whose pieces go through files, gives the same bits."""
    expected = bits(make(), *updates)
    for count in range(1, 7):
        parts = [make() for _ in range(count)]
        for index in rng.permutation(len(updates)):
            parts[rng.integers(count)].add(updates[index])
        rng.shuffle(parts)
        first, *others = parts
        for other in others:
            for piece in other.pieces():
                first.merge(through_a_file(piece))
            assert other.result() == {}
        assert bits(first) == expected
    assert first.result() == {}
