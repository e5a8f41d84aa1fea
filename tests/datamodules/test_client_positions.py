"""Whose test examples stand where, and the known groups of clients."""

import json

import pytest
from torch.utils.data import DataLoader

from fedlight import conf
from fedlight.datamodules.partition import Partition
from fedlight.datamodules.preferences import PreferenceDataModule
from fedlight.datamodules.rows import RowsError

COLUMNS = {name: name for name in ("prompt", "response_a", "response_b", "choice", "client")}


def make_rows(count, clients=3, first=0):
    """Vote i is client u{i % clients}'s on a post that begins with w{i} and has another length than its neighbours."""
    return [
        {
            **{"prompt": f"w{first + i}" + " x" * (7 * i % 5), "response_a": "good", "response_b": "bad"},
            **{
                "choice": "ab"[i % 2],
                "client": f"u{i % clients}",
                "taste": "warm" if i % clients else "terse",
            },
        }
        for i in range(count)
    ]


@pytest.fixture
def build(tmp_path, causal):
    def build(train, test=None, **options):
        files = {}
        for name, rows in (("source", train), ("test_source", test)):
            if rows is not None:
                files[name] = str(tmp_path / f"{name}.jsonl")
                (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        settings = {"columns": COLUMNS, "tokenizer": causal, "eval_batch_size": 4}
        settings |= {"choice_template": "POST: {prompt} A: {response_a} B: {response_b} CHOICE:"}
        settings |= {"generation_template": "POST: {prompt} ANSWER:"}
        return PreferenceDataModule(**files, **(settings | options))

    return build


def posts_in_order(datamodule, loader):
    """The first word of each example's post, in the order in which the loader gives them."""
    assert isinstance(loader, DataLoader)
    batches = [batch.get("chosen", batch) for batch in loader]
    rows = [ids.tolist() for batch in batches for ids in batch["input_ids"]]
    return [datamodule.tokenizer.convert_ids_to_tokens(row)[2] for row in rows]


@pytest.mark.parametrize(("view", "twice"), [("selector", 2), ("dpo", 1), ("sft", 1)])
def test_test_examples_by_client(build, view, twice):
    test = make_rows(14)
    datamodule = build(make_rows(6, first=20), test, view=view)
    datamodule.setup("test")
    found = datamodule.test_client_indices
    posts = posts_in_order(datamodule, datamodule.test_dataloader())
    assert list(found) == ["u0", "u1", "u2"]
    for client, positions in found.items():
        assert (positions[1:] > positions[:-1]).all()
        own = [row["prompt"].split()[0] for row in test if row["client"] == client]
        assert sorted(posts[position] for position in positions) == sorted(own * twice)
    assert datamodule.val_client_indices is None  # of the training rows, which were not read
    assert (datamodule.test_set.lengths[1:] >= datamodule.test_set.lengths[:-1]).all()


def test_positions_of_votes_that_do_not_fit_are_not_counted(build):
    test = make_rows(9)
    test[0]["response_a"] = "long " * 60
    datamodule = build(make_rows(6), test, max_tokens=20)
    datamodule.setup("test")
    assert {client: len(own) for client, own in datamodule.test_client_indices.items()} == {
        "u0": 4,
        "u1": 6,
        "u2": 6,
    }


@pytest.mark.parametrize("why", ["no column", "clients are made"])
def test_without_clients_of_a_column_nobody_owns_a_test_example(build, why):
    test = [{name: value for name, value in row.items() if name != "client"} for row in make_rows(5)]
    partition = None if why == "no column" else Partition("iid", num_clients=2)
    datamodule = build(make_rows(6), test if why == "no column" else make_rows(5), partition=partition)
    datamodule.setup("test")
    assert datamodule.test_client_indices is None
    assert len(datamodule.test_set) == 10


def test_known_groups_reach_no_model(build):
    datamodules = [
        build(make_rows(9), make_rows(4, first=20), columns=columns, val_share=0.3)
        for columns in (COLUMNS, COLUMNS | {"group": "taste"})
    ]
    for datamodule in datamodules:
        datamodule.setup("fit")
    without, with_groups = datamodules
    assert without.client_groups is None
    assert with_groups.client_groups == {"u0": "terse", "u1": "warm", "u2": "warm"}
    assert [example["ids"].tolist() for example in with_groups.train_set] == [
        example["ids"].tolist() for example in without.train_set
    ]


def test_test_rows_need_no_group_and_add_those_that_they_have(build):
    columns = COLUMNS | {"group": "taste"}
    bare = [{name: value for name, value in row.items() if name != "taste"} for row in make_rows(4)]
    datamodule = build(make_rows(6, clients=2), bare, columns=columns)
    datamodule.setup("test")
    assert datamodule.client_groups is None
    datamodule = build(make_rows(6, clients=2), make_rows(6), columns=columns)
    datamodule.setup("fit")
    datamodule.setup("test")
    assert datamodule.client_groups == {"u0": "terse", "u1": "warm", "u2": "warm"}


def test_a_client_has_one_group(build):
    columns = COLUMNS | {"group": "taste"}
    rows = make_rows(6)
    other = {**rows[0], "taste": "warm"}
    complaint = r"source.jsonl: the client 'u0' has two groups, 'terse' and 'warm'. Map columns.group to"
    with pytest.raises(RowsError, match=complaint):
        build([*rows, other], columns=columns).setup("fit")
    datamodule = build(rows, [other], columns=columns)
    datamodule.setup("fit")
    with pytest.raises(RowsError, match="test_" + complaint):
        datamodule.setup("test")


def test_clients_that_are_made_have_no_known_group(build):
    datamodule = build(
        make_rows(6), columns=COLUMNS | {"group": "taste"}, partition=Partition("iid", num_clients=2)
    )
    datamodule.setup("fit")
    assert datamodule.client_groups is None


def test_the_embedded_world_knows_its_groups():
    datamodule = PreferenceDataModule(
        "toy:votes?num_clients=6&votes_per_client=4", test_source="toy:heldout?num_clients=6&size=12"
    )
    datamodule.setup("test")
    assert sorted(datamodule.client_groups.values()) == ["terse"] * 2 + ["thorough"] * 2 + ["warm"] * 2
    assert [len(own) for own in datamodule.test_client_indices.values()] <= [4] * 6
    assert "group: group" in conf.path("data/toy_votes.yaml").read_text()
