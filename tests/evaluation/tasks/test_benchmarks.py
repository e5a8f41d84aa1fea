import gzip
import json
import os
from decimal import Decimal
from pathlib import Path

import pytest
from tiny_world import write_rows

from fedlight.datamodules.rows.task_rows import TaskRows
from fedlight.evaluation.tasks.exact_match import ExactMatch
from fedlight.evaluation.tasks.gsm8k import GSM8K, final_number
from fedlight.evaluation.tasks.model import Likelihood
from fedlight.evaluation.tasks.multiple_choice import MultipleChoice
from fedlight.evaluation.tasks.sentiment import Sentiment

SHARED = Path(os.environ.get("FEDLIGHT_SHARED", "nowhere"))
real = pytest.mark.skipif(not SHARED.is_dir(), reason="needs FEDLIGHT_SHARED")
PLAIN = "{instruction}\n{input}\nAnswer:"
MATH = {"question": "How many?", "answer": "2 * 500 = <<2*500=1000>>1000 legs.\n#### 1,000"}
BONES = {
    "subject": "human_anatomy",
    "question": "Which bone?",
    "choices": ["femur", "ulna", "the hyoid"],
    "answer": "C",
}


class Likes:
    """Finds likely what it is told to, and writes the same to every prompt."""

    def __init__(self, log_prob, writes=""):
        self.log_prob, self.writes, self.asked = log_prob, writes, []

    def generate(self, prompts, *args, **options):
        return [[self.writes] for _ in prompts]

    def log_likelihoods(self, prompts, continuations):
        self.asked += [(prompt, list(own)) for prompt, own in zip(prompts, continuations, strict=True)]
        return [[Likelihood(self.log_prob[t], len(t.split()), False) for t in own] for own in continuations]


class Short(Likes):
    """The first prompt is too long for it."""

    def fits(self, prompts, new_tokens):
        return [index > 0 for index, _ in enumerate(prompts)]


def task_of(kind, rows, tmp_path, template=PLAIN, **options):
    return kind(TaskRows(write_rows(tmp_path / "rows.jsonl", rows), template=template), **options)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("#### 1,000", "1000"),
        ("#### $-5.", "-5"),
        ("x #### 7 then 9", "7"),
        ("so 3 and 4.", "4"),
        ("16 - 3", "3"),
        ("16-3", "3"),
        ("= -3", "-3"),
        ("(\u22123)", "-3"),
        ("-$3.50 in all", "-3.50"),
        ("-\\$3.50", "-3.50"),
        ("#### -$-5", "-5"),
        ("\u2212$ -5", "-5"),
        ("$1,234,567.89!", "1234567.89"),
        ("50%", "50"),
        ("\\boxed{17}", "17"),
        (".5", "0.5"),
        ("#### no", None),
        ("none", None),
        ("", None),
    ],
)
def test_the_number_at_the_end(text, number):
    assert final_number(text) == (None if number is None else Decimal(number))


def test_gsm8k(tmp_path):
    task = task_of(GSM8K, [MATH], tmp_path, template="alpaca")
    _, [example], [prompt] = task.read()
    assert prompt.endswith("### Instruction:\nHow many?\n\n### Response:")
    assert example.target == "1000"
    assert example.shown == "2 * 500 = 1000 legs.\n#### 1,000"
    read = {"#### 1000.0": (1, "1000.0"), "it is $1,000": (1, "1000"), "1001": (0, "1001"), "many": (0, None)}
    for answer, expected in read.items():
        verdict = task.score(example, answer)
        assert (verdict.score, verdict.read) == expected
    with pytest.raises(ValueError, match=r"GSM8K\.data, row 0: the answer has no number behind ####"):
        task_of(GSM8K, [{**MATH, "answer": "1000"}], tmp_path).read()


def test_multiple_choice_by_letters(tmp_path):
    task = task_of(MultipleChoice, [BONES, {**BONES, "subject": "law", "answer": 0}], tmp_path)
    model = Likes({" A": -2.0, " B": -3.0, " C": -1.0}, writes=" A. femur")
    result = task.run(model)
    prompt = (
        "Answer the following multiple choice question about human anatomy. Give the letter of the right choice.\n"
        "Which bone?\nA. femur\nB. ulna\nC. the hyoid\nAnswer:"
    )
    assert (prompt, [" A", " B", " C"]) in model.asked
    assert [outcome.answers for outcome in result.outcomes] == [[" A. femur", "C"], [" A. femur", "C"]]
    assert result.by_group == {"human_anatomy": 1.0, "law": 0.0}
    found = result.metrics("mmlu")
    assert (found["score/mmlu"], found["likelihood/mmlu"], found["generated/mmlu"]) == (0.5, 0.5, 0.5)
    shares = {name: share for name, share in found.items() if name.startswith("share/")}
    assert shares == {"share/mmlu/generated/A": 1.0, "share/mmlu/likelihood/C": 1.0}
    assert str(result).endswith("of 2 rows; generated 0.5000 (A 100%); likelihood 0.5000 (C 100%)")


