import re

import pytest
from scripted_generator import CLIENTS, Scripted, unlike

from fedlight.augmentation.self_instruct.prompts import extract_instruction, extract_response
from fedlight.augmentation.self_instruct.self_instruct import SelfInstruct


def test_the_prompts_are_those_of_figure_7_and_show_a_clients_own_rows_alone():
    generator = Scripted()
    SelfInstruct(2, generator).augment(CLIENTS, [], seed=0)
    words = re.compile(
        r"You are asked to come up with instructions\. Don't repeat instructions in examples\. Here are some "
        r"examples:\sInstruction 1: Tell about (\w+)\.\sInstruction 2: Tell about (\w+)\.\sProvide a new instruction below:"
    )
    own = [{"apples", "pears", "plums"}, {"mars", "venus"}] * 2
    for prompt, topics in zip(generator.instructions, own, strict=True):
        shown = words.fullmatch(prompt).groups()
        assert set(shown) <= topics
        assert shown[0] != shown[1]
    words = re.compile(
        r"Example 1:\sInstruction: Tell about (\w+)\.\sResponse: All of (\w+)\.\s\sGenerate the response of this "
        r"instruction, Instruction: (\w+ \w+ \w+)"
    )
    for number, (prompt, topics) in enumerate(zip(generator.responses, own, strict=True)):
        one, other, new = words.fullmatch(prompt).groups()
        assert one == other
        assert one in topics
        assert new == unlike(number)


def test_instruction_and_input_are_shown_together_and_braces_are_text():
    own = [{"instruction": "Add {x}.", "input": "1, {2}", "response": "{3}", "category": "math"}]
    generator = Scripted()
    found = SelfInstruct(1, generator).augment({"c": own}, [], seed=0)
    assert generator.instructions[0].count("Add {x}.\n1, {2}\n") == 2  # of one row there is no other
    assert "Instruction: Add {x}.\n1, {2}\nResponse: {3}\n" in generator.responses[0]
    assert list(found["c"][0].fields) == ["instruction", "input", "response"]


@pytest.mark.parametrize(
    ("answer", "instruction"),
    [
        ("Name a planet.", "Name a planet."),
        ("**Instruction 3:** Name a planet.", "Name a planet."),
        ("\nInstruction 3: Name a planet.\nInstruction 4: Name a star.", "Name a planet."),
        ("New instruction: Name a planet.\n\nResponse: Mars.", "Name a planet."),
        ("Name\na planet.\n### Instruction:\nName a star.", "Name\na planet."),
        ("Instruction 3:", ""),
        ("Write an instruction: short.", "Write an instruction: short."),
    ],
)
def test_instructions_in_answers(answer, instruction):
    assert extract_instruction(answer) == instruction


@pytest.mark.parametrize(
    ("answer", "response"),
    [
        ("Response: Mars.", "Mars."),
        ("Mars.\n\nExample 2:\nInstruction: Name a star.\nResponse: Vega.", "Mars."),
        ("Two cases.\nExample 1: a\nExample 2: b", "Two cases.\nExample 1: a\nExample 2: b"),
        ("# Mars\n### Size\nsmall", "# Mars\n### Size\nsmall"),
        ("Mars.\nInstruction: Name a star.", "Mars."),
    ],
)
def test_responses_in_answers(answer, response):
    assert extract_response(answer) == response
