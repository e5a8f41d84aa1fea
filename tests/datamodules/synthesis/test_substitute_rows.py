import pytest
from refusals import refusal
from tiny_world import write_rows

from fedlight.datamodules.rows.rows import RowsError
from fedlight.datamodules.synthesis.substitute_rows import SubstituteRows
from fedlight.datamodules.text.chat import write_turns
from fedlight.datamodules.text.templates import Template

Q = Template("Q: {question} A:")
ROWS = [{"ask": f"q{n}", "response": f"a{n}", "topic": "even" if n % 2 == 0 else "odd"} for n in range(20)]
OWN = {"question": "q4", "response": "a4"}


@pytest.fixture
def source(tmp_path):
    return write_rows(tmp_path / "rows.jsonl", [*ROWS, {**ROWS[0], "response": ""}])


def make(source, seed=0, clients=("u", "v"), own=(), **options):
    options = {"number": 5, "columns": {"question": "ask"}} | options
    synthesis = SubstituteRows(source, **options)
    return synthesis.make(dict.fromkeys(clients, own), Q, None, seed), synthesis


def test_a_client_gets_different_rows_of_the_source_unweighted(source):
    made, synthesis = make(source)
    possible = [{"question": row["ask"], "response": row["response"]} for row in ROWS]
    for candidates in made.values():
        texts = [one.fields for one in candidates]
        assert len({row["question"] for row in texts}) == 5
        assert all(row in possible for row in texts)
        assert {one.weight for one in candidates} == {1.0}
    assert synthesis.counts == {"tried": 10, "survived": 10}
    assert not synthesis.chooses


def test_rows_follow_from_seed_and_client_alone(source):
    made, _ = make(source)
    assert make(source, clients=("v",))[0]["v"] == made["v"] != made["u"]
    assert make(source, seed=1)[0]["v"] != made["v"]  # each round has its own seed


def test_a_clients_own_rows_are_not_drawn(source):
    made, _ = make(source, number=9, where={"topic": ["even"]}, own=[OWN])
    assert {one.fields["question"] for one in made["v"]} == {f"q{n}" for n in range(0, 20, 2)} - {"q4"}
    with refusal("9 rows are no rows of client u, fewer than number=10: give a larger"):
        make(source, number=10, where={"topic": ["even"]}, own=[OWN])


def test_settings_that_make_no_sense_are_refused(source):
    with refusal("number=0 must be at least 1"):
        SubstituteRows(source, number=0)
    with pytest.raises(RowsError, match="no column 'question'"):
        make(source, columns={})
    with pytest.raises(RowsError, match=r"no row has .*law.*Check where"):
        make(source, where={"topic": ["law"]})
    with pytest.raises(RowsError, match="no column 'subject'"):
        make(source, where={"subject": ["law"]})


def test_other_settings_make_other_candidates(source):
    one = SubstituteRows(source, where={"topic": ["odd"]}).settings()
    assert one["class"] == "SubstituteRows"
    assert (one["source"], one["number"], one["where"]) == (source, 16, {"topic": ["odd"]})


def test_rows_are_read_as_those_of_clients(tmp_path):
    asked = [[{"role": "user", "content": row["ask"]}] for row in ROWS]
    said = [{"messages": [*turns, {"role": "assistant", "content": "yes"}]} for turns in asked]
    source = write_rows(tmp_path / "said.jsonl", [*said, *said[:3]])
    template, own = Template("{messages}", "messages"), {"messages": write_turns(asked[0]), "response": "yes"}
    drawn = SubstituteRows(source, number=19).make({"u": [own]}, template, None, 0)["u"]
    assert len({one.fields["messages"] for one in drawn}) == 19  # no row twice
    assert own not in [one.fields for one in drawn]
    with refusal("columns.respones=topic would be read for nothing: use the names question"):
        make(source, columns={"question": "ask", "respones": "topic"})