def test_unread_answers_and_prompts_that_are_too_long_are_wrong(tmp_path):
    task = task_of(MultipleChoice, [BONES, BONES], tmp_path)
    result = task.run(Likes({" A": -2.0, " B": -3.0, " C": -1.0}, writes=" A bone is hard"))
    assert (result.mean, result.unread) == (1.0, 1.0)
    assert result.metrics("x")["generated/x"] == 0
    model = Short({" A": -2.0, " B": -3.0, " C": -1.0}, writes="C")
    found = task_of(MultipleChoice, [BONES, BONES], tmp_path).run(model).metrics("x")
    assert (found["score/x"], found["generated/x"], found["likelihood/x"]) == (0.5, 0.5, 0.5)


def test_with_no_tokens_nothing_is_written_and_the_likeliest_choice_counts(tmp_path):
    class Silent(Short):
        generate = None  # an error if called

    task = task_of(MultipleChoice, [BONES, BONES, BONES], tmp_path, max_new_tokens=0)
    result = task.run(Silent({" A": -2.0, " B": -3.0, " C": -1.0}))
    assert [outcome.answers for outcome in result.outcomes] == [[], ["C"], ["C"]]
    assert (result.too_long, result.metrics("x")["unread/x"]) == (1, 0)
    assert not [name for name in result.metrics("x") if "generated" in name]
    assert "could not be read" not in str(result)
    broken = task.run(Silent({" A": float("nan"), " B": -3.0, " C": -1.0}))
    assert (broken.outcomes[1].answers, broken.mean) == ([""], 0)
    with pytest.raises(ValueError, match=r"ExactMatch\.max_new_tokens=0 must be at least 1"):
        task_of(ExactMatch, [BONES], tmp_path, max_new_tokens=0)


def test_yes_no_or_maybe_after_an_abstract(tmp_path):
    row = {"context": ["First part.", "Second part."], "question": "Does it help?", "answer": "maybe"}
    options = {"subject": False, "context": True, "choices": ["yes", "no", "maybe"], "by": "text"}
    task = task_of(MultipleChoice, [row, {**row, "answer": "no"}], tmp_path, instruction="Say.", **options)
    model = Likes({" yes": -1.0, " no": -3.0, " maybe": -0.5}, writes="No, it does not.")
    result = task.run(model)
    assert task.read()[2][0] == "Say.\nFirst part.\nSecond part.\nDoes it help?\nAnswer:"
    assert [outcome.score for outcome in result.outcomes] == [1.0, 0.0]
    found = result.metrics("p")
    assert (found["share/p/generated/no"], found["share/p/likelihood/maybe"]) == (1.0, 1.0)
    assert (found["generated/p"], found["likelihood/p"]) == (0.5, 0.5)


@pytest.mark.parametrize(
    ("normalize", "best"),
    [("sum", "ulna"), ("tokens", "the hyoid"), ("bytes", "femur")],  # -4/-3/-5.5; /1/1/2; /5/4/9
)
def test_multiple_choice_by_texts(normalize, best, tmp_path):
    task = task_of(MultipleChoice, [BONES], tmp_path, by="text", normalize=normalize, subject=False)
    log_prob = {" femur": -3.01, " ulna": -3.0, " the hyoid": -5.9}
    _, _, [prompt] = task.read()
    assert prompt.endswith("choice.\nWhich bone?\nAnswer:")
    assert task.run(Likes(log_prob)).outcomes[0].answers == ["", best]


@pytest.mark.parametrize("choices", [["5", "-5"], ["<", ">"], ["AA", "Aa"], ["yes!!!!", "yes no"]])
def test_choices_of_the_same_words_are_told_apart(choices, tmp_path):
    rows = [{"question": "Which?", "choices": choices, "answer": answer} for answer in (0, 1)]
    task = task_of(MultipleChoice, rows, tmp_path, by="text", subject=False)
    for right, choice in enumerate(choices):
        log_prob = {f" {text}": -float(text != choice) for text in choices}
        result = task.run(Likes(log_prob, writes=f" {choice} "))
        assert [outcome.score for outcome in result.outcomes] == [right == 0, right == 1]
        assert result.metrics("x")["generated/x"] == 0.5
        assert [outcome.verdicts[0].read for outcome in result.outcomes] == ["AB"[right]] * 2
    assert task.run(Likes(log_prob)).unread == 1.0


