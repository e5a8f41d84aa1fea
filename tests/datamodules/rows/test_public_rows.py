from fedlight.datamodules.rows.fields import make_question_key, make_row_key
from fedlight.datamodules.rows.instruction_rows import PublicRows

ROWS = [{"instruction": f"i{n}", "input": "", "response": "r"} for n in range(4)]


def test_equal_rows_of_several_sources_stay_once_whatever_the_order_of_their_columns():
    turned = [{"response": "r", "instruction": "i1", "category": "c"}, {"instruction": "i9", "response": "r"}]
    public = PublicRows.gather([("one", ROWS), ("two", turned)])
    assert public.rows == [*ROWS, turned[1]]
    assert public.sources == ["one"] * 4 + ["two"]
    assert str(public) == (
        "5 public rows of 2 sources; left out: 1 repeated, 0 equal to a client's, 0 asked in validation or held out"
    )


def test_a_text_in_another_slot_is_another_row():
    one, other = {"instruction": "a", "input": "b", "response": "r"}, {"instruction": "a b", "response": "r"}
    assert make_question_key(one) != make_question_key(other)
    assert make_row_key({"a": "b", "response": "r"}) != make_row_key({"b": "a", "response": "r"})


def test_each_row_is_counted_under_one_reason():
    asked = [{**ROWS[0]}, {**ROWS[1], "response": "s"}]
    public = PublicRows.gather([("one", ROWS * 2)], private=ROWS[:1], asked=asked)
    assert (len(public.rows), public.private, public.asked, public.repeated) == (2, 2, 2, 2)
