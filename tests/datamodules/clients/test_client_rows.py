import pytest
from nested import datamodule
from refusals import refusal
from tiny_world import write_rows

from fedlight import AugmentedInstructionDataModule, InstructionDataModule, Partition, PreferenceDataModule
from fedlight.datamodules.instructions.augmentation import Added, Augmentation
from fedlight.datamodules.rows.canaries import Canaries

ROWS = [
    {"instruction": f"w{n}", "note": "z" * (n % 2), "output": "x", "task": f"u{n % 3}"} for n in range(24)
]
COLUMNS = {"instruction": "instruction", "note": "note", "response": "output", "client": "task"}
KEYS = {"instruction": "q {key} r", "words": [f"w{i}" for i in range(30, 40)], "length": 3}
CANARIES = Canaries(repeats=3, clients=1, seed=4, **KEYS)


class Invented(Augmentation):
    """One row more for each client; keeps what it was shown."""

    needs_public = False

    def augment(self, clients, public, seed):
        self.seen = clients
        return {client: [Added({"instruction": "w39", "response": "z"})] for client in clients}


@pytest.fixture
def build(made):
    settings = {"template": "POST: {instruction} {note} ANSWER:", "columns": COLUMNS}
    settings |= {"partition": Partition("client"), "val_share": 0.25}
    return lambda rows=ROWS, kind=InstructionDataModule, **options: made(kind, rows, **settings | options)


def trained_on(module, client, words):
    return [words(module.tokenizer, module.train_set[i]["ids"]) for i in module.client_indices[client]]


def rendered(row):
    return f"<s> POST: {row['instruction']} {row['note']} ANSWER: {row['response']} </s>".replace("  ", " ")


def test_rows_are_those_that_are_trained_on(build, words):
    module = build()
    assert list(module.client_rows) == ["u0", "u1", "u2"]
    for client, rows in module.client_rows.items():
        assert [list(row) for row in rows] == [["instruction", "note", "response"]] * 6
        assert [rendered(row) for row in rows] == trained_on(module, client, words)
    assert module.planted == {}


def test_unseen_rows_are_those_of_validation_else_those_to_test_on_else_none(build, tmp_path):
    module = build()
    unseen, seen = module.unseen_rows(), [row for rows in module.client_rows.values() for row in rows]
    assert len(unseen) == len(module.val_set) == 6
    assert sorted(row["instruction"] for row in unseen + seen) == sorted(row["instruction"] for row in ROWS)
    assert build(val_share=0.0).unseen_rows() == []
    test = write_rows(tmp_path / "test.jsonl", [{**ROWS[0], "output": text} for text in ("x", "z")])
    module = build(val_share=0.0, test_source=test)  # the first is trained on
    assert module.unseen_rows() == [{"instruction": "w0", "note": "", "response": "z"}]


def test_a_row_on_both_sides_is_not_unseen(build):
    same = [{**ROWS[0], "task": "u1"}, ROWS[0]]
    assert build(same).unseen_rows() == []
    module = build([{**row, "task": client} for row in ROWS for client in ("u0", "u1")])
    trained = {row["instruction"] for rows in module.client_rows.values() for row in rows}
    shared = [row["instruction"] for row in module.unseen_rows()]
    assert len(module.val_set) == 12
    assert len(shared) < 12
    assert not trained & set(shared)


def test_canaries_are_training_rows_of_exactly_one_client(build, words):
    plain, module = build(), build(canaries=CANARIES)
    (client,) = module.planted
    (canary,) = module.planted[client]
    assert list(canary) == ["instruction", "note", "response"]
    for other in plain.client_rows:
        more = [canary] * 3 if other == client else []
        assert module.client_rows[other] == plain.client_rows[other] + more
        assert trained_on(module, other, words) == [rendered(row) for row in module.client_rows[other]]
        assert module.client_sizes()[other] == plain.client_sizes()[other] + len(more)
    assert canary not in module.unseen_rows()
    scored = [words(module.tokenizer, module.val_set[i]["ids"]) for i in range(len(module.val_set))]
    assert scored == [words(plain.tokenizer, plain.val_set[i]["ids"]) for i in range(len(plain.val_set))]
    assert len(module.train_lengths) == len(module.train_set) == 18 + 3
    assert [len(module.train_set[i]["ids"]) for i in range(21)] == module.train_lengths.tolist()


