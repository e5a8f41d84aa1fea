r"""The two prompts of Self-Instruct, and what of an answer to them is an instruction or a response.

Figure 7 of Wang et al., "Federated Instruction Tuning of LLMs with Domain Coverage Augmentation" (FedDCA),
https://arxiv.org/abs/2409.20135, word for word; where its lines break is not said, and decided here.
"""

import re
from collections.abc import Mapping

from fedlight.datamodules.rows.fields import instruction_text
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

_LABEL = re.compile(r"\W*(?:new )?(?:instruction|response)\s*\d*\s*:[\s*]*", re.IGNORECASE)
_AFTER_INSTRUCTION = re.compile(r"\n\W*(?:instruction|response)\s*\d*\s*:", re.IGNORECASE)
_AFTER_RESPONSE = re.compile(r"\n\W*(?:example\s*\d*\s*:\s*)?instruction\s*\d*\s*:", re.IGNORECASE)


def prompt_for_instruction(text: str, first: Mapping[str, str], second: Mapping[str, str]) -> str:
    r"""Asks for an instruction unlike these two; instruction and input of a row are joined.

    Args:
        text: `INSTRUCTION_PROMPT`, or another with these slots.
        first: a row of the client.
        second: another.

    Example:
        >>> row = {"instruction": "Add.", "input": "1 and 2", "response": "3"}
        >>> prompt_for_instruction("{first} | {second}", row, {"instruction": "Say hello.", "input": "", "response": "Hi"})
        'Add.\n1 and 2 | Say hello.'
    """
    return Template(text).render({"first": instruction_text(first), "second": instruction_text(second)}).text


def prompt_for_response(text: str, example: Mapping[str, str], instruction: str) -> str:
    """Asks for the response to a new instruction in the form of an example's.

    Args:
        text: `RESPONSE_PROMPT`, or another with these slots.
        example: a row of the client.
        instruction: the new one.
    """
    shown = {"instruction": instruction_text(example), "response": example["response"], "new": instruction}
    return Template(text).render(shown).text


def instruction_in(answer: str) -> str:
    r"""The one instruction in an answer.

    A label before it is taken off, and so is what a model goes on with that does not know where to stop.

    Example:
        >>> instruction_in("Instruction 3: Name a planet.\nInstruction 4: Name a star.")
        'Name a planet.'
    """
    return _between(_AFTER_INSTRUCTION, answer)


def response_in(answer: str) -> str:
    r"""The one response in an answer, likewise.

    Example:
        >>> response_in(" **Response:** It is Mars.\n\nExample 2:\nInstruction: Name a star.")
        'It is Mars.'
    """
    return _between(_AFTER_RESPONSE, answer)


def _between(end: re.Pattern[str], answer: str) -> str:
    text = answer.strip()
    label = _LABEL.match(text)
    return end.split(text[label.end() if label else 0 :], maxsplit=1)[0].strip()


def check_prompt(name: str, text: str, slots: tuple[str, ...]) -> None:
    """Refuses a prompt that shows less, or something else.

    Raises:
        ValueError: its slots are not those.

    Example:
        >>> check_prompt("response_prompt", "{response}", ("response", "new"))
        Traceback (most recent call last):
        ...
        ValueError: response_prompt has the slots {response}, but needs {response}, {new}
    """
    if set(Template(text).slots) != set(slots):
        have, needs = (
            ", ".join(f"{{{slot}}}" for slot in some) or "none" for some in (Template(text).slots, slots)
        )
        raise ValueError(f"{name} has the slots {have}, but needs {needs}")
