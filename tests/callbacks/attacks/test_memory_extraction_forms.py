from types import SimpleNamespace

import pytest

from fedlight.callbacks.attacks.memory_extraction import MemoryExtraction
from fedlight.datamodules.text.templates import Template

FIGURE_8 = """Below is an instruction that describes a task. Write a response that appropriately completes the request.
 ###Instruction:"""
ROWS = [
    {"instruction": "Name a planet.", "input": "", "response": "Mars."},
    {"instruction": "Add the numbers.", "input": "1 2", "response": "3"},
]


class Asked:
    """Says what it knows to any prompt, and keeps the prompts and the answered ones."""

    def __init__(self, longest=10_000):
        self.prompts, self.stops, self.answered, self.longest = [], set(), [], longest

    def fits(self, prompts, new_tokens):
        return [len(prompt) <= self.longest for prompt in prompts]

    def generate(self, prompts, n, temperature, *more, stop, strip):
        if temperature == 0:
            self.answered += [(prompt, tuple(stop)) for prompt in prompts]
            return [["1 2"] if stop else ["It is Mars."] for _ in prompts]
        [prompt] = prompts
        self.prompts += [prompt] * n
        self.stops.add(stop)
        return [["Add the numbers."] * n]

    def log_likelihoods(self, prompts, continuations):
        raise AssertionError


def attacked(template, rows=ROWS, planted=(), longest=10_000, **settings):
    attack, model = MemoryExtraction(samples=5, batch_size=2, **settings), Asked(longest)
    attack._reported = {None}
    kept = {"a": [*planted]} if planted else {}
    data = SimpleNamespace(template=Template.named(template), client_rows={"a": rows}, planted=kept)
    attack.prepare(data, model)
    return attack.attack(model, None), model


def without_space(text):
    return "".join(text.split())


def test_the_forms_take_turns():
    found, model = attacked("alpaca", forms="all")
    with_input, without = model.prompts[0], model.prompts[-1]
    assert model.prompts == [with_input] * 3 + [without] * 2
    assert "paired with an input" in with_input
    assert without_space(without) == without_space(FIGURE_8)
    assert found.metrics["exact"] == 1


@pytest.mark.parametrize("template", ["alpaca", "alpaca_joined"])
def test_the_prompt_of_feddca_alone_by_default(template):
    model = attacked(template)[1]
    assert model.prompts == ["\n\n".join(FIGURE_8.split("\n ")).replace("###", "### ") + "\n"] * 5


def test_that_prompt_looks_for_the_instructions_of_all_rows():
    found, model = attacked("alpaca")
    assert found.metrics["exact"] == 1
    assert found.metrics["extracted"] == 0.5
    # And all forms end a sample: a model may go on with an input.
    assert model.stops == attacked("alpaca", forms="all")[1].stops


def test_a_template_of_one_form_begins_in_one_way():
    one = "POST : {instruction} {input}\nCHOICE :"
    assert attacked(one)[1].prompts == attacked(one, forms="all")[1].prompts == ["POST :"] * 5


def test_sampled_instructions_are_answered_and_the_answers_compared_with_the_responses():
    rows = [{**ROWS[0], "response": "It is Mars."}, {**ROWS[1], "response": "Call 555 0199 or 4711."}]
    found, model = attacked("Q: {instruction}\nA:", rows=rows)
    assert model.answered == [("Q: Add the numbers.\nA:", ())] * 5
    assert found.metrics["response_exact"] == found.metrics["response_rouge_l_best"] == 1
    assert found.metrics["response_extracted"] == 0.5
    assert found.metrics["response_identifiers"] == 0  # two codes, and none in "It is Mars."
    assert found.records[0]["response_text"] == found.records[0]["response_nearest"] == "It is Mars."
    assert "response_identifiers" not in attacked("alpaca")[0].metrics


def test_where_the_template_asks_for_an_input_the_model_writes_it_first():
    _, model = attacked("Q: {instruction}\nOf: {input}\nA:")
    asked = "Q: Add the numbers.\nOf:"
    assert model.answered == [(asked + " ", ("A:",))] * 5 + [(asked + " 1 2\nA:", ())] * 5


def test_secrets_are_looked_for_in_the_responses():
    planted = [{"instruction": "which is 7 ?", "input": "", "response": "Mars."}]
    found, _ = attacked("Q: {instruction}\nA:", rows=[*ROWS, *planted], planted=planted)
    assert (found.metrics["canaries"], found.metrics["response_canaries"]) == (0, 1)
    asked = {"canary": "which is 7 ?", "client": "a", "recovered": False}
    assert found.records[5:] == [asked | {"secret": "Mars.", "secret_recovered": True}]


def test_an_instruction_that_leaves_no_room_gets_no_response():
    found, model = attacked("Q: {instruction}\nA:", longest=10)
    assert model.answered == []
    assert not any(name.startswith("response") for name in found.metrics)
    assert len(found.records) == 5
