import pytest

from fedlight.first_config.columns import GuessError, check_given, describe, find_client
from fedlight.first_config.roles import find_instructions, find_votes, read_choice

ANSWERS = ["it is red", "it is blue", "it is green", "it is grey"]


def voted(names=("prompt", "answer_a", "answer_b", "winner", "worker"), choices=("a", "b", "tie")):
    """Six workers compare each pair of four answers; so answers occur on both sides."""
    rows = []
    for worker in range(6):
        for one in range(4):
            answers = ANSWERS[one], ANSWERS[(one + 1 + worker % 2) % 4]
            values = (f"what colour is it {one % 2} ?", *answers, choices[(worker + one) % 3], f"w{worker}")
            rows.append(dict(zip(names, values, strict=True)))
    return rows


def test_usual_names_are_read():
    found = find_votes(describe(voted()), {})
    columns = {"prompt": "prompt", "response_a": "answer_a", "response_b": "answer_b", "choice": "winner"}
    assert found.columns == columns
    assert found.choice_values == {"a": "a", "b": "b", "tie": "tie"}
    assert all(guess.sure for guess in found.guesses)


def test_renamed_columns_are_told_by_their_values():
    columns = describe(voted(("k0", "k1", "k2", "k3", "k4"), ("left", "right", "tie")))
    found = find_votes(columns, {})
    assert found.columns == {"prompt": "k0", "response_a": "k1", "response_b": "k2", "choice": "k3"}
    assert found.choice_values == {"a": "left", "b": "right", "tie": "tie"}
    assert {guess.what for guess in found.guesses if not guess.sure} == {"question", "answers", "choice"}
    assert find_client(columns, list(found.columns.values()), None).value == "k4"


def test_choices_that_are_names_of_the_answers():
    rows = voted(choices=("answer_b", "answer_a", "tie"))
    assert find_votes(describe(rows), {}).choice_values == {"a": "answer_a", "b": "answer_b", "tie": "tie"}


@pytest.mark.parametrize(
    ("raw", "meaning"),
    [
        (["1", "0"], {"a": "0", "b": "1"}),
        (["-1", "1", "0"], {"a": "-1", "b": "1", "tie": "0"}),
        (["tie (bothbad)", "model_a", "tie", "model_b"], {"a": "model_a", "b": "model_b", "tie": ["tie (bothbad)", "tie"]}),
        (["y", "x"], {"a": "x", "b": "y"}),  # names of the answers
        (["a", "b", "c"], {}),
    ],
)  # fmt: skip
def test_meaning_of_choices(raw, meaning):
    assert read_choice(raw, ("x", "y")) == meaning


def choice_guess(choices, given=None):
    guesses = find_votes(describe(voted(choices=choices)), {}, values=given).guesses
    return next(guess for guess in guesses if guess.what == "choice values")


@pytest.mark.parametrize("end", ["", ".0"])  # a column of numbers with gaps has floats
def test_numbers_as_choices_are_no_sure_guess(end):
    values = choice_guess(("0" + end, "1" + end, "1" + end))
    assert not values.sure
    assert f"--a 1{end} --b 0{end}" in values.reason


def test_numbers_that_the_user_explains_are_sure():
    values = choice_guess(("0", "1", "2"), {"a": ["1", "2"], "b": ["0"]})
    assert (values.sure, values.reason) == (True, "given with --a and --b")


def test_a_choice_of_unknown_values_names_them_and_the_options_and_takes_what_the_user_says():
    columns = describe(voted(choices=("ja", "nein", "egal")))
    with pytest.raises(GuessError, match=r"column winner: .* They are ja, nein, egal.*--a VALUE --b VALUE"):
        find_votes(columns, {})
    found = find_votes(columns, {}, values={"a": ["ja"], "b": ["nein"], "tie": ["egal"]})
    assert found.choice_values == {"a": "ja", "b": "nein", "tie": "egal"}


def test_a_missing_choice_is_asked_for():
    rows = [{key: value for key, value in row.items() if key != "winner"} for row in voted()]
    with pytest.raises(GuessError, match=r"no column says which answer won.*--choice COLUMN.*--chosen"):
        find_votes(describe(rows), {})


