import math

import numpy as np
import pytest
from refusals import refusal

from fedlight.datamodules.clients.partition import Partition, by_key, dirichlet, iid
from fedlight.datamodules.clients.splits import hold_out, share_out


def everything(clients):
    return sorted(np.concatenate(list(clients.values())).tolist())


def test_iid_deals_out_everything_once_and_depends_on_the_seed_alone():
    split = iid(103, 10, seed=0)
    assert everything(split) == list(range(103))
    assert sorted({len(own) for own in split.values()}) == [10, 11]
    assert all((np.diff(own) > 0).all() for own in split.values())
    np.random.seed(99)
    assert iid(103, 10, seed=0)["c3"].tolist() == split["c3"].tolist()
    assert iid(103, 10, seed=1)["c3"].tolist() != split["c3"].tolist()


def test_iid_keeps_the_examples_of_a_prompt_together():
    prompts = np.arange(60) // 3
    split = Partition(by="iid", num_clients=4).split([], [], prompts, seed=0)
    of_clients = [set(prompts[own]) for own in split.values()]
    assert sum(map(len, of_clients)) == len(set.union(*of_clients)) == 20
    assert sorted(len(own) for own in split.values()) == [15] * 4
    with refusal("20 prompts"):
        iid(60, 21, 0, prompts)


def test_more_clients_than_examples():
    with refusal(r"num_clients is 11, but there are 10 examples: a client would be empty"):
        iid(10, 11, seed=0)
    with refusal(r"below min_size=4"):
        Partition("iid", num_clients=3, min_size=4).split([], [], range(10), seed=0)


def test_by_key_drops_small_clients_and_keeps_the_order_of_rows():
    split = by_key(["v", "u", "w", "u", "v", "u"], min_size=2)
    assert {client: own.tolist() for client, own in split.items()} == {"u": [1, 3, 5], "v": [0, 4]}
    with refusal(r"min_size=4 is above the 3 examples of the largest client: lower it"):
        by_key(["v", "u", "w", "u", "v", "u"], min_size=4)


@pytest.mark.parametrize(
    "split", [by_key, lambda values: dirichlet(values, num_clients=2, alpha=1.0, seed=0)]
)
def test_a_column_of_values_is_a_row_and_a_table_is_refused(split):
    values = np.array(["u", "v", "u", "w"])
    rows, columns = (
        {client: indices.tolist() for client, indices in split(given).items()}
        for given in (values, values[:, None])
    )
    assert rows == columns
    with refusal(r"has the shape \(4, 3\): give one value for each example"):
        split(np.eye(4, 3))


def test_dirichlet_gives_every_client_its_minimum_and_no_prompt_to_two():
    rng = np.random.default_rng(0)
    groups = rng.integers(0, 120, 600)
    labels = np.array([f"d{group % 6}" for group in groups])
    split = dirichlet(labels, 12, 0.3, seed=5, min_size=4, groups=groups)
    assert everything(split) == list(range(600))
    assert min(len(own) for own in split.values()) >= 4
    owners = [set(groups[own]) for own in split.values()]
    assert sum(len(owned) for owned in owners) == len(set(groups))


def test_small_alpha_means_few_categories_per_client():
    labels = np.repeat([f"d{i}" for i in range(10)], 100)

    def mean_largest_share(alpha):
        clients = dirichlet(labels, 10, alpha, seed=0).values()
        return np.mean([np.unique(labels[own], return_counts=True)[1].max() / len(own) for own in clients])

    # Even shares over ten categories would be 0.1.
    assert mean_largest_share(0.01) > 0.8
    assert mean_largest_share(100.0) < 0.25


def test_dirichlet_refuses_what_cannot_be():
    labels = ["x"] * 5 + ["y"] * 5
    for alpha in (0, math.nan):
        with refusal(f"alpha is {alpha}"):
            dirichlet(labels, 2, alpha, seed=0)
    with refusal(r"6 clients with min_size=2 need 12 examples, but there are 10"):
        dirichlet(labels, 6, 1.0, seed=0, min_size=2)
    with refusal(r"every example has the category 'x'.*partition.by=iid"):
        dirichlet(["x"] * 10, 2, 1.0, seed=0)
    with refusal(r"100 draws. Lower num_clients"):
        dirichlet(labels, 5, 0.01, seed=0, min_size=2, groups=[0] * 5 + [1] * 5)


def test_a_split_needs_its_column():
    with refusal(r"partition.by=client needs the column map to name `client`"):
        Partition("client").split([], [], range(3), seed=0)
    with refusal(r"partition.by=dirichlet needs the column map to name `category`"):
        Partition("dirichlet").split([], [], range(3), seed=0)


@pytest.mark.parametrize(
    ("pairs", "share", "validation"),
    [
        *(
            (pairs, 0.05, number)
            for pairs, number in ((1, 1), (2, 1), (39, 1), (40, 2), (100, 5), (9000, 200))
        ),
        (100, 0.29, 29),
    ],
)
def test_validation_sizes(pairs, share, validation):
    train, val = hold_out({"u": np.arange(pairs)}, np.arange(pairs), share, 200, seed=0)
    assert len(val["u"]) == validation
    assert len(train["u"]) == max(pairs - validation, 1)


def test_no_key_on_both_sides():
    keys = np.array([0, 1, 2, 0, 1, 2, 3, 0])
    train, val = hold_out({"u": np.arange(8)}, keys, 0.25, 200, seed=1)
    assert not set(keys[train["u"]]) & set(keys[val["u"]])
    assert len(set(keys[val["u"]])) == 1
    assert sorted([*train["u"], *val["u"]]) == list(range(8))


def test_a_client_s_validation_does_not_depend_on_the_others():
    both = {"u": np.arange(50), "v": np.arange(50, 90)}
    keys = np.arange(90)
    found, alone = (hold_out(clients, keys, 0.1, 200, 0)[1]["v"] for clients in (both, {"v": both["v"]}))
    assert found.tolist() == alone.tolist()


def test_share_out_counts_what_it_drops():
    partition, rows = Partition("client", min_size=2), np.arange(6)
    split = share_out(partition, [*"uuuvww"], [*"xxxxxy"], rows, rows, 0.0, 200, seed=0)
    assert (sorted(split.train), split.val) == (["u", "w"], None)
    assert (split.dropped_clients, split.single_category_clients) == (1, 1)
    assert (
        share_out(partition, [*"uu"], [], rows[:2], rows[:2], 0.0, 200, seed=0).single_category_clients
        is None
    )
