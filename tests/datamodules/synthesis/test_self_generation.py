import re
from collections import Counter

import pytest
import transformers
from refusals import refusal
from scripted_model import ScriptedModel, Words
from self_generating import ALPACA, dropped, in_words, made, once, rows

from fedlight import toy
from fedlight.datamodules.synthesis.filters import LONG, OwnTexts
from fedlight.datamodules.synthesis.self_generation import NewInstructions, NewResponses, SelfGeneration
from fedlight.datamodules.text.templates import Template
from fedlight.recipes import recipe


def test_a_candidate_has_the_new_instruction_and_what_was_answered():
    model = ScriptedModel(respond=lambda asked, _: f"Input: {asked[-1]} apples\nResponse: some\n\nlines ")
    synthesis = in_words(number=2)
    assert made(synthesis, {"a": rows(9)}, model) == {
        "a": [
            {"instruction": "write about thing0", "input": "0 apples", "response": "some\n\nlines"},
            {"instruction": "write about thing1", "input": "1 apples", "response": "some\n\nlines"},
        ]
    }
    assert synthesis.counts == Counter(tried=2, survived=2)
    (first, second) = model.calls
    assert first[0] == second[0] == 2
    assert (first[1], first[3:]) == (0.0, (("\nTask ", "\n\n"), 64))
    assert second[3:] == (("\nInstruction:",), 256)


def test_eight_instructions_and_four_examples_are_shown():
    model = ScriptedModel()
    own = rows(20, inputs=10)
    made(in_words(number=5), {"a": own}, model)
    for prompt in model.first:
        assert prompt.endswith("\nTask 9:")
        shown = [row for row in own if row["instruction"] in prompt]
        assert len(shown) == 8
        assert not any(row["response"] in prompt for row in own)
    assert len(set(model.first)) == 5
    for prompt in model.second:
        labelled = [line for line in prompt.splitlines() if line.startswith("Input: ")]
        assert [line == "Input: none" for line in labelled] == [False, True, False, True]
        assert sum(row["response"] in prompt for row in own) == 4


def test_a_template_without_inputs_has_none():
    template = Template("Q: {question}")
    own = [{"question": row["instruction"], "response": row["response"]} for row in rows(5)]
    synthesis = once(1, instruction_slot="question")
    assert made(synthesis, {"a": own}, ScriptedModel(), template=template) == {
        "a": [{"question": "write about thing0", "response": "done write about thing0"}]
    }
    insisting = ScriptedModel(respond=lambda *_: "Input: 3\nResponse: 4")
    assert made(synthesis, {"a": own}, insisting, template=template) == {"a": []}
    assert dropped(synthesis) == {"no_match": 1}
    with refusal(r"instruction_slot='instruction', but the template has question: set"):
        in_words().make({"a": own}, template, ScriptedModel(), 0)
    with refusal("SelfGeneration writes no conversations: give data.columns.instruction and"):
        once(1, instruction_slot="messages").make({"a": []}, Template("{messages}"), ScriptedModel(), 0)


def test_further_slots_are_left_empty():
    own = [{**row, "system": "s"} for row in rows(3)]
    template = Template("{system} {instruction} {input}")
    (only,) = made(in_words(number=1), {"a": own}, ScriptedModel(), template=template)["a"]
    assert only["system"] == ""


@pytest.mark.parametrize(
    ("texts", "reasons"),
    [
        (["", "  "], {"empty": 2}),
        (["12 + 30 = 4", "?!?"], {"no_letter": 2}),
        (["Why so", "Add 3 4"], {"too_short": 1}),
        (["As a language model, I", "as An ai", "Sorry, but no way"], {"refusal": 3}),
        (["As assembled, name it", "Sorryful people do what"], {}),
        (["explain apple number1 to my1 grandmother", "EXPLAIN apple number1 to!"], {"near_instruction": 2}),
        (["Name one planet here", "name  one planet HERE"], {"repeated": 1}),
        (["Name one planet here", "Name one planet there"], {}),  # too near only to a candidate
        ([" ".join(f"long{n}" for n in range(64)), "a short one"], {"cut_off": 1}),
    ],
)
def test_instructions_that_are_dropped(texts, reasons):
    synthesis = once(len(texts))
    found = made(synthesis, {"a": rows(9)}, ScriptedModel(write=texts.__getitem__))
    assert dropped(synthesis) == reasons
    assert len(found["a"]) == len(texts) - sum(reasons.values())


