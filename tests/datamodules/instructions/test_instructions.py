from contextlib import nullcontext

import pytest
from refusals import refusal

from fedlight import InstructionDataModule, Partition
from fedlight.datamodules.rows import Holdout, RowsError

TEMPLATE = "POST: {instruction} ANSWER:"


def make_rows(count=24):
    return [
        {"instruction": f"w{i}", "input": "", "output": "x y", "task": f"u{i % 3}", "kind": f"k{i % 2}"}
        for i in range(count)
    ]


@pytest.fixture
def build(made):
    def build(rows=None, stages=("fit",), **options):
        columns = {"instruction": "instruction", "response": "output"} | options.pop("columns", {})
        settings = {"template": TEMPLATE, "batch_size": 4, "columns": columns} | options
        return made(InstructionDataModule, rows or make_rows(), stages, **settings)

    return build


def test_loss_on_the_response_alone_and_none_on_padding(build, words):
    rows = [{"instruction": "w0", "output": "x"}, {"instruction": "w1", "output": "x y z"}]
    datamodule = build(rows, val_share=0.0)
    batch = datamodule.collate([datamodule.train_set[i] for i in range(2)])
    assert words(datamodule.tokenizer, batch["input_ids"][0][:6]) == "<s> POST: w0 ANSWER: x </s>"
    assert batch["labels"][0].tolist() == [-100] * 4 + batch["input_ids"][0, 4:6].tolist() + [-100] * 2
    assert batch["attention_mask"].tolist() == [[1] * 6 + [0] * 2, [1] * 8]


def test_clients_by_column_category_or_evenly(build):
    for partition in (None, Partition("client")):
        data = build(columns={"client": "task"}, partition=partition, val_share=0.1)
        assert (data.client_sizes(), len(data.val_set)) == ({"u0": 7, "u1": 7, "u2": 7}, 3)
        for client, rows in data.client_rows.items():
            assert {int(row["instruction"][1:]) % 3 for row in rows} == {int(client[1])}
    by_kind = build(columns={"category": "kind"}, partition=Partition("dirichlet", num_clients=2, alpha=1.0))
    assert sum(by_kind.client_sizes().values()) + len(by_kind.val_set) == 24
    evenly = build(columns={"client": "task"}, partition=Partition("iid", num_clients=2), val_share=0.0)
    assert evenly.client_sizes() == {"c0": 12, "c1": 12}
    assert build(columns={"client": ""}, val_share=0.0).client_sizes() == {"c0": 24}


def test_errors_of_columns_name_their_keys(build):
    with pytest.raises(RowsError, match=r"no column 'answer' \(mapped to 'response'\).*instruction, input"):
        build(columns={"response": "answer"})
    with pytest.raises(ValueError, match=r"columns has no 'response'. Set columns.response to the column"):
        build(columns={"response": ""})
    with pytest.raises(
        ValueError, match=r"columns.output=task would be read for nothing: use the names instr"
    ):
        build(columns={"output": "task"})
    with pytest.raises(RowsError, match=r"no column 'tsak' \(mapped to 'client'\).* Set columns\.client to"):
        build(columns={"client": "tsak"})
    with pytest.raises(ValueError, match=r"partition.by=client .* for example columns.client: worker"):
        build(columns={"client": ""}, partition=Partition("client"))
    rows = [row | {"task": None} for row in make_rows()]
    with pytest.raises(RowsError, match=r"24 rows has an empty value: columns.client=task in 24. Map"):
        build(rows, columns={"client": "task"})


def test_answers_to_one_prompt_stay_on_one_side(build):
    rows = [{"instruction": f"w{i // 2}", "output": "x" if i % 2 else "y"} for i in range(20)]
    datamodule = build(rows, val_share=0.3)
    parts = datamodule.train_set, datamodule.val_set
    trained, scored = ({int(example["ids"][2]) for example in part} for part in parts)
    assert not trained & scored
    assert len(scored) == 3


