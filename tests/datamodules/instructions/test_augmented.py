import json
from functools import partial

import numpy as np
import pytest
from refusals import refusal
from tiny_world import read_lines, write_rows

from fedlight import AugmentedInstructionDataModule, Partition, Visit
from fedlight.datamodules.instructions.augmentation import Added, Augmentation, settings_of
from fedlight.datamodules.instructions.augmented import check_added, describe_added
from fedlight.datamodules.rows.exclusion import Holdout
from fedlight.datamodules.rows.rows import RowsError
from fedlight.datamodules.vectors.encoders import HashedEncoder

TEMPLATE = "POST: {instruction} ANSWER:"
COLUMNS = {"instruction": "instruction", "response": "output"}
OWN = [{"instruction": f"w{i}", "output": "x", "task": f"u{i % 2}"} for i in range(8)]
PUBLIC = [{"instruction": f"w{i}", "output": "y"} for i in range(10, 20)]


class Every(Augmentation):
    """Client number n gets the public rows n, n + 1, ...; counts its calls and keeps what it was shown."""

    def __init__(self, number=3, step=1, invented=()):
        super().__init__(number)
        self.step, self.invented = step, invented
        self.calls = 0

    def augment(self, clients, public, seed):
        self.calls += 1
        self.seen = {client: list(rows) for client, rows in clients.items()}, list(public), seed
        added = {}
        for at, client in enumerate(clients):
            rows = range(at * self.step, min(len(public), at * self.step + self.number))
            invented = [Added({"instruction": "w30", "response": text}) for text in self.invented]
            added[client] = [Added(public[row], row, 1 / (1 + row)) for row in rows] or invented
        return added

    def record(self):
        return {"calls": self.calls}


class Inventor(Every):
    needs_public = False


@pytest.fixture
def build(made, tmp_path):
    def build(augmentation, own=OWN, public=PUBLIC, **options):
        settings = {"template": TEMPLATE, "batch_size": 2, "columns": COLUMNS, "augmentation": augmentation}
        settings |= {"partition": Partition("iid", 2), "val_share": 0.0, **options}
        if public is not None:
            settings.setdefault("public_source", write_rows(tmp_path / "public.jsonl", public))
        return made(AugmentedInstructionDataModule, own, **settings)

    return build


def texts(module, client, words):
    """What a client trains on, as text, from the batches of one pass."""
    rows = [module.train_set[row] for row in module.client_indices[client]]
    return [words(module.tokenizer, row["ids"]).removeprefix("<s> POST: ") for row in rows]


def test_own_rows_come_first_then_those_added_best_first(build, words):
    module = build(Every(number=2))
    own = [[row["instruction"] for row in rows] for rows in module.augmentation.seen[0].values()]
    added = ["w10 ANSWER: y </s>", "w11 ANSWER: y </s>"]
    assert texts(module, "c0", words) == [f"{w} ANSWER: x </s>" for w in own[0]] + added
    assert texts(module, "c1", words)[len(own[1]) :] == ["w11 ANSWER: y </s>", "w12 ANSWER: y </s>"]
    assert module.client_sizes() == {"c0": 6, "c1": 6}
    assert len(module.train_set) == len(module.train_lengths) == len(module.train_labelled) == 12
    assert [(row.row, row.score) for row in module.added["c1"]] == [(1, 0.5), (2, 1 / 3)]


def test_a_public_row_of_several_clients_is_stored_once(build):
    module = build(Every(number=2, step=0))
    assert (len(module.train_set), len(module.train_set.encoded.table)) == (12, 8 + 2)


def test_lengths_are_those_of_the_rows(build):
    module = build(Every(number=3))
    assert module.train_lengths.tolist() == [len(module.train_set[i]["ids"]) for i in range(14)]
    shapes = module.batch_shapes(Visit("c0", 3), round_idx=0)
    assert [(shape.examples, shape.tokens) for shape in shapes] == [(2, 6)] * 3


def test_the_augmentation_sees_training_rows_alone(build):
    module = build(Every(), val_share=0.25)
    clients, public, seed = module.augmentation.seen
    assert {client: len(rows) for client, rows in clients.items()} == {"c0": 3, "c1": 3}
    seen = {row["instruction"] for rows in clients.values() for row in rows}
    assert len(module.val_set) == 2
    scored = {int(module.val_set[i]["ids"][2]) for i in range(2)}
    assert not scored & {int(module.tokenizer.convert_tokens_to_ids(word)) for word in seen}
    assert (len(public), seed) == (10, 0)