def test_the_limit_of_rouge_l_is_above_not_at():
    # 7 of 10 words in common on both sides: ROUGE-L is exactly 0.7
    own = [{"instruction": "a b c d e f g h i j", "input": "", "response": "x"}]
    model = ScriptedModel(write=lambda _: "a b c d e f g 8 9 10")
    synthesis = once(1)
    assert len(made(synthesis, {"a": own}, model)["a"]) == 1
    stricter = once(1, max_rouge_l=0.69)
    assert made(stricter, {"a": own}, model) == {"a": []}
    assert dropped(stricter) == {"near_instruction": 1}


def test_another_clients_instructions_do_not_count():
    same = ScriptedModel(write=lambda _: "explain apple number1 to my1 grandmother1")
    synthesis = once(1)
    found = made(synthesis, {"a": rows(4), "b": rows(4, words="unlike anything that was said before")}, same)
    assert (len(found["a"]), len(found["b"])) == (0, 1)


@pytest.mark.parametrize(
    "answer",
    [
        *("", "Response: four", "Input: none", "Input: none\nResponse:", "Input: none Response: four"),
        *("The answer.\nInput: none\nResponse: four", "Input: none\nResponse: four\nInput: more"),
        "Input: none\nResponse: four\nResponse: five",
    ],
)
def test_answers_of_another_form_are_asked_for_three_times(answer):
    model = ScriptedModel(respond=lambda *_: answer)
    synthesis = once(2)
    assert made(synthesis, {"a": rows(12)}, model) == {"a": []}
    assert dropped(synthesis) == {"no_match": 2}
    assert [call[0] for call in model.calls] == [2, 2, 2, 2]
    assert len(set(model.second)) == 6  # with other demonstrations each time


def test_a_later_try_may_succeed_and_the_others_are_not_asked_again():
    def respond(instruction, number):
        good = number == int(instruction[-1])
        return f"Input: none\nResponse: try {number}" if good else "nothing"

    model = ScriptedModel(respond=respond)
    synthesis = once(4)
    found = made(synthesis, {"a": rows(12)}, model)["a"]
    assert [row["response"] for row in found] == ["try 0", "try 1", "try 2"]
    assert [call[0] for call in model.calls] == [4, 4, 3, 2]
    assert dropped(synthesis) == {"no_match": 1}
    other = ScriptedModel(respond=respond)
    (only,) = made(once(4, responses=NewResponses(tries=1)), {"a": rows(12)}, other)["a"]
    assert only["response"] == "try 0"


def test_copies_of_local_examples_are_dropped():
    own = [{"instruction": "add them up", "input": "1 2 3 4 5 6 7 8 9 10", "response": "55"}]
    answers = {
        "compute their whole sum": "Input: 1 2 3 4 5 6 7 8 9 10\nResponse: 55",
        "say all in order": "Input: one\nResponse: two",
    }
    model = ScriptedModel(write=[*answers].__getitem__, respond=lambda asked, _: answers[asked])
    synthesis = once(2, temperature=0.5)
    found = made(synthesis, {"a": own}, model)
    assert [row["instruction"] for row in found["a"]] == ["say all in order"]
    assert dropped(synthesis) == {"near_example": 1}


PRIVATE, SHORT = "Take two of these after each meal, and call again on Monday.", "Two after each meal."


