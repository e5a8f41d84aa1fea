import numpy as np
import pytest

from fedlight.datamodules.vectors.clusters import Clusters
from fedlight.datamodules.vectors.selection import choose, select_centers


def made_up(counts, dimension=6, seed=0, largest=9):
    """Clients with so many centres each; few sizes, so that there are ties."""
    rng = np.random.default_rng(seed)
    clients = {}
    for number, count in enumerate(counts):
        vectors = rng.normal(size=(count, dimension))
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        clients[f"c{number}"] = Clusters(vectors.astype(np.float32), rng.integers(1, largest, size=count))
    return clients


def written_out(clusters, order, selection="drop_i"):
    """Algorithm 1, line by line, with loops over every chosen centre.

    As its text says, or, with ``keep_n_minus_i``, as its line 9 is printed.
    """
    chosen = {}
    for i, client in enumerate(order):
        centers, sizes = clusters[client]
        summed = []
        for center in centers:
            total = 0.0
            for other, index in chosen.items():
                total += float(np.dot(center.astype(float), clusters[other].centers[index].astype(float)))
            summed.append(total)
        left = sorted(range(len(sizes)), key=lambda j: (-summed[j], sizes[j], j))
        if selection == "drop_i":
            left = left[min(i, len(left) - 1) :]
        elif i > 0:  # line 6 chooses the first one, before the loop
            left = list(reversed(left))[: len(order) - i]
        chosen[client] = min(left, key=lambda j: (-sizes[j], summed[j], j))
    return chosen


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("counts", [(10,) * 12, (1, 4, 2, 10, 3, 1, 7), (2,) * 5, (3,)])
@pytest.mark.parametrize("selection", ["drop_i", "keep_n_minus_i"])
def test_as_written_out(counts, seed, selection):
    clusters = made_up(counts, seed=seed)
    found = select_centers(clusters, seed, selection)
    assert set(found) == set(clusters)
    assert found == written_out(clusters, list(found), selection)


def test_three_clients_by_hand():
    """Topics x, y, z. The first takes x, its largest. The second drops x and takes y, larger than z. The third has
    x, y and z at similarities 1, 1, 0: two are dropped, and z is left."""
    same = Clusters(np.eye(3, dtype=np.float32), np.array([50, 30, 20]))
    assert list(select_centers({"u": same, "v": same, "w": same}, seed=4).values()) == [0, 1, 2]


def test_line_9_as_printed_by_hand():
    """Topics x, y, z and w, three clients alike. The first takes x, its largest. The second has x, y, z and w at
    similarities 1, 0, 0, 0: as printed it keeps N - 1 = 2. x goes, and of the equally similar rest w, the smallest; the
    larger of y and z is y. The third, at 1, 1, 0, 0, keeps N - 2 = 1: of z and w the larger, z."""
    same = Clusters(np.eye(4, dtype=np.float32), np.array([50, 30, 20, 10]))
    clients = {"u": same, "v": same, "w": same}
    assert list(select_centers(clients, 4, "keep_n_minus_i").values()) == [0, 1, 2]


def test_ties():
    # equally large: less similar
    assert choose(np.array([0.5, 0.2, 0.9]), np.array([7, 7, 7]), dropped=0) == 1
    # equally similar: smaller goes
    assert choose(np.array([0.5, 0.5, 0.1]), np.array([3, 9, 1]), dropped=1) == 1
    assert choose(np.array([0.5, 0.5]), np.array([3, 3]), dropped=0) == 0


def test_the_order_of_clients_is_the_seeds_and_not_the_mappings():
    clusters = made_up((3,) * 6)
    turned = dict(reversed(list(clusters.items())))
    assert list(select_centers(clusters, 5).items()) == list(select_centers(turned, 5).items())
    firsts = {next(iter(select_centers(clusters, seed))) for seed in range(40)}
    assert firsts == set(clusters)


def test_nobody_and_what_does_not_fit():
    assert select_centers({}, seed=0) == {}
    good = Clusters(np.eye(3, dtype=np.float32), np.ones(3, dtype=np.int64))
    wrong = [
        (Clusters(np.eye(2, dtype=np.float32), np.ones(2, dtype=np.int64)), "2 dimensions, others of 3"),
        (Clusters(np.empty((0, 3), np.float32), np.empty(0, np.int64)), "at least one cluster"),
        (Clusters(np.eye(3, dtype=np.float32), np.ones(2, dtype=np.int64)), "one size for each"),
    ]
    for clusters, complaint in wrong:
        with pytest.raises(ValueError, match=complaint):
            select_centers({"u": good, "v": clusters}, seed=0)
    with pytest.raises(ValueError, match=r"selection='keep_i': did you mean '.*keep_n_minus_i|drop_i"):
        select_centers({"u": good}, 0, "keep_i")