def test_what_is_left_out_of_the_public_rows(build, caplog):
    own = [{"instruction": f"w{i}", "output": "x"} for i in range(3)]
    public = [
        *PUBLIC[:2],
        {"instruction": "w10", "output": "z"},  # another answer: another row
        {"instruction": "w10", "output": "y"},
        {"instruction": "w1", "output": "x"},  # a client's
        {"instruction": "w12", "output": "x " * 30},
        {"instruction": "w13", "output": ""},
    ]
    one = Partition("iid", 1)
    module = build(Every(number=9), own, [public[-1], *public], max_tokens=20, partition=one)
    assert [row["instruction"] for row in module.augmentation.seen[1]] == ["w10", "w11", "w10"]
    assert "4 public rows of 1 source; left out: 0 repeated, 1 equal to a client's, 0 asked in" in caplog.text
    assert "1 longer than max_tokens=20" in caplog.text
    assert "8 rows, 5 examples; left out: 2 missing, 1 duplicates" in caplog.text
    assert "Every: 3 to 3 rows for each client" in caplog.text
    assert "fewer than number=9 for 1 of 1 clients: only 4 rows are public" in caplog.text


def test_rows_drawn_as_private_leave_the_rest_public(build):
    module = build(Every(number=2), OWN, None, private_rows=4)
    clients, public, _ = seen = module.augmentation.seen
    private = {row["instruction"] for rows in clients.values() for row in rows}
    assert [len(rows) for rows in (*clients.values(), public)] == [2, 2, 4]
    assert private | {row["instruction"] for row in public} == {f"w{i}" for i in range(8)}
    assert build(Every(number=2), OWN, None, private_rows=4).augmentation.seen == seen
    assert build(Every(number=2), OWN, None, private_rows=4, seed=1).augmentation.seen[0] != clients


def test_private_rows_and_further_sources(build, tmp_path):
    more = write_rows(tmp_path / "more.jsonl", [{"q": "w20", "a": "z", "k": "far"}])
    module = build(
        Every(number=2),
        OWN,
        private_rows=4,
        public_source=[write_rows(tmp_path / "public.jsonl", PUBLIC), more],
        public_columns=[COLUMNS, {"instruction": "q", "response": "a", "category": "k"}],
    )
    assert len(module.public.rows) == 4 + 10 + 1
    assert module.public.rows[-1] == {"instruction": "w20", "response": "z", "category": "far"}
    assert module.public.sources[-2:] == [str(tmp_path / "public.jsonl"), more]


def test_too_long_rows_are_not_drawn_as_private(build):
    own = [{"instruction": f"w{i}", "output": "x " * (20 if i % 2 else 1)} for i in range(12)]
    module = build(Every(number=2), own, None, private_rows=5, max_tokens=10)
    seen = [row["instruction"] for rows in module.augmentation.seen[0].values() for row in rows]
    assert len(seen) == 5
    assert {int(word[1:]) % 2 for word in seen} == {0}
    with refusal(r"private_rows=7, but 6 of the 12 rows .*: lower private_rows or raise"):
        build(Every(number=2), own, None, private_rows=7, max_tokens=10)


def test_without_an_augmentation_clients_have_their_own_rows(build):
    module = build(None)
    assert module.client_sizes() == {"c0": 4, "c1": 4}
    assert module.added == {"c0": [], "c1": []}


def test_invented_rows(build, words, caplog):
    module = build(Inventor(number=2, invented=("z", "x " * 40)), public=None, max_tokens=12)
    assert texts(module, "c0", words)[-1] == "w30 ANSWER: z </s>"
    assert module.client_sizes() == {"c0": 5, "c1": 5}
    assert "rows: 0 asked in validation or held out, 2 longer than max_tokens=12" in caplog.text


def test_an_empty_public_set_is_refused(build, tmp_path):
    with refusal(r"Every selects from public rows, but there are none: set public_s"):
        build(Every(), public=None)
    with pytest.raises(RowsError, match=r"there are none.*left out: 0 public rows.*8 equal to a client's"):
        build(Every(), public=OWN)
    with pytest.raises(RowsError, match=r"there are none.*1 too long"):
        build(Every(), public=[{"instruction": "w1", "output": "x " * 60}], max_tokens=20)
    with pytest.raises(RowsError, match="no rows"):
        build(Every(), public=[])


def test_settings_that_cannot_be_are_refused(build, tmp_path):
    with refusal(r"public_split has 2 entries, but public_source has 1"):
        build(Every(), public_split=["train", "test"])
    with refusal(r"public_columns.0 has no 'response'"):
        build(Every(), public_columns=[{"response": ""}])
    with refusal(r"private_rows=0 must be at least 1"):
        build(Every(), private_rows=0)
    with pytest.raises(ValueError, match=r"number=0 must be at least 1"):
        Nearest(HashedEncoder(8), 0)


