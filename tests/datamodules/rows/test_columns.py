import json

import numpy as np
import pytest

from fedlight.datamodules.rows.columns import check_columns, text_at
from fedlight.datamodules.rows.rows import RowsError, load_rows
from fedlight.pretrained.hub import load_tokenizer


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("cut \ud83d", "cut \ufffd"),
        (["\ude00 cut", "whole"], "\ufffd cut\n\nwhole"),
        ("\ud83d\ude00", "\U0001f600"),
        (" gr\u00fc\u00df \U0001f600 ", "gr\u00fc\u00df \U0001f600"),
    ],
)
def test_half_characters_are_replaced(value, text, causal):
    assert text_at({"a": value}, "a") == text
    assert load_tokenizer(causal)(text_at({"a": value}, "a")).input_ids


TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Hello "}, {"type": "image"}]},
    {"role": "assistant", "content": " Hi. "},
]


@pytest.mark.parametrize(
    ("path", "text"),
    [
        *(("talk", "Be brief.\n\nHello\n\nHi."), ("talk.-1", "Hi."), ("talk.:-1", "Be brief.\n\nHello")),
        *(("talk.1:", "Hello\n\nHi."), ("talk.1:2", "Hello"), ("talk.3:", ""), ("talk.7", "")),
        *(("shared.:-1", "Hello"), ("shared.-1", "Hi.")),
    ],
)
def test_turns_of_a_conversation_are_texts_and_parts_of_it_have_paths(path, text):
    shared = [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi."}]
    assert text_at({"talk": TALK, "shared": shared}, path) == text


@pytest.mark.parametrize(
    ("value", "path", "text"),
    [
        (b" gr\xc3\xbc\xc3\x9f ", "a", "gr\u00fc\u00df"),  # of Parquet files that do not mark texts
        (np.array(TALK, dtype=object), "a.-1", "Hi."),  # of lists that pandas has read
        (np.array(["x", "y"]), "a", "x\n\ny"),
        (np.float32("nan"), "a", ""),
    ],
)
def test_bytes_and_arrays_are_read_as_texts_and_lists(value, path, text):
    assert text_at({"a": value}, path) == text
    check_columns([{"a": value}], {"prompt": path}, "rows")


def test_bytes_of_a_picture_are_no_text():
    with pytest.raises(RowsError, match="bytes that are no text"):
        text_at({"a": b"\xff\xd8"}, "a")


@pytest.mark.parametrize("first", [[], None])
def test_a_first_row_without_turns_is_missing_like_a_later_one(first):
    check_columns([{"talk": first}, {"talk": TALK}], {"response": "talk.-1"}, "rows")
    with pytest.raises(RowsError, match=r"no column 'talk\.-1'"):
        check_columns([{"talk": first}, {"talk": first}], {"response": "talk.-1"}, "rows")


@pytest.mark.parametrize(
    ("value", "advice"), [({"text": "x"}, "prompt to the path of a text in it, such as post.text"),
                          ([{"text": "x"}], "such as post.0.text")]
)  # fmt: skip
def test_an_object_is_no_text(value, advice):
    with pytest.raises(RowsError, match=advice):
        check_columns([{"post": value}], {"prompt": "post"}, "votes.jsonl")
    check_columns([{"post": value}], {"prompt": "post"}, "votes.jsonl", texts=False)
    assert text_at({"post": value}, "post") == ""


def test_ids_that_would_make_a_client_another_are_refused(tmp_path):
    file = tmp_path / "rows.jsonl"
    clients = ["c0", "c\ud83d\ude00", "c\ud800", "c\ud801"]  # the last two would both become c\ufffd
    rows = [{"instruction": "say", "response": "tea \ud800", "client": client} for client in clients]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    read = load_rows(str(file))
    columns = {"instruction": "instruction", "response": "response", "client": "client"}
    mixed = [{**rows[0], "client": client} for client in (3, float("nan"), float("nan"), "3.0", 3.0)]
    with pytest.raises(
        RowsError, match=r"rows\.jsonl, row 5: the client 3\.0 would be another than 3, of rows"
    ):
        check_columns(mixed, columns, "rows.jsonl")
    with pytest.raises(RowsError, match=r"rows\.jsonl, row 3: the client 'c\\ud800' has half of a character"):
        check_columns(read, columns, str(file))
    check_columns(read[:2], columns, str(file))
    check_columns(read, {"instruction": "instruction", "response": "response"}, str(file))
