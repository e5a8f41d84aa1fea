"""What memory extraction begins its samples with: the forms of the template in turn, or FedDCA's one prompt."""

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
    """Says what it knows to any prompt, and keeps the prompts."""

    def __init__(self):
        self.prompts, self.stops = [], set()

    def generate(self, prompts, n, *more, stop, strip):
        [prompt] = prompts
        self.prompts += [prompt] * n
        self.stops.add(stop)
        return [["Add the numbers."] * n]

    def log_likelihoods(self, prompts, continuations):
        raise AssertionError


def attacked(template, **settings):
    attack, model = MemoryExtraction(samples=5, batch_size=2, **settings), Asked()
    attack.seed = 0
    attack.prepare(
        SimpleNamespace(template=Template.named(template), client_rows={"a": ROWS}, planted={}), model
    )
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