def test_missing_repeated_and_too_long_rows(build, caplog):
    (first,) = make_rows(1)
    rows = [*make_rows(4), first, {**first, "output": ""}, {**first, "output": "x " * 50}]
    datamodule = build(rows, val_share=0.0, max_tokens=10)
    assert len(datamodule.train_set) == 4
    assert datamodule.report.too_long == 1
    assert "7 rows, 5 examples; left out: 1 missing, 1 duplicates" in caplog.text
    with pytest.raises(RowsError, match=r"no example fits into max_tokens=4"):
        build(max_tokens=4)
    with pytest.raises(RowsError, match=r"1 rows has an empty value: columns.response=output in 1"):
        build([{"instruction": "w0", "output": ""}])


def test_held_out_rows(build):
    datamodule = build(stages=("test",), holdout=Holdout("kind", ["k1"]))
    assert len(datamodule.test_set) == 12
    with pytest.raises(ValueError, match="no rows to test on"):
        build(stages=("test",))


@pytest.mark.parametrize("slot", ["response", "output"])
def test_a_prompt_that_would_show_its_answer_is_refused(build, slot):
    with refusal(rf"slot {{{slot}}}, so each prompt would show its answer.*leave the slot out"):
        build(template=f"{{instruction}}\nANSWER: {{{slot}}}")


def test_a_slot_without_a_column_is_refused_unless_it_is_said_to_have_none(build):
    about = "About {tpic}: {instruction}"
    with refusal(r"no column 'tpic' .*Set columns\.tpic to one of them"):
        build(template=about)
    assert len(build(template=about, columns={"tpic": ""}, val_share=0.0).train_set) == 24


def test_conversations_that_end_with_the_user_are_left_out_and_counted(build, caplog):
    said = {"user": "w1", "assistant": "x y", "human": "w2"}
    turns = [{"role": role, "content": text} for role, text in said.items()]
    rows = [{"talk": turns[:2]}, {"talk": turns}, {"talk": [turns[2], turns[1]]}, {"talk": []}]
    datamodule = build(rows, columns={"instruction": "talk.:-1", "response": "talk.-1"}, val_share=0.0)
    assert "4 rows, 2 examples; left out: 2 missing (1 end without a reply), 0 duplicates" in caplog.text
    (own,) = datamodule.client_rows.values()
    assert [(row["instruction"], row["response"]) for row in own] == [("w1", "x y"), ("w2", "x y")]


@pytest.mark.parametrize(
    ("unknown", "expected"), [(8, None), (9, UserWarning), (20, UserWarning), (21, ValueError)]
)
def test_text_that_the_tokenizer_does_not_know_is_told_or_refused(build, unknown, expected):
    """Of 40 tokens: above a fifth of unknown ones there is a warning, above a half an error."""
    words = ["nie"] * unknown + ["w1"] * (40 - unknown)
    rows = [{"instruction": " ".join(words[:10]), "output": " ".join(words[10:])}]
    told = rf"{unknown / 40:.0%} of the text is unknown to the tokenizer .*set the model"
    with pytest.raises(expected, match=told) if expected else nullcontext():
        build(rows, val_share=0.0)


@pytest.mark.parametrize(("text", "expected"), [("w1 w2", None), ("w1 </s> w2", UserWarning)])
def test_control_tokens_in_rows_are_told(build, text, expected):
    told = r"control tokens such as '</s>' in 2 texts,"
    with pytest.warns(expected, match=told) if expected else nullcontext():
        build([{"instruction": text, "output": text}], val_share=0.0)


def test_validation_rows_that_are_trained_on_are_counted(tiny_model):
    rows = [
        {"client": client, "instruction": text, "response": "anna is kind"}
        for client, text in zip("aab", ("is anna kind ?", "is ben rude ?", "is ben kind ?"), strict=True)
    ]
    data = InstructionDataModule(rows, tokenizer=tiny_model, batch_size=2)
    data.setup("fit")
    assert "validation 2 examples (1 also trained on, of clients with one alone);" in str(data.report)