def test_alpaca_rows_without_an_input_column(build):
    module = build(Every(number=1), template="alpaca", columns={**COLUMNS, "input": ""})
    assert module.public.rows[0] == {"instruction": "w10", "input": "", "response": "y"}
    with refusal(r"columns has no 'instruction'. Set columns.instruction to"):
        build(Every(), columns={**COLUMNS, "instruction": ""})


@pytest.fixture
def record(build, tmp_path):
    """Build with a folder for the record."""
    return partial(build, augmentation_folder=str(tmp_path / "record"))


def test_the_record_saves_the_second_run_from_choosing_again(record, tmp_path, caplog):
    first = record(Every(number=2))
    second = record(Every(number=2))
    assert (first.augmentation.calls, second.augmentation.calls) == (1, 0)
    assert second.added == first.added
    assert "rows added by an earlier run with the same settings" in caplog.text
    for name in first.client_indices:
        np.testing.assert_array_equal(first.client_indices[name], second.client_indices[name])
    ids = [[each.train_set[i]["ids"].tolist() for i in range(12)] for each in (first, second)]
    assert ids[0] == ids[1]
    assert read_lines(tmp_path / "record/added.jsonl")[2] == {
        **{"client": "c1", "rank": 0, "row": 1, "score": 0.5, "source": str(tmp_path / "public.jsonl")},
        "fields": {"instruction": "w11", "response": "y"},
    }
    assert [row["client"] for row in read_lines(tmp_path / "record/private.jsonl")] == ["c0"] * 4 + ["c1"] * 4
    notes = json.loads((tmp_path / "record/settings.json").read_text())["notes"]
    assert notes == {"public_rows": 10, "calls": 1}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": 1}, "private rows, seed"),
        ({"max_tokens": 100}, "max_tokens"),
        ({"own": OWN[:7]}, "private rows"),
        ({"public": PUBLIC[:9]}, "public rows"),
        ({"val_share": 0.25}, "private rows"),
        ({"template": "{instruction} ANSWER:"}, "template"),
    ],
)
def test_what_changes_the_rows_is_chosen_anew(record, caplog, change, named):
    record(Every(number=2))
    assert record(Every(number=2), **change).augmentation.calls == 1
    assert f"not used: made with other {named}\n" in caplog.text
    assert record(Every(number=2), **change).augmentation.calls == 0


def test_another_augmentation_is_asked_anew(record):
    for augmentation, calls in ((Every(2), 1), (Every(3), 1), (Every(3), 0), (Every(3, step=2), 1)):
        assert record(augmentation).augmentation.calls == calls


@pytest.mark.parametrize("damage", ["added.jsonl", "settings.json"])
def test_a_damaged_record_is_not_used(record, tmp_path, caplog, damage):
    record(Every(number=2))
    file = tmp_path / "record" / damage
    file.write_bytes(file.read_bytes()[:-20])
    assert record(Every(number=2)).augmentation.calls == 1
    assert f"not used: {damage} is damaged" in caplog.text


def test_a_folder_that_takes_no_record_is_refused_before_anything_is_chosen(build, tmp_path):
    (tmp_path / "file").touch()
    augmentation = Every()
    with pytest.raises(OSError, match=r"augmentation_folder=.*record cannot be written \("):
        build(augmentation, augmentation_folder=str(tmp_path / "file/record"))
    assert augmentation.calls == 0


def test_rows_that_a_clients_rows_choose_are_not_by_lot(build):
    with refusal(r"what Every learns from a client's rows: leave data\.augmentation out"):
        build(Every()).draw_by_lot()
    build(None).draw_by_lot()


@pytest.mark.parametrize(
    ("public_columns", "column", "setting"),
    [
        ({"instruction": "task", "response": "output"}, "task", "public_columns"),
        ([{"instruction": "task", "response": "output"}], "task", "public_columns.0"),
        (None, "question", "public_columns"),
    ],
)
def test_the_setting_of_a_missing_public_column_is_named(build, public_columns, column, setting):
    own = [{"question": f"w{i}", "output": "x"} for i in range(4)]
    columns = {"instruction": "question", "response": "output"}
    with pytest.raises(RowsError, match=rf"no column '{column}'.*Set {setting}.instruction to one of them"):
        build(Every(1), own, columns=columns, public_columns=public_columns)


NEAR_AND_FAR = [
    {"instruction": f"w{i}", "output": "x", "task": "far" if i < 2 else "near"} for i in range(10)
]
FAR = Holdout("task", ["far"])


