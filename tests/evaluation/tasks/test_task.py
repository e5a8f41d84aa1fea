import pytest
from tiny_world import write_rows

from fedlight.datamodules.rows import task_rows
from fedlight.datamodules.rows.task_rows import TaskRows
from fedlight.evaluation.tasks.exact_match import ExactMatch
from fedlight.evaluation.tasks.result import wilson_interval

ROWS = [
    {"instruction": f"{n}+1", "input": "", "output": str(n + 1), "domain": "odd" if n % 2 else "even"}
    for n in range(7)
]
COLUMNS = {"response": "output", "group": "domain"}


class Adds:
    """Answers rightly, except for 3+1; notes what it was asked."""

    def __init__(self):
        self.asked = []

    def generate(self, prompts, n, temperature, top_p, max_new_tokens, seed, *, stop, strip):
        self.asked.append((list(prompts), n, temperature, top_p, max_new_tokens, seed, list(stop), strip))
        answers = []
        for prompt in prompts:
            number = int(prompt.split("+")[-2].split()[-1]) + 1
            answers.append([f" {number}. " if number != 4 else "5" for _ in range(n)])
        return answers

    def log_likelihoods(self, prompts, continuations):
        raise AssertionError


@pytest.fixture
def rows(tmp_path):
    return write_rows(tmp_path / "rows.jsonl", ROWS)


def make(rows, columns=COLUMNS, **options):
    data = TaskRows(rows, columns=columns, template="Q: {instruction} A:")
    return ExactMatch(data, group="group", **options)


def test_a_score_by_hand(rows):
    result = make(rows, batch_size=3).run(Adds())
    assert [outcome.score for outcome in result.outcomes] == [1, 1, 1, 0, 1, 1, 1]
    assert result.mean == pytest.approx(6 / 7)
    # Wilson, z = 1.96: (6/7 + z^2/14 +- z sqrt(6/7 * 1/7 / 7 + z^2/196)) / (1 + z^2/7) = (1.1315 +- 0.3775) / 1.5488
    low, high = result.interval
    ends = [(share, wilson_interval(share, number)) for share in (0.0, 1.0) for number in range(1, 50)]
    assert all(0 <= low <= share <= high <= 1 for share, (low, high) in ends)
    assert (low, high) == (pytest.approx(0.4869, abs=1e-4), pytest.approx(0.9743, abs=1e-4))
    assert result.by_group == {"even": 1.0, "odd": pytest.approx(2 / 3)}
    assert result.group_mean == pytest.approx(5 / 6)
    assert result.metrics("sums") == {
        **{"score/sums": result.mean, "low/sums": low, "high/sums": high, "unread/sums": 0},
        **{"group_mean/sums": result.group_mean, "score/sums/even": 1.0},
        "score/sums/odd": result.by_group["odd"],
    }
    assert str(result) == "0.8571 [0.4869, 0.9743] of 7 rows"
    wrong = result.outcomes[3]
    assert wrong.record() == {
        **{"row": 3, "prompt": "Q: 3+1 A:", "target": "4", "group": "odd", "answers": ["5"], "score": 0.0},
        "verdicts": [{"score": 0.0, "read": "5", "note": ""}],
        "fields": {"instruction": "3+1", "input": ""},
    }


def test_what_the_model_is_asked(rows):
    told = {"batch_size": 3, "samples": 2, "temperature": 0.5, "top_p": 0.9, "max_new_tokens": 3, "seed": 4}
    model, again = Adds(), Adds()
    for each in (model, again):
        make(rows, stop=["\n"], **told).run(each)
    assert [len(prompts) for prompts, *_ in model.asked] == [3, 3, 1]
    assert {asked[1:5] for asked in model.asked} == {(2, 0.5, 0.9, 3)}
    assert len({asked[5] for asked in model.asked}) == 3  # a seed of its own for each batch
    assert again.asked == model.asked


def test_progress_is_told_and_an_answer_ends_before_the_next_question_of_the_template(rows):
    told = []
    make(rows, batch_size=3).run(Adds(), lambda *numbers: told.append(numbers))
    assert told == [(3, 7), (6, 7), (7, 7)]
    model = Adds()
    make(rows, stop=["x"]).run(model)
    assert [stop for *_, stop, _ in model.asked] == [["x", "\nQ:"]]