@pytest.mark.parametrize(
    ("private", "new_input", "new_response", "dropped_as"),
    [
        (PRIVATE, "None", PRIVATE, "near_response"),
        (SHORT, "None", SHORT, None),
        (PRIVATE, "None", f"Well now, let me think about that first. {PRIVATE}", "near_response"),
        (PRIVATE, PRIVATE, "Yes.", "near_input"),
        (PRIVATE, "None", "take two of these after each meal, and call", "near_response"),
        (PRIVATE, "None", "Take a walk after each of these, and call on Sunday or Monday instead.", None),
    ],
)
def test_long_private_texts_are_dropped_under_a_new_instruction(private, new_input, new_response, dropped_as):
    """Amid new text and in another field, too; the whole row is unlike the client's own: its instruction is longer."""
    own = [{"instruction": "my head aches", "input": "", "response": private}]
    asked = " ".join(f"word{number}" for number in range(40))
    answer = f"Input: {new_input}\nResponse: {new_response}"
    synthesis = once(1, temperature=0.5)
    found = made(synthesis, {"a": own}, ScriptedModel(write=lambda _: asked, respond=lambda *_: answer))
    assert len(found["a"]) == (dropped_as is None)
    assert dropped(synthesis) == ({dropped_as: 1} if dropped_as else {})


@pytest.mark.parametrize("name", ["fewfedpit", "fewfedpit_rule"])
def test_rows_that_the_toy_world_makes_are_too_short_to_be_compared_with_long_texts(name):
    """So the filter of long texts drops no row of the recorded runs."""
    pattern = recipe.load(name)["prompts"]["init_args"]["response"]["pattern"]
    words = transformers.AutoTokenizer.from_pretrained(toy.MODEL).get_vocab()
    word, number = (max(filter(re.compile(kind).fullmatch, words), key=len) for kind in ("[a-z]+", "[0-9]+"))
    made_up = re.fullmatch(pattern, f"{word} {number}")
    assert made_up is not None
    assert made_up.groupdict().keys() == {"response"}  # and no input
    assert len(made_up["response"]) < LONG


@pytest.mark.filterwarnings("ignore:ROUGE-L sees Latin letters")
def test_copies_in_other_scripts_are_dropped_though_rouge_l_does_not_see_them():
    own = [{"instruction": f"列出 {n} 水果", "input": "", "response": "苹果 梨"} for n in "一二三"]
    texts = ["列出 三 水果", "列出  一 水果 ", "列出 四 水果"]
    synthesis = once(3, temperature=0.5)
    (only,) = made(synthesis, {"a": own}, ScriptedModel(write=texts.__getitem__))["a"]
    assert only["instruction"] == texts[2]
    assert dropped(synthesis) == {"near_instruction": 2}
    with pytest.warns(UserWarning, match="copies of them with other words are not dropped"):
        known = OwnTexts(own, 0.7)
    assert known.check_example({**own[0], "response": "苹果  梨"}) == "near_example"
    assert known.check_example({**own[0], "response": "梨"}) is None
    assert known.check_instruction("苹果 梨") is None  # a response, which is compared with responses alone
    assert OwnTexts(own, 1.0).check_instruction(texts[0]) is None


def test_endless_responses_are_dropped_unless_they_are_wanted():
    model = ScriptedModel(respond=lambda *_: "Input: none\nResponse: " + "on and " * 50)
    synthesis = once(1, responses=NewResponses(max_new_tokens=10))
    assert made(synthesis, {"a": rows(4)}, model) == {"a": []}
    assert dropped(synthesis) == {"cut_off": 1}
    kept = once(1, responses=NewResponses(max_new_tokens=10), keep_cut=True)
    assert made(kept, {"a": rows(4)}, model)["a"][0]["response"].startswith("on and on")