def test_multiple_choice_refuses(tmp_path):
    with pytest.raises(ValueError, match="normalize=bytes is for by=text"):
        task_of(MultipleChoice, [BONES], tmp_path, normalize="bytes")
    for wrong in ("D", 3, "", "AB", None):
        with pytest.raises(ValueError, match="is none of the 3 choices"):
            task_of(MultipleChoice, [{**BONES, "answer": wrong}], tmp_path).read()
    with pytest.raises(ValueError, match="11 choices, but only 10 letters"):
        task_of(MultipleChoice, [{**BONES, "choices": ["x"] * 11, "answer": 10}], tmp_path).read()
    hollow = {**BONES, "choices": ["femur", "", "ulna"]}
    assert task_of(MultipleChoice, [hollow], tmp_path).read()[1][0].choices == ("A", "B", "C")
    with pytest.raises(ValueError, match=r"row 0: one of the choices .* is empty"):
        task_of(MultipleChoice, [hollow], tmp_path, by="text").read()
    for choices in ("yes,no", {"text": ["yes", "no"], "label": ["A", "B"]}, None):
        with pytest.raises(ValueError, match=r"row 0: the choices .* are no list"):
            task_of(MultipleChoice, [{**BONES, "choices": choices, "answer": 0}], tmp_path).read()
    with pytest.raises(ValueError, match=r"row 0: the context \{.*\} is neither a text nor a list"):
        task_of(MultipleChoice, [{**BONES, "context": {"contexts": ["x"]}}], tmp_path, context=True).read()


def test_sentiment_as_fingpt_asks(tmp_path):
    news = task_of(Sentiment, [{"text": "Sales rose .", "label": 2}], tmp_path, coding="fpb")
    question = "What is the sentiment of this news? Please choose an answer from {negative/neutral/positive}."
    assert news.read()[2] == [f"{question}\nSales rose .\nAnswer:"]
    assert news.read()[1][0].target == "positive"
    forms = {-0.4: "post", 0.05: "headline"}
    rows = [{"text": "$X", "label": score, "format": form} for score, form in forms.items()]
    fiqa = task_of(Sentiment, rows, tmp_path, coding="fiqa")
    assert ["this tweet" in prompt for prompt in fiqa.read()[2]] == [True, False]
    assert [example.target for example in fiqa.read()[1]] == ["negative", "neutral"]
    tweets = task_of(Sentiment, [{"text": "up", "label": code} for code in range(3)], tmp_path, coding="tfns")
    assert "this tweet" in tweets.read()[2][0]
    assert [example.target for example in tweets.read()[1]] == ["negative", "positive", "neutral"]


def test_sentiment_answers_are_read_strictly(tmp_path):
    task = task_of(Sentiment, [{"text": "x", "label": "neutral"}], tmp_path, coding="fpb")
    _, [example], _ = task.read()
    neutral = (1, "neutral")
    read = {" Neutral.": neutral, "neutral\nneutral": neutral}
    read |= {"neutrally": (0, None), "positive": (0, "positive")}
    for answer, expected in read.items():
        verdict = task.score(example, answer)
        assert (verdict.score, verdict.read) == expected


@pytest.mark.parametrize(("coding", "label"), [("fpb", 3), ("tfns", ""), ("fiqa", 1.5), ("fiqa", "good")])
def test_sentiment_refuses_other_labels(coding, label, tmp_path):
    with pytest.raises(ValueError, match=r"Sentiment\.data, row 0: the label"):
        task_of(Sentiment, [{"text": "x", "label": label, "format": "post"}], tmp_path, coding=coding).read()


@real
@pytest.mark.parametrize("split", ["train", "test"])
def test_all_answers_of_gsm8k_are_read(split):
    file = SHARED / f"data/gsm8k/{split}.jsonl.gz"
    with gzip.open(file, "rt") as lines:
        raw = [json.loads(line)["answer"].split("####")[1].strip().replace(",", "") for line in lines]
    task = GSM8K(TaskRows(str(file)))
    _, examples, _ = task.read()
    assert [example.target for example in examples] == raw
    assert len(raw) == {"train": 7473, "test": 1319}[split]
    assert all(task.score(example, example.shown).score == 1 for example in examples)
    assert all(task.score(example, f"So the answer is ${example.target}.").score == 1 for example in examples)


@real
def test_the_medicine_of_mmlu():
    folder = SHARED / "data/mmlu_medical"
    test, dev = (TaskRows(str(folder / f"{name}.jsonl.gz")) for name in ("test", "dev"))
    task = MultipleChoice(test, shots=dev, num_shots=5)
    _, examples, prompts = task.read()
    assert len(examples) == 1089
    assert len({example.group for example in examples}) == 6
    assert {prompt.count("### Response:") for prompt in prompts} == {6}
    for example, prompt in zip(examples, prompts, strict=True):
        assert prompt.count(f"question about {example.group.replace('_', ' ')}.") == 6
        assert example.fields["input"] in prompt.split("### Instruction:")[-1]