class AllWords(Augmentation):
    """Gives every client, whatever it has, a row for each of the questions w0 to w19: invented, or the public one."""

    calls = 0

    def __init__(self, invents):
        super().__init__(number=50)
        self.invents, self.needs_public = invents, not invents

    def augment(self, clients, public, seed):
        self.calls += 1
        invented = [Added({"instruction": f"w{i}", "response": "y"}) for i in range(20)]
        rows = invented if self.invents else [Added(fields, row) for row, fields in enumerate(public)]
        return dict.fromkeys(clients, rows)


@pytest.mark.parametrize("invents", [False, True])
def test_what_is_held_out_or_asked_in_validation_comes_back_neither_as_public_nor_as_generated_rows(
    build, invents, caplog
):
    public = None if invents else [{"instruction": f"w{i}", "output": "y"} for i in range(20)]
    module = build(AllWords(invents), NEAR_AND_FAR, public, val_share=0.25, holdout=FAR)
    trained, scored = (
        {module.tokenizer.decode(part[i]["ids"]).split()[2] for i in range(len(part))}
        for part in (module.train_set, module.val_set)
    )
    assert trained == {f"w{i}" for i in range(2, 20)} - scored
    assert {client: len(rows) for client, rows in module.added.items()} == {"c0": 16, "c1": 16}
    if invents:
        assert "of the generated rows: 8 asked in validation or held out, 0 longer than" in caplog.text
    else:
        assert (module.public.asked, module.public.private, len(scored)) == (4, 0, 2)


def test_a_record_of_generated_rows_is_made_anew_when_others_are_held_out(record, caplog):
    record(AllWords(True), NEAR_AND_FAR, None)
    again = record(AllWords(True), NEAR_AND_FAR, None)
    assert (again.augmentation.calls, len(again.added["c0"])) == (0, 20)
    assert len(record(AllWords(True), NEAR_AND_FAR, None, holdout=FAR).added["c0"]) == 18
    assert "not used: made with other private rows, validation rows" in caplog.text


class Nearest(Augmentation):
    without_effect = ("folder",)

    def __init__(self, encoder, number, folder=None):
        super().__init__(number)
        self.encoder, self.folder = encoder, folder

    def augment(self, clients, public, seed):
        return {}


class Teller(Nearest):
    """Takes something that says itself what it is, and something that does not."""

    def __init__(self, teller, holdouts, number):
        self.teller, self.holdouts, self.number = teller, holdouts, number


class Told:
    secret = "key"

    def settings(self):
        return {"class": "Told", "model": "m"}


def test_settings_are_the_arguments_of_the_constructor():
    settings = Nearest(HashedEncoder(8, seed=1), 5, folder="somewhere").settings()
    assert settings == {"class": "Nearest", "encoder": HashedEncoder(8, seed=1).identity, "number": 5}
    assert Nearest(HashedEncoder(8, seed=2), 5).settings() != settings


def test_settings_of_objects_in_objects():
    settings = Teller(Told(), [Holdout("c", ["v"])], 2).settings()
    assert settings["teller"] == {"class": "Told", "model": "m"}
    assert settings["holdouts"] == [{"class": "Holdout", "column": "c", "values": ["v"]}]


def test_an_argument_that_is_not_kept_is_found():
    class Forgets:
        def __init__(self, kept, lost):
            self.kept = kept

    with pytest.raises(AttributeError, match="lost"):
        settings_of(Forgets(1, 2))


def added(*rows, score=0.5):
    return [Added({"response": "r"}, row, score) for row in rows]


def test_the_report_counts():
    line = describe_added(Nearest(HashedEncoder(8), 3), {"u": added(0, 1, 2), "v": added(2, score=0.25)}, 10)
    assert line == (
        "Nearest: 1 to 3 rows for each client (mean 2.0); 3 different public rows in total; scores 0.250 to 0.500; "
        "fewer than number=3 for 1 of 2 clients: there were no more to choose from"
    )
    assert line.replace("there were no more to choose from", "only 2 rows are public") == describe_added(
        Nearest(HashedEncoder(8), 3), {"u": added(0, 1, 2), "v": added(2, score=0.25)}, 2
    )


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({}, "nothing for client u"),
        ({"u": added(0, 1, 2)}, "3 rows, more than number=2"),
        ({"u": added(1, 1)}, "a public row twice"),
        ({"u": added(1, 4)}, "row 4 of 4 public rows"),
        ({"u": added(-1, 3)}, "of 4 public rows"),
    ],
)
def test_an_augmentation_that_breaks_its_word_is_refused(given, complaint):
    with pytest.raises(ValueError, match=f"Nearest gave.*{complaint}"):
        check_added(Nearest(HashedEncoder(8), 2), given, ["u"], 4)