def test_chosen_and_rejected_need_no_choice():
    texts = {"prompt": "what is {} ?", "chosen": "it is {}", "rejected": "it is not {}"}
    rows = [{name: text.format(n) for name, text in texts.items()} for n in range(4)]
    found = find_votes(describe(rows), {})
    assert found.columns == {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}
    assert found.choice_values == {}


def test_two_columns_that_could_be_the_question_are_both_named():
    rows = [row | {"k9": f"about some thing {number % 3}"} for number, row in enumerate(voted())]
    rows = [{"k0" if key == "prompt" else key: value for key, value in row.items()} for row in rows]
    with pytest.raises(GuessError, match=r"the question\? k0 or k9 could be: say it with --question COLUMN"):
        find_votes(describe(rows), {})
    assert find_votes(describe(rows), {"question": "k9"}).columns["prompt"] == "k9"


def test_a_column_that_follows_from_the_question_is_no_client():
    names = ("k0", "k1", "k2", "k3", "k4")
    rows = [row | {"pair": f"{row['k0']}{sorted((row['k1'], row['k2']))}"} for row in voted(names)]
    assert find_client(describe(rows), ["k0", "k1", "k2", "k3"], None).value == "k4"


def test_two_columns_that_could_be_the_client_are_both_named():
    *used, _ = names = ("k0", "k1", "k2", "k3", "k4")
    columns = describe([row | {"k5": f"d{number % 5}"} for number, row in enumerate(voted(names))])
    with pytest.raises(GuessError, match=r"client\? k4 or k5 could be: .* --client COLUMN.*--client none"):
        find_client(columns, used, None)
    assert find_client(columns, used, "k5").value == "k5"
    assert find_client(columns, used, "none").value is None


def test_rows_without_any_client_are_dealt_out_and_that_is_said():
    rows = [
        {"q": f"what {n}", "noted": f"{n}" if n > 3 else None} for n in range(6)
    ]  # of few rows, each its own
    guess = find_client(describe(rows), ["q"], None)
    assert (guess.value, guess.sure) == (None, False)
    assert "--client COLUMN" in guess.reason


def test_instructions_by_name_and_by_order():
    rows = [{"hospital": f"h{n % 2}", "ask": f"what is {n} ?", "reply": f"it is {n}"} for n in range(6)]
    assert find_instructions(describe(rows), {}).columns == {"instruction": "ask", "response": "reply"}
    blind = [{"k0": row["hospital"], "k1": row["ask"], "k2": row["reply"]} for row in rows]
    found = find_instructions(describe(blind), {})
    assert found.columns == {"instruction": "k1", "response": "k2"}
    assert not any(guess.sure for guess in found.guesses)
    assert find_client(describe(blind), ["k1", "k2"], None).value == "k0"


def test_a_response_of_single_words_is_found_by_its_name():
    rows = [{"instruction": f"is it {n} ?", "input": f"it is {n % 2}", "output": "yes"} for n in range(4)]
    columns = find_instructions(describe(rows), {}).columns
    assert columns == {"instruction": "instruction", "input": "input", "response": "output"}


def test_one_column_is_not_the_question_and_the_response():
    rows = [{"client|question|answer": f"c|what is {n} ?|it is {n}"} for n in range(4)]
    with pytest.raises(GuessError, match="no column with text is left for the response"):
        find_instructions(describe(rows), {})


def test_three_unknown_texts_are_asked_about():
    rows = [{"k1": f"a b {n}", "k2": f"c d {n}", "k3": f"e f {n}"} for n in range(4)]
    with pytest.raises(GuessError, match=r"the question\? k1 or k2 or k3 could be: say it with --question"):
        find_instructions(describe(rows), {})


def test_a_column_that_is_not_there_is_refused_with_the_nearest():
    with pytest.raises(GuessError, match=r"--client wroker: there is no such column; .* 'worker'"):
        check_given(describe(voted()), {"client": "wroker"})
