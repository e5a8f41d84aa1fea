r"""Prompts of Self-Instruct, and the instruction or response in an answer to them.

Figure 7 of Wang et al., "Federated Instruction Tuning of LLMs with Domain Coverage Augmentation" (FedDCA),
https://arxiv.org/abs/2409.20135, word for word; the paper does not show the line breaks, which are chosen here.
"""

import re

from fedlight.datamodules.text.templates import Template

INSTRUCTION_PROMPT = """\
You are asked to come up with instructions. Don't repeat instructions in examples. Here are some examples:
Instruction 1: {first}
Instruction 2: {second}
Provide a new instruction below:"""

RESPONSE_PROMPT = """\
Example 1:
Instruction: {instruction}
Response: {response}

Generate the response of this instruction, Instruction: {new}"""

# Answers repeat the prompt's labels, some in bold or with a number.
_LABEL = re.compile(r"\W*(?:new )?(?:instruction|response)\s*\d*\s*:[\s*]*", re.IGNORECASE)
_AFTER_INSTRUCTION = re.compile(r"\n\W*(?:instruction|response)\s*\d*\s*:", re.IGNORECASE)
_AFTER_RESPONSE = re.compile(r"\n\W*(?:example\s*\d*\s*:\s*)?instruction\s*\d*\s*:", re.IGNORECASE)


def check_prompt(name: str, text: str, slots: tuple[str, ...]) -> None:
    """Raise ValueError for a prompt with other slots.

    Examples:
        >>> check_prompt("response_prompt", "{response}", ("response", "new"))
        Traceback (most recent call last):
        ...
        ValueError: response_prompt has the slots {response}, but needs {response}, {new}
    """
    given = Template(text).slots
    if set(given) != set(slots):
        have, needs = (", ".join(f"{{{slot}}}" for slot in some) or "none" for some in (given, slots))
        raise ValueError(f"{name} has the slots {have}, but needs {needs}")


def extract_instruction(answer: str) -> str:
    r"""Return the one instruction in an answer, without a label before it and without further instructions.

    Examples:
        >>> extract_instruction("Instruction 3: Name a planet.\nInstruction 4: Name a star.")
        'Name a planet.'
    """
    return _extract(answer, _AFTER_INSTRUCTION)


def extract_response(answer: str) -> str:
    r"""Return the one response in an answer, without a label before it and without further examples.

    Examples:
        >>> extract_response(" **Response:** It is Mars.\n\nExample 2:\nInstruction: Name a star.")
        'It is Mars.'
    """
    return _extract(answer, _AFTER_RESPONSE)


def _extract(answer: str, end: re.Pattern[str]) -> str:
    text = answer.strip()
    label = _LABEL.match(text)
    return end.split(text[label.end() if label else 0 :], maxsplit=1)[0].strip()
