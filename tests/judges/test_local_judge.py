import math

import pytest
from tiny_world import make_model
from transformers import AutoTokenizer

from fedlight.evaluation.judge import BothPositions
from fedlight.evaluation.tasks.model import Likelihood
from fedlight.generators.local_generator import LocalGenerator
from fedlight.judges.duels import made_judge
from fedlight.judges.local_judge import LocalJudge, by_both_orders, likeliest
from fedlight.judges.pairwise import WORDS, pairwise_prompt
from fedlight.modules.sft import SFTModule

FIELDS = [{"prompt": f"{name} bakes bread ."} for name in ("anna", "ben", "gina", "finn", "anna", "ben")]
OURS = ["anna bakes .", "ben reads maps .", "same", "finn", "bread", "maps"]
THEIRS = ["bread .", "ben", " same ", "anna paints walls . " * 60, "anna", "ben bakes"]


def judge(model, **options):
    return LocalJudge(model, **{"question": "{prompt}", "device": "cpu", **options})


def expected(module, fields, ours, theirs):
    """One pair at a time, from the module's own likelihoods."""
    prompt = pairwise_prompt(fields["prompt"], ours, theirs, at_once=True)
    (said,) = module.log_likelihoods([prompt], [[" A", " B", " tie"]])
    return {0: 1.0, 1: 0.0, 2: 0.5}[max(range(3), key=lambda index: said[index].log_prob)]


@pytest.fixture(scope="module")
def module(tiny_model):
    module = SFTModule(tiny_model)
    module.configure_model()
    return module


def test_the_verdict_is_the_likeliest_of_three(tiny_model, module, caplog):
    read = (0, 1, 4, 5)  # of the others, equal answers are not shown, and one is longer than 256 tokens
    alone = [expected(module, FIELDS[n], OURS[n], THEIRS[n]) for n in read]
    for batch_size in (2, 64):
        asked = judge(tiny_model, batch_size=batch_size)
        with caplog.at_level("INFO", logger="lightning.pytorch.utilities.rank_zero"):
            found = asked.verdicts(FIELDS, OURS, THEIRS)
        assert found[2] == 0.5
        assert math.isnan(found[3])
        assert [found[n] for n in read] == alone
        assert (asked.too_long, asked.unread) == (1, 0)
    assert caplog.text.count("do not fit into the model; they are not read: set most_words") == 2
    assert judge(tiny_model, most_words=8).verdicts(FIELDS, OURS, THEIRS)[3] in (0.0, 0.5, 1.0)


def test_a_model_that_would_say_something_else_is_not_read(tiny_model, module):
    """An untrained model goes on with any of its words: hardly ever with one of these three."""
    asked = judge(tiny_model, forced=False)
    found = asked.verdicts(FIELDS[:2], OURS[:2], THEIRS[:2])
    assert all(math.isnan(verdict) for verdict in found)
    assert (asked.unread, asked.too_long) == (2, 0)
    said = [Likelihood(-0.1, 1, True), Likelihood(-2.0, 1, False), Likelihood(-3.0, 1, False)]
    assert asked._verdict(said) == 1


def test_the_judge_is_shown_both_orders(tiny_model):
    asked = judge(tiny_model)
    first, second = BothPositions(asked).verdicts(FIELDS[:2], OURS[:2], THEIRS[:2])
    assert first == asked.verdicts(FIELDS[:2], OURS[:2], THEIRS[:2])
    assert second == [1 - verdict for verdict in asked.verdicts(FIELDS[:2], THEIRS[:2], OURS[:2])]


