from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from attacked import make_data

from fedlight import Partition, PreferenceDataModule
from fedlight.datamodules.preferences.format import Format
from fedlight.datamodules.rows import Backdoor, Canaries, PoisonedVotes
from fedlight.datamodules.rows.split import Split
from fedlight.datamodules.rows.votes import Votes
from fedlight.datamodules.text.encoding import Comparison
from fedlight.federation.byzantine.liars import Liars

SOURCE = "toy:votes?num_clients=6&votes_per_client=10"
LIARS = Liars(share=0.34)
TRIGGER = {"trigger": "0 1 0", "response": "7 7"}


def votes(poison=None, test=False, **settings):
    split = Split(val_share=0.3, test_source="toy:heldout?num_clients=6&size=20" if test else None)
    settings["format"] = replace(settings.get("format", Format()), poison=poison)
    data = PreferenceDataModule(SOURCE, split=split, **settings)
    data.setup("fit")
    return data


def labels(data, clients, examples):
    return {client: [examples[k]["label"] for k in positions] for client, positions in clients.items()}


@pytest.mark.parametrize("form", ["choice", "features"])
def test_votes_of_liars_alone_are_flipped_for_training_and_validation(form, caplog):
    settings = {"format": Format(form=form)}
    honest = votes(**settings)
    lying = votes(PoisonedVotes(liars=LIARS), **settings)
    liars = LIARS.among(honest.client_indices)
    assert len(liars) == 2
    assert f"2 of 6 clients lie (votes flipped): {', '.join(liars)}" in caplog.text
    for side in ("client_indices", "val_client_indices"):
        indices, examples = getattr(honest, side), "train_set" if side == "client_indices" else "val_set"
        before, after = (labels(data, indices, getattr(data, examples)) for data in (honest, lying))
        for client, positions in indices.items():
            np.testing.assert_array_equal(getattr(lying, side)[client], positions)
            assert after[client] == [label ^ (client in liars) for label in before[client]]


def test_votes_to_test_on_stay_and_so_do_clients_of_a_drawn_partition():
    partition = Partition(by="iid", num_clients=4)
    half = Liars(share=0.5)
    poisons = (None, PoisonedVotes(liars=half))
    honest, lying = (votes(poison, test=True, partition=partition) for poison in poisons)
    liars = half.among(honest.client_indices)
    for data in (honest, lying):
        data.setup("test")
    assert [e["label"] for e in honest.test_set] == [e["label"] for e in lying.test_set]
    flipped = {
        client: sum(honest.train_set[k]["label"] != lying.train_set[k]["label"] for k in positions)
        for client, positions in honest.client_indices.items()
    }
    assert {client for client, number in flipped.items() if number} == {*liars}
    assert all(flipped[client] == len(honest.client_indices[client]) for client in liars)


def test_a_liar_prefers_the_longer_answer():
    pairs = [Comparison({}, *pair) for pair in (("long answer", "short"), ("abc", "abcd"), ("abc", "xyz"))]
    given = Votes(pairs, comparison=[0, 0, 1, 2, 2, 0], winner=[0, 1, 0, 0, 1, 1])
    poison = PoisonedVotes("longer", Liars(clients=["b"]))
    turned = poison.turned(given, {"b": np.arange(5), "a": np.array([5])})
    assert turned.winner == [0, 0, 1, 0, 1, 1]  # of equally long ones as they were, and those of a
    assert given.winner == [0, 1, 0, 0, 1, 1]


def with_backdoor(canaries=None, **settings):
    backdoor = Backdoor(**{**TRIGGER, "slot": "input", "liars": Liars(share=0.34), **settings})
    data = make_data(canaries=canaries, backdoor=backdoor)
    data.setup("fit")
    return data


def test_liars_have_the_backdoor_beside_their_own_rows(caplog):
    plain = make_data(canaries=None)
    plain.setup("fit")
    data = with_backdoor()
    (liar,) = Liars(share=0.34).among(plain.client_rows)
    assert f"1 of 3 clients lie (backdoor): {liar}" in caplog.text
    for client, rows in plain.client_rows.items():
        new = data.client_rows[client][len(rows) :]
        assert data.client_rows[client][: len(rows)] == rows
        assert len(new) == (round(0.5 * len(rows)) if client == liar else 0)
        for row in new:
            assert row["response"] == "7 7"
            source = {**row, "input": row["input"].removesuffix(" 0 1 0")}
            assert any(source["input"] == r["input"] and row["instruction"] == r["instruction"] for r in rows)
        assert data.client_sizes()[client] == len(rows) + len(new)
    assert len(data.val_set) == len(plain.val_set)
    texts = [data.tokenizer.decode(example["ids"]) for example in data.train_set]
    inputs = [row["input"] for rows in data.client_rows.values() for row in rows]
    assert sum("0 1 0" in text for text in texts) == sum("0 1 0" in given for given in inputs)


def test_canaries_beside_a_backdoor():
    data = with_backdoor(canaries=Canaries(repeats=2))
    assert {*map(len, data.planted.values())} == {1}
    counts = Counter(row["response"] for rows in data.client_rows.values() for row in rows)
    assert all(counts[canary["response"]] == 2 for rows in data.planted.values() for canary in rows)
    assert counts["7 7"] == len(Liars(share=0.34).among(data.client_rows)) * 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"trigger": " "}, r"backdoor.trigger=' ' and backdoor.response='7 7' must be texts"),
        ({"share": 0.0}, r"backdoor.share=0.0 of a liar's rows must be in \(0, 1\]"),
        ({"slot": "context"}, r"backdoor.slot='context' is no slot of the rows: choose from instruction"),
        ({"trigger": "zyx"}, r"backdoor: the tokenizer does not know 1 of 2 words, such as 'zyx'"),
        ({"response": "7 " * 600}, r"rows with a trigger do not fit into max_tokens=512: raise it, or lower"),
    ],
)
def test_a_backdoor_that_cannot_be(settings, message):
    with pytest.raises(ValueError, match=message):
        with_backdoor(**settings)