def test_examples_stand_in_front_and_are_of_the_same_group_or_the_first_ones(rows, tmp_path):
    shots = [{**row, "output": f"{row['output']}!"} for row in ROWS[::-1]]
    data = TaskRows(write_rows(tmp_path / "shots.jsonl", shots), columns=COLUMNS, template="{instruction}")
    _, _, prompts = make(rows, shots=data, num_shots=2).read()
    assert prompts[0] == "Q: 6+1 A: 7!\n\nQ: 4+1 A: 5!\n\nQ: 0+1 A:"
    assert prompts[1] == "Q: 5+1 A: 6!\n\nQ: 3+1 A: 4!\n\nQ: 1+1 A:"
    assert prompts[5] == "Q: 3+1 A: 4!\n\nQ: 1+1 A: 2!\n\nQ: 5+1 A:"  # not the question itself
    with pytest.raises(ValueError, match="num_shots=4, but shots has only 3 other rows for 'even'"):
        make(rows, shots=data, num_shots=4).read()
    shots = [{**row, "domain": "other"} for row in ROWS]
    data = TaskRows(write_rows(tmp_path / "shots.jsonl", shots), columns=COLUMNS, template="{instruction}")
    assert make(rows, shots=data, num_shots=1).read()[2][5] == "Q: 0+1 A: 1\n\nQ: 5+1 A:"


def test_a_limit_draws_rows_by_the_seed(rows):
    index, examples, prompts = make(rows, limit=3, seed=1).read()
    assert len(prompts) == 3
    assert index == sorted(index)
    assert [example.target for example in examples] == [str(row + 1) for row in index]
    assert make(rows, limit=3, seed=1).read()[0] == index
    assert len({tuple(make(rows, limit=3, seed=seed).read()[0]) for seed in range(9)}) > 1
    assert make(rows, limit=70).read()[0] == list(range(7))


def test_a_row_counts_the_mean_of_its_answers():
    class Draws(Adds):
        def generate(self, prompts, n, *rest, **others):
            return [["1", "1", "2", ""] for _ in prompts]

    class Given:
        def rows(self, names):
            return [{"instruction": "", "input": "", "response": "1"}]

        def prompt(self, fields, shots):
            return "?"

    result = ExactMatch(Given(), samples=4, temperature=1.0).run(Draws())
    assert (result.mean, result.unread) == (0.5, 0.25)
    # One row: (0.5 + z^2/2 +- z sqrt(1/4 + z^2/4)) / (1 + z^2) = (2.4207 +- 2.1563) / 4.8415.
    assert result.interval == (pytest.approx(0.0546, abs=1e-4), pytest.approx(0.9454, abs=1e-4))
    low, high = result.interval
    assert result.metrics("a") == {"score/a": 0.5, "unread/a": 0.25, "low/a": low, "high/a": high}
    assert str(result) == "0.5000 [0.0546, 0.9454] of 1 rows, 25.0% of the answers could not be read"


def test_prompts_that_are_too_long_are_not_asked_and_wrong(rows):
    class Short(Adds):
        def fits(self, prompts, new_tokens):
            assert new_tokens == 9
            return ["2+1" not in prompt and "5+1" not in prompt for prompt in prompts]

    model, told = Short(), []
    result = make(rows, max_new_tokens=9).run(model, lambda *numbers: told.append(numbers))
    assert [outcome.score for outcome in result.outcomes] == [1, 1, 0, 0, 1, 0, 1]
    assert [len(outcome.answers) for outcome in result.outcomes] == [1, 1, 0, 1, 1, 0, 1]
    assert not any("2+1" in prompt for prompts, *_ in model.asked for prompt in prompts)
    assert told == [(5, 5)]
    assert result.too_long == 2
    assert str(result).endswith("28.6% of the answers could not be read, 2 prompts too long for the model")
    drawn = make(rows, max_new_tokens=9, samples=3, temperature=1.0).run(Short())
    assert (drawn.unread, drawn.too_long) == (pytest.approx(2 / 7), 2)  # each row has the same weight