def test_a_taste_for_a_letter_cancels(tiny_model, monkeypatch):
    """The model says A in both orders, by 2.65 nats; the longer answer adds 0.14, and a pair too long has no verdict."""
    asked = judge(tiny_model, orders="both")
    assert not asked.sees_order
    assert BothPositions(judge(tiny_model, orders="both")).judge.sees_order is False

    def ask(pairs):
        odds = [2.65 + math.copysign(0.14, len(a) - len(b)) for _, a, b in pairs]
        others = [Likelihood(0.0, 1, False), Likelihood(-9.0, 1, False)]
        said = [[Likelihood(value, 1, True), *others] for value in odds]
        return [None if len(a) > 100 else words for (_, a, _), words in zip(pairs, said, strict=True)]

    monkeypatch.setattr(asked, "_ask", ask)
    found = asked.verdicts(FIELDS, OURS, THEIRS)
    assert [found[index] for index in (0, 1, 2, 4, 5)] == [1.0, 1.0, 0.5, 1.0, 0.0]
    assert math.isnan(found[3])
    assert (asked.too_long, asked.unread) == (1, 0)
    one = judge(tiny_model)
    monkeypatch.setattr(one, "_ask", ask)
    for first, second in ((OURS, THEIRS), (THEIRS, OURS)):
        assert one.verdicts(FIELDS[:2], first[:2], second[:2]) == [1, 1]
    with pytest.raises(ValueError, match="compares A and B alone: leave forced=false out"):
        judge(tiny_model, orders="both", forced=False)


def test_both_orders_are_the_models_own(tiny_model, module):
    (verdict,) = judge(tiny_model, orders="both").verdicts(FIELDS[:1], OURS[:1], THEIRS[:1])
    odds = []
    for one, other in ((OURS[0], THEIRS[0]), (THEIRS[0], OURS[0])):
        prompt = pairwise_prompt(FIELDS[0]["prompt"], one, other, at_once=True)
        (said,) = module.log_likelihoods([prompt], [[" A", " B"]])
        odds.append(said[0].log_prob - said[1].log_prob)
    assert verdict == float(odds[0] > odds[1])


def test_a_chat_template_is_around_the_question(tmp_path):
    model = make_model(tmp_path / "chat")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = "{% for m in messages %}USER {{ m.content }}{% endfor %}{{ ' ASSISTANT ' }}"
    tokenizer.save_pretrained(model)
    asked = judge(model, chat=True)
    asked._loaded()
    prompt = asked._prompt({"prompt": "q"}, "first", "second")
    assert prompt.startswith("USER You are to compare")
    assert prompt.endswith("A, B, or is it a tie? ASSISTANT VERDICT:")
    assert asked.verdicts(FIELDS[:1], OURS[:1], THEIRS[:1])[0] in WORDS.values()


def test_what_is_wrong_is_said(tiny_model, tmp_path):
    SFTModule(tiny_model, num_adapters=2).save_adapter(tmp_path)
    for reads in (LocalJudge, LocalGenerator):
        with pytest.raises(
            ValueError, match="has several adapters: give one of its folders, such as adapter0"
        ):
            reads(tiny_model, adapter=str(tmp_path))
    with pytest.raises(ValueError, match="most_words=0 must be at least 1"):
        judge(tiny_model, most_words=0)
    with pytest.raises(ValueError, match="batch_size=0 must be at least 1"):
        judge(tiny_model, batch_size=0)
    with pytest.raises(ValueError, match="has no chat template: set it to false"):
        judge(tiny_model, chat=True).verdicts(FIELDS[:1], OURS[:1], THEIRS[:1])
    with pytest.raises(ValueError, match=r"LocalJudge reads \{instruction\}, but the prompts have prompt"):
        LocalJudge(tiny_model).verdicts(FIELDS[:1], OURS[:1], THEIRS[:1])
    assert not made_judge(spec(model=tiny_model, forced=False)).forced


def spec(**init_args):
    return {"class_path": "fedlight.judges.local_judge.LocalJudge", "init_args": init_args}


@pytest.mark.parametrize("question", ["{prompt} \U0001f642", "SUBREDDIT: {prompt} # '", "1: {prompt}"])
def test_a_template_reaches_the_judge_as_it_was_written(question):
    assert made_judge(spec(model="toy", question=question)).question.text == question


def test_equal_probabilities_tie():
    said = [-1, -1, -2], [-1, -2, -1], [-3, -3, -1], [-2, -1, -3]
    assert [*map(likeliest, said)] == [0.5, 0.5, 0.5, 0]


def test_a_model_that_gives_nan_is_not_read():
    broken = [Likelihood(value, 1, False) for value in (math.nan, -1.0, -1.0)]
    assert math.isnan(likeliest([-1.0, math.nan, -2.0]))
    assert math.isnan(by_both_orders(broken, broken))
