import numpy as np
import pytest
from refusals import refusal
from tiny_world import write_rows

from fedlight import Partition, PreferenceDataModule, Visit
from fedlight.datamodules.rows import Holdout, RowsError

CHOICE = "POST: {prompt} A: {response_a} B: {response_b} CHOICE:"
ANSWER = "POST: {prompt} ANSWER:"
NAMES = ("prompt", "response_a", "response_b", "choice")


def make_rows(count=40, clients=4):
    """Vote i: post w{i}, good against bad, the good one shown first in even rows."""
    sides = [("good", "bad", "a"), ("bad", "good", "b")]
    rows = [dict(zip(NAMES, (f"w{i}", *sides[i % 2]), strict=True)) for i in range(count)]
    return [{**row, "who": f"u{i % clients}", "topic": f"t{i % 3}"} for i, row in enumerate(rows)]


@pytest.fixture
def build(made):
    def build(rows=None, stages=("fit",), columns=None, **options):
        columns = {name: name for name in NAMES} | {"client": "who"} | (columns or {})
        settings = {"columns": columns, "choice_template": CHOICE, "generation_template": ANSWER}
        rows = make_rows() if rows is None else rows
        return made(PreferenceDataModule, rows, stages, **settings | {"batch_size": 4} | options)

    return build


def texts(datamodule, dataset, indices=None):
    """(text, label) of selector examples."""
    tokenizer = datamodule.tokenizer
    rows = [dataset[i] for i in (range(len(dataset)) if indices is None else indices)]
    return [(" ".join(tokenizer.convert_ids_to_tokens(row["ids"].tolist())), row["label"]) for row in rows]


def posts(datamodule, dataset, indices=None):
    return {text.split("POST: ")[1].split()[0] for text, _ in texts(datamodule, dataset, indices)}


def test_every_vote_becomes_two_examples_whose_labels_point_at_the_winner(build):
    datamodule = build()
    for text, label in texts(datamodule, datamodule.train_set):
        assert f"{'AB'[label]}: good" in text
    labels = [label for _, label in texts(datamodule, datamodule.train_set)]
    assert sum(labels) * 2 == len(labels) == 2 * (40 - 4)  # each of four clients gives one pair to validation


def test_a_pair_and_its_twin_are_never_on_both_sides(build):
    # u0 votes twice on the same answers, once each way, and the rows show them in both orders.
    rows = make_rows(40)
    of_u0 = [row for row in rows if row["who"] == "u0"]
    rows += [{**row, "response_a": row["response_b"], "response_b": row["response_a"]} for row in of_u0]
    datamodule = build(rows, val_share=0.3)
    assert len(datamodule.train_set) + len(datamodule.val_set) == 2 * (40 + 10)
    for client, indices in datamodule.client_indices.items():
        trained = posts(datamodule, datamodule.train_set, indices)
        scored = posts(datamodule, datamodule.val_set, datamodule.val_client_indices[client])
        assert len(trained | scored) == len(trained) + len(scored) > max(len(trained), len(scored))


def test_selector_batch(build):
    datamodule = build([{**make_rows(1)[0]}, {**make_rows(1)[0], "prompt": "w1 w2 w3"}], val_share=0.0)
    batch = datamodule.collate([datamodule.train_set[i] for i in (0, 2)])
    shapes = {"input_ids": (2, 10), "attention_mask": (2, 10), "labels": (2,), "orders": (2,)}
    assert {name: tuple(value.shape) for name, value in batch.items()} == shapes
    assert batch["orders"].tolist() == [0, 2]  # both in the first order, of comparisons 0 and 1
    assert batch["attention_mask"].sum(1).tolist() == [8, 10]
    assert batch["input_ids"][0, 8:].tolist() == [2, 2]  # padded with </s>: there is no padding token
    assert batch["labels"].tolist() == [0, 0]
    assert datamodule.val_set is None


def test_pair_batch_has_segments(build, encoder):
    datamodule = build(make_rows(1), form="pair", tokenizer=encoder)
    batch = datamodule.collate([datamodule.train_set[0], datamodule.train_set[1]])
    # [CLS] w0 [SEP] good [SEP] bad [SEP]
    assert batch["token_type_ids"].tolist() == [[0, 0, 0, 0, 0, 1, 1]] * 2
    assert batch["labels"].tolist() == [0, 1]


def test_dpo_view(build, words):
    datamodule = build(make_rows(4), view="dpo", val_share=0.0)
    example = datamodule.train_set[0]
    assert words(datamodule.tokenizer, example["chosen"]["ids"]) == "<s> POST: w0 ANSWER: good </s>"
    assert words(datamodule.tokenizer, example["rejected"]["ids"]) == "<s> POST: w0 ANSWER: bad </s>"
    batch = datamodule.collate([datamodule.train_set[i] for i in range(4)])
    assert (batch["chosen"]["labels"] != -100).sum(1).tolist() == [2, 2, 2, 2]  # the answer and </s>
    assert (batch["chosen"]["input_ids"][:, 4] != batch["rejected"]["input_ids"][:, 4]).all()
    assert len(set(batch["index"].tolist())) == 4


def test_sft_view_takes_the_chosen_answer(build, words):
    datamodule = build(make_rows(6), view="sft", val_share=0.0)
    assert all("good" in words(datamodule.tokenizer, example["ids"]) for example in datamodule.train_set)
    assert len(datamodule.train_set) == 6


