import pytest

from fedlight.datamodules.rows.columns import check_columns, text_at, value_at
from fedlight.datamodules.rows.rows import RowsError
from fedlight.datamodules.rows.votes import read_votes

COLUMNS = {"prompt": "prompt", "response_a": "a", "response_b": "b", "choice": "choice", "client": "who"}
VALUES = {"a": 0, "b": 1, "tie": "tie"}


def row(prompt="p", a="x", b="y", choice=0, who="u"):
    return {"prompt": prompt, "a": a, "b": b, "choice": choice, "who": who}


def read(rows, columns=COLUMNS, values=VALUES):
    return read_votes(rows, columns, values, ("prompt",), "rows.csv")


def test_what_is_left_out_is_counted():
    rows = [
        row(),
        row(choice="tie"),
        row(a=" "),
        row(choice=None),
        row(prompt=""),
        row(who=None),
        row(a="same", b="same "),
        row(),  # a repetition
        row(a="y", b="x", choice=1),  # the same vote, shown the other way round
        row(choice=1),  # the opposite vote of the same client: kept, a conflict
        row(choice=1, who="v"),  # another client's vote is neither
        row(a="y", b="x", choice=0, who="w"),  # nor is one for y that is shown the other way round
    ]
    votes = read(rows)
    assert str(votes.counts) == (
        "rows.csv: 12 rows, 4 votes on 1 comparisons; left out: 1 ties, 4 missing, 1 identical, 2 duplicates; "
        "1 conflicts kept"
    )
    assert (votes.winner, votes.comparison, votes.clients) == ([0, 1, 1, 1], [0] * 4, [*"uuvw"])


def test_an_answer_that_is_the_users_turn_is_missing():
    answer, question = {"role": "assistant", "content": "x"}, {"role": "user", "content": "y"}
    rows = [row(a=[answer], b="y"), row(a=[answer, question], b="z")]
    votes = read(rows, {"prompt": "prompt", "chosen": "b", "rejected": "a.-1"})
    assert [(c.first, c.second) for c in votes.comparisons] == [("y", "x")]
    assert (votes.winner, votes.counts.missing) == ([0], 1)


def test_columns_inside_columns():
    # The shape of openai/summarize_from_feedback, comparisons.
    shape = {"info": {"id": "t3_1", "post": "post"}, "summaries": [{"text": "first"}, {"text": "second"}]}
    assert value_at(shape, "summaries.1.text") == "second"
    assert text_at(shape, "info.article") == ""
    assert text_at({"turns": ["one ", "two"]}, "turns") == "one\n\ntwo"
    assert value_at({"a.b": 1}, "a.b") == 1
    with pytest.raises(RowsError, match=r"no column 'info.text' \(mapped to 'post'\).*info.id, info.post"):
        check_columns([shape], {"post": "info.text"}, "x.jsonl")


def test_a_missing_column_names_file_column_and_what_there_is():
    with pytest.raises(RowsError, match=r"rows.csv: no column 'worker'.*choice, who.*columns.client"):
        read([row()], {**COLUMNS, "client": "worker"})
    with pytest.raises(RowsError, match=r"has no 'response_b'"):
        read([row()], {"prompt": "prompt", "response_a": "a", "choice": "choice"})
    with pytest.raises(RowsError, match=r"map both score_a and score_b"):
        read([row()], {**COLUMNS, "score_a": "a"})


def test_unknown_choice_values_and_no_vote_left_are_refused():
    with pytest.raises(RowsError, match=r"row 2: the choice '2' is none of choice_values \(0, 1, tie\)"):
        read([row(), row(choice=2)])
    with pytest.raises(ValueError, match=r"has the key 'A'; it takes a, b and tie"):
        read([row()], values={"A": 0})
    with pytest.raises(ValueError, match=r"gives 0 two meanings, a and b"):
        read([row()], values={"a": 0, "b": [1, 0]})
    with pytest.raises(RowsError, match=r"1 ties.*No vote is left"):
        read([row(choice="tie")])


SHP = [  # labels = 1 where A has the higher score
    {"history": f"q{a}", "human_ref_A": "x", "human_ref_B": "y", "score_A": a, "score_B": b, "labels": label}
    for a, b, label in ((52, 54, 0), (10, 3, 1), (5, 5, 1))
]
SHP_COLUMNS = {
    **{"instruction": "history", "response_a": "human_ref_A", "response_b": "human_ref_B"},
    **{"choice": "labels", "score_a": "score_A", "score_b": "score_B"},
}


def test_shp_labels_follow_the_scores():
    votes = read_votes(SHP, SHP_COLUMNS, {"a": 1, "b": 0}, ("instruction",), "SHP")
    assert votes.winner == [1, 0, 0]


def test_inverted_shp_labels_are_refused():
    fix = r"SHP: in 2 of 2 rows.*set choice_values.a: \['1'\] and choice_values.b: \['0'\]"
    with pytest.raises(RowsError, match=fix):
        read_votes(SHP, SHP_COLUMNS, {"a": 0, "b": 1}, ("instruction",), "SHP")
    chosen = {"chosen": "human_ref_A", "rejected": "human_ref_B", "score_a": "score_A", "score_b": "score_B"}
    with pytest.raises(RowsError, match="SHP: in 1 of 2 rows the choice contradicts the scores"):
        read_votes(SHP, {"instruction": "history", **chosen}, {}, ("instruction",), "SHP")
