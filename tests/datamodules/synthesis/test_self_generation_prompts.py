from dataclasses import replace

import pytest

from fedlight.datamodules.synthesis.prompts import FEWFEDPIT_PROMPTS, prompts_in
from fedlight.datamodules.text.templates import Template


def changed(**parts):
    """FewFedPIT's prompts with other texts."""
    return replace(
        FEWFEDPIT_PROMPTS,
        **{name: replace(getattr(FEWFEDPIT_PROMPTS, name), **texts) for name, texts in parts.items()},
    )


ROWS = [
    {"instruction": "Add {braces}.", "input": "1 and 2", "response": "3"},
    {"instruction": "Say hello.", "input": "", "response": "Hello."},
]


def test_the_two_prompts_as_a_whole():
    assert FEWFEDPIT_PROMPTS.write_instruction_prompt(ROWS).partition("\n\n")[2] == (
        "Task 1: Add {braces}.\nTask 2: Say hello.\nTask 3:"
    )
    assert FEWFEDPIT_PROMPTS.write_response_prompt(ROWS, "Count to {n}.").partition("\n\n")[2] == (
        "Instruction: Add {braces}.\nInput: 1 and 2\nResponse: 3\n\n"
        "Instruction: Say hello.\nInput: none\nResponse: Hello.\n\n"
        "Instruction: Count to {n}.\nInput:"
    )


def test_prompts_of_ones_own_in_the_form_of_the_tiny_model():
    example = "POST : {instruction} {input}\nCHOICE : {response}\n"
    prompts = changed(
        instruction={"begin": "", "example": example, "end": "POST :"},
        response={
            **{"begin": "", "example_with_input": example, "example_without_input": example},
            **{"end": "POST : {instruction}\nCHOICE :", "pattern": "(?P<response>.+)"},
        },
    )
    assert prompts.write_instruction_prompt(ROWS[1:]) == "POST : Say hello. \nCHOICE : Hello.\nPOST :"
    assert prompts.write_instruction_prompt([]) == "POST :"
    assert prompts.write_response_prompt([], "why ?") == "POST : why ?\nCHOICE :"
    assert prompts.read_response(" rude 5 ") == ("", "rude 5")
    assert prompts.read_response("  ") is None


@pytest.mark.parametrize(
    ("answer", "read"),
    [
        ("Input: 1\n2\nResponse: 3\n\n4", ("1\n2", "3\n\n4")),
        ("Input:None\nResponse:x", ("", "x")),
        ("Input: \nResponse: x", ("", "x")),
        ("Input: a\nResponse: see Input: b", ("a", "see Input: b")),
        ("input: a\nresponse: b", None),
        (" none\nResponse: x", ("", "x")),  # the prompt has begun the answer
        ("1 and 2\nOutput: 3", ("1 and 2", "3")),
        ("none\nAnswer: 3\nOutput: 4", None),
    ],
)
def test_answers(answer, read):
    assert FEWFEDPIT_PROMPTS.read_response(answer) == read


def test_an_answer_in_the_clients_template_ends_before_any_header_of_it():
    prompts = prompts_in(Template.named("alpaca"), "\n\n", "instruction", "input")
    for header in ("Instruction", "Input", "Response"):
        assert f"\n### {header}:" in prompts.response.stop
        assert f"\n### {header}:" in prompts.input.stop


def test_an_instruction_may_have_to_match_a_pattern():
    prompts = changed(instruction={"pattern": r"(?P<instruction>[^\n]+)\?"})
    assert prompts.read_instruction("What is it?") == "What is it"
    assert prompts.read_instruction("Say it.") is None


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"instruction": {"example": "{task}"}}, r"\.example has an unknown slot \{task\}: use number"),
        ({"instruction": {"example": "{number}"}}, r"instruction\.example has no slot \{instruction\}"),
        ({"instruction": {"end": "{instruction}"}}, r"instruction\.end has an unknown slot \{instruction\}"),
        ({"response": {"end": "now"}}, r"response\.end has no slot \{instruction\}"),
        ({"response": {"stop": ("",)}}, r"response\.stop=\[''\]: an empty text would end every answer"),
        ({"response": {"pattern": "("}}, "is no regular expression"),
        ({"response": {"pattern": "(?P<output>.*)"}}, r"\['output'\], but needs \(\?P<response>"),
    ],
)
def test_prompts_that_cannot_be_are_refused(changes, named):
    with pytest.raises(ValueError, match=named):
        changed(**changes)