def test_indices_of_pairs_are_unique_over_training_validation_and_test(build, tmp_path):
    other = write_rows(tmp_path / "other.jsonl", make_rows(3))
    datamodule = build(make_rows(8, 2), ("fit", "test"), view="dpo", val_source=other, test_source=other)
    sets = (datamodule.train_set, datamodule.val_set, datamodule.test_set)
    indices = [example["index"] for dataset in sets for example in dataset]
    assert len(indices) == 8 + 3 + 3 == len(set(indices))


def test_held_out_debates_are_tested_on_and_never_trained_on(build, tmp_path):
    rows = make_rows(30)
    gold = [{name: row[name] for name in (*NAMES, "topic")} for row in rows]
    gold, held = write_rows(tmp_path / "gold.jsonl", gold), Holdout("topic", ["t1", "t2*"])
    datamodule = build(rows, ("fit", "test"), holdout=held, test_source=gold)
    trained = posts(datamodule, datamodule.train_set) | posts(datamodule, datamodule.val_set)
    tested = posts(datamodule, datamodule.test_set)
    assert {int(post[1:]) % 3 for post in trained} == {0}
    assert {int(post[1:]) % 3 for post in tested} == {1, 2}
    assert posts(build(rows, ("test",), holdout=held), datamodule.test_set) == tested


UNKNOWN = [{**row, "response_a": f"gut{row['response_a']}", "response_b": "schlecht"} for row in make_rows()]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"holdout": Holdout("topic", ["t9"])}, "holdout value 't9' occurs in no row. topic has: t0, t1, t2"),
        ({"holdout": Holdout("debate", ["t1"])}, "no column 'debate'"),
        ({"holdout": Holdout("topic", ["t*"])}, "holdout.values cover every row"),
        ({"columns": {"scorea": "who"}}, "columns.scorea would be read for nothing; did you mean 'score_a'?"),
        ({"choice_template": f"{{title}} {CHOICE}"}, "no column 'title' .* Set columns.title to one of them"),
        (
            {"view": "dpo", "generation_template": "{prompt} {chosen}"},
            "{chosen}, so each prompt would show its answer",
        ),
        (
            {"view": "dpo", "generation_template": "{response_a}{prompt}"},
            "{response_a}, which choice_template alone fills",
        ),
        ({"stages": ("test",)}, "set test_source, or holdout"),
        ({"rows": UNKNOWN}, "67% of the text is unknown to the tokenizer"),
        ({"stages": (), "val_share": 1.0}, r"val_share=1.0 must lie in \[0, 1\)"),  # before any work
    ],
)
def test_what_cannot_be_trained_or_tested_on_is_refused(build, options, message):
    with refusal(message):
        build(**options)


def test_control_tokens_in_rows_are_told(build):
    with pytest.warns(UserWarning, match=r"control tokens such as '</s>' in 1 text,"):
        build(
            [
                {**row, "response_a": "</s>" * (at == 2) + row["response_a"]}
                for at, row in enumerate(make_rows())
            ]
        )


def test_small_clients_are_dropped_and_counted(build):
    rows = [*make_rows(8, 2), {**make_rows(1)[0], "who": "late"}]
    datamodule = build(rows, partition=Partition(min_size=2))
    assert datamodule.report.split.dropped_clients == 1
    assert "1 client left out as too small" in str(datamodule.report)
    assert len(datamodule.train_set) + len(datamodule.val_set) == 16


def test_too_long_votes_are_counted_and_trimmed_ones_too(build, caplog):
    rows = make_rows(3, 1)
    rows[0]["prompt"] = " ".join(f"w{i}" for i in range(30))  # loses words
    rows[1]["response_a"] = " ".join(["long"] * 30)  # cannot fit
    datamodule = build(rows, max_tokens=12, val_share=0.0)
    assert (datamodule.report.too_long, datamodule.report.trimmed) == (1, 2)
    assert "1 too long and left out, 2 inputs cut" in caplog.text
    assert len(datamodule.train_set) == 4
    with pytest.raises(RowsError, match=r"no vote fits into max_tokens=5: raise it"):
        build(rows, max_tokens=5)
    with pytest.raises(RowsError, match=r"no vote fits"):
        build(rows[:1], max_tokens=12, trim=None)


def test_setup_twice_tokenises_once(build):
    datamodule = build()
    train_set = datamodule.train_set
    datamodule.setup("fit")
    datamodule.setup("validate")
    assert datamodule.train_set is train_set


def test_evaluation_batches_hold_similar_lengths(build):
    rows = make_rows(40, 2)
    for i, row in enumerate(rows):
        row["prompt"] += " w39" * (i % 7)
    datamodule = build(rows, val_share=0.5)
    lengths = datamodule.val_set.lengths
    assert (np.diff(lengths) >= 0).all()
    assert datamodule.report.padding < datamodule.report.padding_unsorted


def test_batches_by_lot_do_not_depend_on_lengths(build):
    """And a selector's vote, shown in both orders, has to be one example of a batch."""
    rows = make_rows()
    longer = [{**row, "response_a": row["response_a"] + " good" * (n % 3)} for n, row in enumerate(rows)]
    drawn = []
    for each in (rows, longer):
        datamodule = build(each, view="dpo")
        bucketed = datamodule.plan.batches(Visit("u0", 3), 0)
        datamodule.draw_by_lot()
        drawn.append((bucketed, datamodule.plan.batches(Visit("u0", 3), 0)))
    assert drawn[0][1] == drawn[1][1]
    assert drawn[0][0] != drawn[1][0]
    assert datamodule.passes(Visit("u0", 3)) == 2
    with pytest.raises(ValueError, match="each vote is two, one for each order"):
        build(view="selector").draw_by_lot()
    build(view="selector", twins_together=True).draw_by_lot()
