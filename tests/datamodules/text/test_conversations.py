import numpy as np
import pytest
from habits import HABITS, make_tokenizer
from nested import nested
from refusals import refusal
from tiny_world import write_rows

from fedlight import InstructionDataModule, PreferenceDataModule, PromptDataModule
from fedlight.callbacks.scores.sample_answers import choose
from fedlight.datamodules.instructions.task_data import TaskDataModule
from fedlight.datamodules.preferences.format import Format
from fedlight.datamodules.rows.fields import instruction_text
from fedlight.datamodules.rows.split import Split
from fedlight.datamodules.rows.task_rows import TaskRows
from fedlight.datamodules.text.chat import read_turns, write_turns
from fedlight.evaluation.tasks.exact_match import ExactMatch

CHAT = HABITS["adds bos, bos in the template"]  # an answer's text ends with its end token


def turn(role, content):
    return {"role": role, "content": content}


def talk(number, *after):
    asked = [turn("system", "Be brief."), turn("user", f"One {number}?"), turn("assistant", "No.")]
    return {"messages": [*asked, turn("user", "Two?"), turn("assistant", f"Yes, {number}."), *after]}


@pytest.fixture(scope="module")
def chatty(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chatty")
    make_tokenizer(CHAT).save_pretrained(folder)
    return str(folder)


def data_of(rows, tokenizer, **options):
    settings = {"columns": {"messages": "messages"}, "template": "chat", "val_share": 0.0, **options}
    data = InstructionDataModule(rows, **nested(InstructionDataModule, tokenizer=tokenizer, **settings))
    data.setup("fit")
    return data


def asked(row):
    """The text that asks for a conversation's last answer, by transformers."""
    turns = row["messages"][:-1]
    return make_tokenizer(CHAT).apply_chat_template(turns, tokenize=False, add_generation_prompt=True)


def labelled(data, example):
    labels = data.collate([example])["labels"][0]
    return data.tokenizer.convert_ids_to_tokens(labels[labels != -100].tolist())


def test_every_answer_of_a_row_is_taught(chatty):
    data = data_of([talk(1), talk(2)], chatty)
    by_transformers = data.tokenizer.apply_chat_template(talk(1)["messages"], tokenize=True, return_dict=True)
    ids = [example["ids"].tolist() for example in data.train_set]
    assert by_transformers["input_ids"] in ids
    one = data.train_set[ids.index(by_transformers["input_ids"])]
    assert labelled(data, one) == [*"No.", "<|im_end|>", "Yes", ",", "Ġ", *"1.", "<|im_end|>"]
    assert data.train_labelled.tolist() == [4 + 6, 4 + 6]
    last = data_of([talk(1), talk(2)], chatty, taught_turns="last")
    assert labelled(last, last.train_set[0])[:1] == ["Yes"]
    assert last.train_labelled.tolist() == [6, 6]


def test_other_names_of_roles_are_the_same_conversation(chatty):
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    turns = [{"from": names[one["role"]], "value": one["content"]} for one in talk(1)["messages"]]
    assert data_of([{"messages": turns}], chatty).client_rows == data_of([talk(1)], chatty).client_rows


def test_a_template_that_leaves_a_turn_out_is_warned_of(tmp_path):
    make_tokenizer(HABITS["blank first, bos in every exchange"]).save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="does not show some texts of the role 'system'"):
        data_of([talk(1)], str(tmp_path))


def test_what_follows_the_last_answer_is_left_out_and_rows_without_an_answer_are_counted(chatty, caplog):
    unanswered = {"messages": [turn("user", "Three?")]}
    asked = [turn("user", "Four?"), turn("assistant", ""), turn("user", "?")]
    silent = {"messages": [*asked, turn("assistant", "Five.")]}
    data = data_of([talk(1, turn("user", "Thanks.")), unanswered, silent], chatty)
    [[row]] = data.client_rows.values()
    assert row["response"] == "Yes, 1."
    assert read_turns(row["messages"]) == talk(1)["messages"][:-1]
    assert instruction_text(row) == "Be brief.\nOne 1?\nNo.\nTwo?"


def test_the_turns_may_stand_apart_from_the_answer(chatty):
    rows = [{"asked": talk(1)["messages"][:-1], "said": talk(1)["messages"][-1]}]
    columns = {"messages": "asked", "response": "said"}
    assert data_of(rows, chatty, columns=columns).client_rows == data_of([talk(1)], chatty).client_rows


def test_answers_before_and_after_training_are_to_whole_conversations(chatty):
    data = data_of([talk(1), talk(2)], chatty)
    data.val_set = data.train_set
    samples = choose(data, 2)
    assert sorted(sample.prompt for sample in samples) == [asked(talk(1)), asked(talk(2))]
    assert [sample.tokens for sample in samples] == [6, 6]


@pytest.mark.parametrize("view", ["dpo", "sft"])
def test_pairs_of_answers_to_a_conversation(chatty, view):
    asked = talk(1)["messages"][:-1]
    rows = [{"chosen": [*asked, turn("assistant", "Yes.")], "rejected": [*asked, turn("assistant", "No.")]}]
    columns = {"messages": "chosen.:-1", "chosen": "chosen.-1", "rejected": "rejected.-1"}
    settings = {"format": Format(generation_template="chat"), "split": Split(val_share=0.0)}
    data = PreferenceDataModule(rows, columns=columns, view=view, tokenizer=chatty, **settings)
    data.setup("fit")
    shown = data.train_set[0]["chosen"] if view == "dpo" else data.train_set[0]
    expected = data.tokenizer.apply_chat_template(rows[0]["chosen"], return_dict=True)["input_ids"]
    assert shown["ids"].tolist() == expected
    assert np.flatnonzero(shown["taught"]).tolist() == [*range(len(expected) - 3, len(expected))]  # Yes . end


def test_prompts_are_conversations_up_to_the_answer(chatty):
    rows = [{"messages": talk(1)["messages"][:-1]}]
    data = PromptDataModule(rows, columns={"messages": "messages"}, template="chat", tokenizer=chatty)
    data.setup("predict")
    example = data.predict_set[0]
    assert example["prompt"] == asked(talk(1))
    assert example["fields"] == {"messages": write_turns(rows[0]["messages"])}


def test_a_task_asks_as_training_does(chatty, tmp_path):
    fields = ("Two?", "", "Yes."), ("Is", "one", "No.")
    rows = [dict(zip(("instruction", "input", "output"), row, strict=True)) for row in fields]
    file, settings = write_rows(tmp_path / "rows.jsonl", rows), {"tokenizer": chatty, "max_tokens": 200}
    source = TaskRows(file, columns={"response": "output"}, template="chat")
    one = TaskDataModule({"t": ExactMatch(source)}, loss=True, **settings)
    other = InstructionDataModule(file, split=Split(test_source=file), template="chat", **settings)
    for data in (one, other):
        data.setup("test")
    [batch], [expected] = one.test_dataloader(), other.test_dataloader()
    assert all(batch[name].tolist() == expected[name].tolist() for name in expected)


def test_a_tokenizer_without_a_chat_template_is_refused_before_the_rows_are_read(causal):
    data = InstructionDataModule("no/such/file.jsonl", template="chat", tokenizer=causal)
    with refusal("has no chat template, as base models have none: set the template to alpaca"):
        data.setup("fit")
