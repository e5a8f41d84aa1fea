r"""What FewFedPIT asks a model for, and what of its answers is an instruction, an input, a response.

Figure 6 of Zhang et al., "FewFedPIT: Towards Privacy-preserving and Few-shot Federated Instruction Tuning",
https://arxiv.org/abs/2403.06131, shows two prompts adapted from Self-Instruct (Wang et al., ACL 2023,
https://arxiv.org/abs/2212.10560): (a) eight instructions, to be followed by a new one; (b) four examples with input and
response, half of them without an input, followed by the new instruction. The text of the figure is not in the copy that
this was written from: `FEWFEDPIT_PROMPTS` has the figure's structure and wording of its own.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from fedlight.datamodules.text.templates import Template

_ROW = ("instruction", "input", "response")


@dataclass(frozen=True)
class SelfGenerationPrompts:
    r"""The two prompts in parts: a beginning, one text for each demonstration, an end; and how an answer is read.

    An answer ends before a stop text, loses the white space around it, and must match its pattern as a whole.

    Args:
        instruction_begin: of the first prompt.
        instruction_example: a demonstration in it, with slots among ``{number}`` (from 1), ``{instruction}``, ``{input}``
            and ``{response}``.
        instruction_end: where the model goes on with a new instruction; may have ``{number}``.
        instruction_stop: texts before which the new instruction ends.
        instruction_pattern: regular expression with the group ``instruction``.
        response_begin: of the second prompt.
        example_with_input: a demonstration in it that has an input; slots as above.
        example_without_input: one that has none.
        response_end: where the model goes on with input and response; has ``{instruction}``, the new one.
        response_stop: texts before which these end.
        response_pattern: regular expression with the group ``response`` and, if inputs are written, ``input``. A dot
            matches line breaks, too; ``^`` and ``$`` match at lines.
        no_input: an input of this text is none.

    Raises:
        ValueError: a slot or a group is unknown or missing, a pattern is none, or a stop text is empty.
    """

    instruction_begin: str
    instruction_example: str
    instruction_end: str
    instruction_stop: tuple[str, ...]
    instruction_pattern: str
    response_begin: str
    example_with_input: str
    example_without_input: str
    response_end: str
    response_stop: tuple[str, ...]
    response_pattern: str
    no_input: str = ""

    def __post_init__(self) -> None:
        _check_slots("instruction_example", self.instruction_example, ("number", *_ROW), "instruction")
        _check_slots("instruction_end", self.instruction_end, ("number",))
        for name in ("example_with_input", "example_without_input"):
            _check_slots(name, getattr(self, name), ("number", *_ROW), "response")
        _check_slots("response_end", self.response_end, ("number", "instruction"), "instruction")
        _check_pattern("instruction_pattern", self.instruction_pattern, {"instruction"}, "instruction")
        _check_pattern("response_pattern", self.response_pattern, {"input", "response"}, "response")
        for name in ("instruction_stop", "response_stop"):
            if not all(getattr(self, name)):
                raise ValueError(
                    f"{name}={list(getattr(self, name))}: an empty text would end every answer at once"
                )

    def for_instruction(self, shown: list[Mapping[str, str]]) -> str:
        r"""The first prompt.

        Args:
            shown: the demonstrations, each with ``instruction``, ``input`` and ``response``.

        Example:
            >>> shown = [{"instruction": f"Name a {one}.", "input": "", "response": "?"} for one in ("cat", "tree")]
            >>> print(FEWFEDPIT_PROMPTS.for_instruction(shown))
            Below is a list of tasks...
            <BLANKLINE>
            Task 1: Name a cat.
            Task 2: Name a tree.
            Task 3:
        """
        return (
            self.instruction_begin
            + "".join(_fill(self.instruction_example, row, number) for number, row in enumerate(shown, 1))
            + _fill(self.instruction_end, {}, len(shown) + 1)
        )

    def for_response(self, shown: list[Mapping[str, str]], instruction: str) -> str:
        """The second prompt.

        Args:
            shown: the demonstrations, see `for_instruction`; an empty ``input`` is none.
            instruction: the new one.
        """
        texts = [
            _fill(self.example_with_input if row["input"] else self.example_without_input, row, number)
            for number, row in enumerate(shown, 1)
        ]
        end = _fill(self.response_end, {"instruction": instruction}, len(shown) + 1)
        return self.response_begin + "".join(texts) + end

    def instruction_in(self, answer: str) -> str | None:
        """The instruction of an answer to the first prompt; None where it has another form.

        Example:
            >>> FEWFEDPIT_PROMPTS.instruction_in(" Name a bird. ")
            'Name a bird.'
        """
        match = _compiled(self.instruction_pattern).fullmatch(answer.strip())
        return match["instruction"].strip() if match else None

    def response_in(self, answer: str) -> tuple[str, str] | None:
        r"""Input and response of an answer to the second prompt; None where it has another form, or no response.

        Example:
            >>> FEWFEDPIT_PROMPTS.response_in("Input: none\nResponse: The owl.")
            ('', 'The owl.')
            >>> FEWFEDPIT_PROMPTS.response_in("The owl.") is None
            True
        """
        match = _compiled(self.response_pattern).fullmatch(answer.strip())
        if match is None or not match["response"].strip():
            return None
        given = (match.groupdict().get("input") or "").strip()
        return "" if given.casefold() == self.no_input.casefold() else given, match["response"].strip()


def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.DOTALL | re.MULTILINE)  # re keeps what it has compiled


def _fill(text: str, row: Mapping[str, str], number: int) -> str:
    return Template(text).render({**row, "number": str(number)}).text


def _check_slots(name: str, text: str, known: tuple[str, ...], needed: str | None = None) -> None:
    slots = Template(text).slots
    if unknown := [slot for slot in slots if slot not in known]:
        raise ValueError(f"{name} has a slot {{{unknown[0]}}}; there are {', '.join(known)}")
    if needed is not None and needed not in slots:
        raise ValueError(f"{name} has no slot {{{needed}}}")


def _check_pattern(name: str, pattern: str, known: set[str], needed: str) -> None:
    try:
        groups = set(_compiled(pattern).groupindex)
    except re.error as error:
        raise ValueError(f"{name}={pattern!r} is no regular expression: {error}") from None
    if needed not in groups or groups - known:
        raise ValueError(
            f"{name}={pattern!r} has the groups {sorted(groups)}, but needs (?P<{needed}>...) and may have "
            f"{' and '.join(sorted(known))}"
        )


_TEXT = r"(?:(?!^(?:Instruction|Input|Response):).)*"
"""Any text in which no line begins with a label."""

FEWFEDPIT_PROMPTS = SelfGenerationPrompts(
    instruction_begin="Below is a list of tasks. Every task is different from the others, and each can be done by a "
    "language model that sees nothing else.\n\n",
    instruction_example="Task {number}: {instruction}\n",
    instruction_end="Task {number}:",
    instruction_stop=("\nTask ",),
    instruction_pattern="(?P<instruction>.*)",
    response_begin="For each instruction, give the input that it needs (none if it needs no input) and then the right "
    "response.\n\n",
    example_with_input="Instruction: {instruction}\nInput: {input}\nResponse: {response}\n\n",
    example_without_input="Instruction: {instruction}\nInput: none\nResponse: {response}\n\n",
    response_end="Instruction: {instruction}\n",
    response_stop=("\nInstruction:",),
    response_pattern=rf"Input:(?P<input>{_TEXT})\nResponse:(?P<response>{_TEXT})",
    no_input="none",
)