def test_rows_are_chosen_by_a_column_or_a_share(rows):
    data = TaskRows(rows, columns=COLUMNS, template="{instruction}", where={"domain": ["odd"]})
    assert [row["response"] for row in data.rows(["response"])] == ["2", "4", "6"]
    with pytest.raises(ValueError, match=r"no row has \{'domain': \['prime'\]\}"):
        TaskRows(rows, where={"domain": ["prime"]}).rows(["instruction"])
    data = TaskRows(rows, columns=COLUMNS, share=0.4)
    drawn = [str(row + 1) for row in task_rows.draw_test_rows(7, 0.4, 42)]
    assert [row["response"] for row in data.rows(["response"])] == drawn
    with pytest.raises(ValueError, match="share=1 must be in"):
        TaskRows(rows, share=1)


@pytest.mark.parametrize(("number", "share"), [(1213, 0.226), (4846, 0.25), (10, 0.33)])
def test_held_out_rows_are_those_of_datasets(number, share):
    from datasets import Dataset

    split = Dataset.from_dict({"row": list(range(number))}).train_test_split(test_size=share, seed=42)
    assert split["test"]["row"][:] == task_rows.draw_test_rows(number, share, seed=42)


def test_what_cannot_be_meant_is_refused(rows, tmp_path):
    wrong = {"limit=0": " must be at least 1", "batch_size=0": " must be at least 1"}
    wrong |= {"num_shots=2": ": set shots", "samples=2": " greedy answers are all equal"}
    wrong |= {"temperature=-1": " must be in", "top_p=0": " must be in"}
    for setting, why in wrong.items():
        name, value = setting.split("=")
        with pytest.raises(ValueError, match=setting + why):
            make(rows, **{name: int(value)})
    with pytest.raises(ValueError, match="an empty text would end every answer at once"):
        make(rows, stop=["\n", ""])
    with pytest.raises(ValueError, match="no column 'answer'"):
        make(rows, columns={"response": "answer"}).read()
    with pytest.raises(
        ValueError, match=r"columns.respones would be read for nothing; did you mean 'response'"
    ):
        make(rows, columns={"respones": "output"}).read()
    with pytest.raises(ValueError, match=r"slot \{post\}, but the task fills instruction, input"):
        ExactMatch(TaskRows(rows, columns=COLUMNS, template="{post}")).read()
    blank = write_rows(tmp_path / "blank.jsonl", [*ROWS, {**ROWS[0], "instruction": "", "input": ""}])
    with pytest.raises(ValueError, match=r"ExactMatch\.data, row 7: the prompt is empty: leave the row out"):
        ExactMatch(TaskRows(blank, columns=COLUMNS, template="{instruction}{input}")).read()
    for nothing in ("", "..."):  # what is left of it is equal to an empty answer
        hollow = write_rows(tmp_path / "hollow.jsonl", [*ROWS, {**ROWS[0], "output": nothing}])
        with pytest.raises(ValueError, match=r"ExactMatch\.data, row 7: the response '.*' is empty"):
            make(hollow).read()


def test_answers_of_whole_sentences_are_scored_by_rouge_l(rows):
    by_overlap = make(rows, by="rouge_l")
    row = {"instruction": "?", "input": "", "response": "the cat sat down", "group": ""}
    example = by_overlap.example(row)
    scored = [by_overlap.score(example, answer) for answer in ("the cat ran", "the cat sat down.", "")]
    # Two words in common: precision 2/3, recall 2/4.
    assert [verdict.score for verdict in scored] == [pytest.approx(4 / 7), 1, 0]
    assert [verdict.read for verdict in scored] == ["the cat ran", "the cat sat down", None]
    with pytest.raises(ValueError, match="no Latin letter or digit for ROUGE-L: set by to equality"):
        by_overlap.example({**row, "response": "\u4f60\u597d"})
    with pytest.raises(ValueError, match="by='bleu' is not one of equality, rouge_l"):
        make(rows, by="bleu")