def test_blanks_around_a_cut_answer_count_as_tokens():
    answer = "\nInput: none\nResponse: done"
    model = ScriptedModel(respond=lambda *_: answer)
    model.tokenizer = lambda texts, add_special_tokens: {"input_ids": [[*text] for text in texts]}
    synthesis = once(1, responses=NewResponses(max_new_tokens=len(answer)))
    assert made(synthesis, {"a": rows(4)}, model) == {"a": []}
    assert dropped(synthesis) == {"cut_off": 1}
    longer = once(1, responses=NewResponses(max_new_tokens=len(answer) + 1))
    assert made(longer, {"a": rows(4)}, model)["a"][0]["response"] == "done"


def test_a_prompt_that_does_not_fit_shows_less():
    own = rows(8)
    short = {"instruction": "be brief now", "input": "", "response": "so"}
    # the beginning has 22 words, a demonstration of rows 8, of the short row 5
    model = ScriptedModel(limit=60)
    synthesis = once(1, max_new_tokens=8, responses=NewResponses(max_new_tokens=20))
    assert len(made(synthesis, {"a": [*own, short]}, model)["a"]) == 1
    shown = model.first[0].count("Task ") - 1
    assert 1 <= shown < 8
    assert synthesis.notes["fewer_demonstrations"] == 2
    narrow = ScriptedModel(limit=30)
    assert made(synthesis, {"a": own}, narrow) == {"a": []}
    assert dropped(synthesis) == {"prompt_too_long": 1}
    assert narrow.calls == []


def test_without_demonstrations_the_model_is_sampled():
    with refusal(r"instructions.demonstrations=0 with temperature=0 writes the same"):
        in_words(instructions=NewInstructions(demonstrations=0))
    none = {"instructions": NewInstructions(demonstrations=0), "responses": NewResponses(demonstrations=0)}
    synthesis = in_words(number=3, temperature=0.7, **none)
    model = ScriptedModel()
    assert len(made(synthesis, {"a": rows(3)}, model)["a"]) == 3
    assert {prompt.count("Task ") for prompt in model.first} == {1}
    assert [call[1] for call in model.calls] == [0.7, 0.7]


def test_prompts_of_a_client_share_batches_the_longest_first_and_none_with_another_client():
    model = ScriptedModel()
    clients = {"a": rows(9), "b": rows(9, words="many more words than the other client has in its rows")}
    made(in_words(number=5, batch_size=4), clients, model)
    assert [call[0] for call in model.calls] == [4, 1] * 2 * 2
    for own in (model.first[:5], model.first[5:]):
        lengths = [len(prompt) for prompt in own]
        assert lengths == sorted(lengths, reverse=True)
    assert ["many more words" in prompt for prompt in model.first] == [False] * 5 + [True] * 5


def test_everything_follows_from_the_seed():
    def shown(seed, clients):
        model = ScriptedModel()
        made(in_words(number=4, batch_size=3), clients, model, seed)
        return model

    both = {"a": rows(20, 10), "b": rows(20, 10, "pear")}
    one, again, other = shown(1, both), shown(1, both), shown(2, both)
    assert (one.first, one.second, one.calls) == (again.first, again.second, again.calls)
    assert set(one.first).isdisjoint(other.first)
    alone = shown(1, {"a": both["a"]})
    assert set(alone.first) < set(one.first)  # what a client shows does not depend on who else takes part
    seeds = [call[2] for call in one.calls]
    assert len(set(seeds)) == len(seeds)


class Continues:
    """Writes an instruction at the end of a list, an input where one is asked for, and else a response; keeps prompts."""

    def __init__(self, eos):
        self.tokenizer = Words()
        self.tokenizer.eos_token = eos
        self.asked, self.tasks = [], 0

    def generate(self, prompts, *, stop, **others):
        self.asked += [(prompt, tuple(stop)) for prompt in prompts]
        return [[self._one(prompt)] for prompt in prompts]

    def _one(self, prompt):
        if prompt.rpartition("\n")[2].startswith("Task "):
            self.tasks += 1
            return f"write about thing{self.tasks}"
        return "Input: seven" if prompt.endswith(("### Input:\n", "Of:")) else "Output: done"

    def log_likelihoods(self, prompts, continuations):
        raise AssertionError