def test_canaries_that_do_not_fit_or_cannot_be_told_apart_are_refused(build):
    with refusal(r"1 of 1 canaries do not fit into max_tokens=9.*lower canaries.length"):
        build(canaries=Canaries(**KEYS, clients=1), max_tokens=9)
    words = ["w1", "w2", *(f"nowhere{i}" for i in range(8))]
    with refusal(r"canaries\.words: the tokenizer does not know 8 of 9 words, such as 'nowhere0'"):
        build(canaries=Canaries(instruction="q {key} r", words=words, length=6))


def test_added_rows_are_nobodys_own(build, words):
    module = build(kind=AugmentedInstructionDataModule, augmentation=Invented(1), canaries=CANARIES)
    (client,) = module.planted
    own = module.client_rows[client]
    assert own[-3:] == module.planted[client] * 3
    seen = module.augmentation.seen[client]  # canaries are rows like others to an augmentation
    assert [row["response"] for row in seen] == [row["response"] for row in own]
    assert {row["client"] for row in seen} == {client}
    assert trained_on(module, client, words) == [*map(rendered, own), "<s> POST: w39 ANSWER: z </s>"]
    assert module.client_sizes() == {name: len(rows) + 1 for name, rows in module.client_rows.items()}


def test_where_rows_have_categories_canaries_have_one_of_their_own(build):
    columns = {"instruction": "instruction", "note": "note", "response": "output", "category": "task"}
    partition = Partition("dirichlet", num_clients=2, alpha=1.0)
    options = {"columns": columns, "partition": partition, "augmentation": Invented(1)}
    module = build(kind=AugmentedInstructionDataModule, canaries=CANARIES, **options)
    (client,) = module.planted
    assert [row["category"] for row in module.augmentation.seen[client][-4:]][1:] == ["canary"] * 3
    assert module.augmentation.seen[client][-4]["category"] in ("u0", "u1", "u2")


def test_added_rows_are_not_unseen(build, tmp_path):
    rows = [{"instruction": word, "note": "", "output": "z"} for word in ("w38", "w39")]
    options = {"val_share": 0.0, "test_source": write_rows(tmp_path / "test.jsonl", rows)}
    module = build(kind=AugmentedInstructionDataModule, augmentation=Invented(1), **options)
    assert [row["instruction"] for row in module.unseen_rows()] == ["w38"]


ABOUT = ("jam", "tea")


def counted(data, split="train"):
    data.setup("fit")
    return {(count.client, count.label): count.rows for count in data.client_counts() if count.split == split}


def test_a_vote_counts_twice_for_a_selector_and_once_for_dpo(tmp_path):
    names = ("prompt", "response_a", "response_b", "choice", "client")
    votes = [(f"which roses {n} ?", f"kind {n}", f"rude {n}", "a", "uv"[n > 4]) for n in range(8)]
    rows = [dict(zip(names, vote, strict=True), about=ABOUT[n % 2]) for n, vote in enumerate(votes)]
    columns = {**{name: name for name in names}, "category": "about"}
    source = write_rows(tmp_path / "rows.jsonl", rows)
    common = {"columns": columns, "partition": Partition("client", min_size=1), "val_share": 0.25}
    for view, each in (("selector", 2), ("dpo", 1)):
        data = datamodule(PreferenceDataModule, source, view=view, **common)
        train, val = counted(data), counted(data, "val")
        both = {key: train.get(key, 0) + val.get(key, 0) for key in {*train, *val}}
        assert both == {
            **{("u", "tea"): 2 * each, ("u", "jam"): 3 * each},
            **{("v", "tea"): 2 * each, ("v", "jam"): 1 * each},
        }
        assert sum(val.values()) == 2 * each
        assert len(data.train_labels) == len(data.train_set)