def test_by_default_examples_stand_in_the_template_of_the_rows_and_the_model_goes_on_with_its_next_text():
    model = Continues(eos="</s>")
    own = [{"instruction": "explain it to me", "input": "", "response": "it is so"}]
    (only,) = made(SelfGeneration(number=1, temperature=0.5), {"a": own}, model)["a"]
    # the label that the model wrote is none of the response
    assert (only["input"], only["response"]) == ("", "done")
    form = ALPACA.without.text
    shown = form.format(instruction="explain it to me") + " it is so\n\n"
    (_, stops) = model.asked[1]
    assert model.asked[1:] == [(shown + form.format(instruction=only["instruction"]), stops)]
    assert {"\n### Response:", "\n### Input:"} < set(stops)
    assert any(stop.startswith("\nBelow is an instruction") for stop in stops)


def test_clients_with_inputs_have_the_model_write_an_input_first():
    template = Template("<u>{instruction}\nOf: {input}</s>\n<a>")
    model = Continues(eos="</s>")
    found = made(SelfGeneration(number=2), {"a": rows(8, inputs=4)}, model, template=template)["a"]
    assert [row["input"] for row in found] == ["", "seven"]  # half of its rows have one
    inputs, responses = model.asked[2:3], model.asked[3:]
    (prompt, stops) = inputs[0]
    assert prompt.endswith("</s>\n<u>write about thing2\nOf:")  # the model's end of a turn ends each example
    assert stops == ("\n<u>", "\nOf:", "</s>", "\n</s>", "\n<a>")
    assert {prompt.rpartition("<u>")[2] for prompt, _ in responses} == {
        "write about thing2\nOf: seven</s>\n<a>",
        "write about thing1\nOf: </s>\n<a>",
    }


def test_a_cut_input_is_asked_for_again_and_then_dropped():
    model = Continues(eos="</s>")
    model._one = lambda prompt: "write about a thing" if "Task " in prompt else "on and " * 9
    once, short = NewInstructions(tries=1), NewResponses(max_new_tokens=10)
    synthesis = SelfGeneration(number=1, instructions=once, responses=short)
    template = Template("<u>{instruction}\nOf: {input}</s>\n<a>")
    assert made(synthesis, {"a": rows(8, inputs=8)}, model, template=template) == {"a": []}
    assert dropped(synthesis) == {"cut_off": 1}
    assert [prompt.endswith("Of:") for prompt, _ in model.asked[1:]] == [True] * 3  # no response without it


def test_dropped_texts_are_kept_with_client_and_reason():
    synthesis = once(2)
    texts = ["explain apple number1 to my1 grandmother", "Name one planet here"]
    model = ScriptedModel(write=texts.__getitem__, respond=lambda *_: "Mars, of course")
    made(synthesis, {"a": rows(12)}, model)
    reasons = [(one.client, one.reason) for one in synthesis.dropped]
    assert reasons == [("a", "near_instruction"), ("a", "no_match")]
    fields = {"instruction": texts[1], "input": "", "response": "Mars, of course"}
    assert synthesis.dropped[1].fields == fields


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: SelfGeneration(number=0), "number=0 must be at least 1"),
        (lambda: SelfGeneration(responses=NewResponses(tries=0)), r"responses\.tries=0 must be at least 1"),
        (lambda: in_words(responses=NewResponses(demonstrations=-1)), r"responses\.demonstrations=-1 must"),
        (lambda: in_words(responses=NewResponses(max_new_tokens=0)), r"responses\.max_new_tokens=0 must"),
        (lambda: SelfGeneration(temperature=-1), "temperature=-1 must be in"),
        (lambda: SelfGeneration(top_p=0), r"top_p=0 must be in \(0, 1\]"),
        (lambda: SelfGeneration(max_rouge_l=1.5), r"max_rouge_l=1.5 must be in \[0, 1\]"),
    ],
)
def test_settings_out_of_range_are_refused(make, named):
    with refusal(named):
        make()


def test_settings_name_every_argument():
    settings = SelfGeneration(number=7).settings()
    assert (settings["number"], settings["prompts"]) == (7, None)
    assert in_words().settings()["prompts"]["response"]["no_input"] == "none"
    assert SelfGeneration(number=7, instructions=NewInstructions(refusals=["No"])).settings() != settings


def of_prompt(bad_of=lambda client_word, number: False):
    """A model whose instructions follow from the prompt: bad ones by the client's word and the count of its prompts."""
    seen = {}

    class Model(ScriptedModel):
        def _one(self, prompt):
            if prompt.endswith("\nInput:"):
                return super()._one(prompt)
            self.first.append(prompt)
            word = prompt.split("explain ")[1].split()[0]
            number = seen[word] = seen.get(word, -1) + 1
            return "?!?" if bad_of(word, number) else f"write about {word} thing{number}"

    return Model()


@pytest.mark.parametrize("number", [5, 32])
def test_what_is_dropped_is_replaced_until_the_number_is_reached(number):
    model = of_prompt(lambda _, n: n % 2 == 0)
    synthesis = in_words(number=number)
    found = made(synthesis, {"a": rows(20)}, model)["a"]
    assert len(found) == number
    # Written out: every second prompt fails, and each pass asks for what is missing alone.
    asked, good, passes = 0, 0, []
    while good < number:
        passes.append(number - good)
        good += sum(n % 2 for n in range(asked, asked + passes[-1]))
        asked += passes[-1]
    assert [call[0] for call in model.calls if call[3] == ("\nTask ", "\n\n")] == [
        min(16, each - at) for each in passes for at in range(0, each, 16)
    ]
    assert synthesis.counts["tried"] == asked
    assert dropped(synthesis) == {"no_letter": asked - number}
    written = {f"write about apple thing{n}" for n in range(asked) if n % 2}
    assert {row["instruction"] for row in found} == written
    assert len(set(model.first)) == asked  # other demonstrations each time


def test_the_limit_of_tries_is_reached_and_what_is_missing_is_counted():
    model = of_prompt(lambda word, number: word == "pear" and number != 3)
    synthesis = in_words(number=4, instructions=NewInstructions(tries=10))
    clients = {"a": rows(9), "b": rows(9, words="pear"), "c": rows(9, words="plum")}
    found = made(synthesis, clients, model)
    assert {client: len(own) for client, own in found.items()} == {"a": 4, "b": 1, "c": 4}
    assert synthesis.counts["tried"] == 4 + 10 + 4
    assert dropped(synthesis) == {"no_letter": 9}
    assert synthesis.notes == {"fewer_demonstrations": 0, "candidates_missing": 3, "clients_short": 1}


def test_four_tries_for_each_candidate_unless_told_otherwise():
    synthesis = in_words(number=3)
    assert made(synthesis, {"a": rows(9)}, of_prompt(lambda *_: True)) == {"a": []}
    assert synthesis.counts["tried"] == synthesis.max_tries == 12
    with pytest.raises(ValueError, match=r"instructions.tries=31 must be at least number=32"):
        in_words(instructions=NewInstructions(tries=31))


def test_a_repetition_of_an_earlier_pass_is_one():
    texts = ["name the sun", "?!?", "name the sun", "name the moon"]
    synthesis = in_words(number=2)
    found = made(synthesis, {"a": rows(9)}, ScriptedModel(write=texts.__getitem__))["a"]
    assert [row["instruction"] for row in found] == ["name the sun", "name the moon"]
    assert dropped(synthesis) == {"no_letter": 1, "repeated": 1}
