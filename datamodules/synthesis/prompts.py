r"""Prompts of FewFedPIT, and patterns that read instruction, input and response from answers.

Figure 6 of Zhang et al., "FewFedPIT: Towards Privacy-preserving and Few-shot Federated Instruction Tuning",
https://arxiv.org/abs/2403.06131, shows two prompts adapted from Self-Instruct (Wang et al., ACL 2023,
https://arxiv.org/abs/2212.10560): (a) eight instructions, which the model continues with a new one; (b) four examples with
input and response, half of them without an input, and the new instruction. The figure's text was not available:
`FEWFEDPIT_PROMPTS` has the figure's structure and our wording.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from string import Formatter

from fedlight.datamodules.text.templates import Template, escape
from fedlight.evaluation.tasks.task import continuation
from fedlight.support.checks import Settings

_ROW = ("instruction", "input", "response")


@dataclass(frozen=True)
class InstructionPrompt(Settings):
    """First prompt, which a new instruction follows: beginning, demonstrations, end.

    Args:
        begin: beginning.
        example: demonstration, with slots among ``{number}`` (from 1), ``{instruction}``, ``{input}`` and ``{response}``.
        end: end; may have ``{number}``.
        stop: texts before which the instruction ends.
        pattern: regular expression with the group ``instruction``.
    """

    begin: str
    example: str
    end: str
    stop: tuple[str, ...]
    pattern: str

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_slots("instruction.example", self.example, ("number", *_ROW), "instruction")
        _check_slots("instruction.end", self.end, ("number",))
        _check_stop("instruction.stop", self.stop)
        _check_pattern("instruction.pattern", self.pattern, {"instruction"}, "instruction")


@dataclass(frozen=True)
class ResponsePrompt(Settings):
    """Second prompt, which input and response follow: beginning, demonstrations, end.

    Args:
        begin: beginning.
        example_with_input: demonstration with an input; same slots as ``instruction.example``.
        example_without_input: demonstration without an input; same slots.
        end: end; has ``{instruction}``, the new one. It may begin the answer, so that the model continues it.
        stop: texts before which the answer ends.
        pattern: regular expression with the group ``response`` and, if inputs are generated, ``input``. A dot matches line
            breaks, too; ``^`` and ``$`` match at lines.
        no_input: text that stands for an empty input.
    """

    begin: str
    example_with_input: str
    example_without_input: str
    end: str
    stop: tuple[str, ...]
    pattern: str
    no_input: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("example_with_input", "example_without_input"):
            _check_slots(f"response.{name}", getattr(self, name), ("number", *_ROW), "response")
        _check_slots("response.end", self.end, ("number", "instruction"), "instruction")
        _check_stop("response.stop", self.stop)
        _check_pattern("response.pattern", self.pattern, {"input", "response"}, "response")


@dataclass(frozen=True)
class InputPrompt(Settings):
    """Prompt between both for clients with inputs, which the input of a new instruction follows.

    It begins as the second prompt.

    Args:
        end: end; has ``{instruction}``.
        response_end: end of the second prompt after an input, ``{input}``.
        stop: texts before which an input ends.
    """

    end: str
    response_end: str
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_slots("input.end", self.end, ("number", "instruction"), "instruction")
        _check_slots("input.response_end", self.response_end, _ROW[:2], "instruction")
        _check_stop("input.stop", self.stop)


@dataclass(frozen=True)
class SelfGenerationPrompts(Settings):
    r"""Both prompts in parts, and patterns of their answers.

    An answer ends before a stop text, is stripped of white space, and must match its pattern as a whole.

    Args:
        instruction: first prompt.
        response: second prompt.
        input: prompt for an input. None: the answer to the second prompt has the input, if any.

    Raises:
        ValueError: a slot or a group is unknown or missing, a pattern is invalid, or a stop text is empty.
    """

    instruction: InstructionPrompt
    response: ResponsePrompt
    input: InputPrompt | None = None

    def write_instruction_prompt(self, shown: list[Mapping[str, str]]) -> str:
        r"""Return the first prompt after demonstrations, each with ``instruction``, ``input`` and ``response``.

        Examples:
            >>> shown = [{"instruction": f"Name a {thing}.", "input": "", "response": "?"} for thing in ("cat", "tree")]
            >>> print(FEWFEDPIT_PROMPTS.write_instruction_prompt(shown))
            Below is a list of tasks...
            <BLANKLINE>
            Task 1: Name a cat.
            Task 2: Name a tree.
            Task 3:
        """
        return (
            self.instruction.begin
            + "".join(_fill(self.instruction.example, row, number) for number, row in enumerate(shown, 1))
            + _fill(self.instruction.end, {}, len(shown) + 1)
        )

    def write_response_prompt(
        self, shown: list[Mapping[str, str]], instruction: str, given: str | None = ""
    ) -> str:
        """Return the second prompt for the new instruction; for ``shown`` see `write_instruction_prompt`.

        ``given`` is its input, "" for none or for one that the answer has; None: the prompt ends where an input follows.
        """
        parts = self.response
        texts = [
            _fill(parts.example_with_input if row["input"] else parts.example_without_input, row, number)
            for number, row in enumerate(shown, 1)
        ]
        form = parts.end
        if self.input and given != "":
            form = self.input.end if given is None else self.input.response_end
        end = _fill(form, {"instruction": instruction, "input": given or ""}, len(shown) + 1)
        return parts.begin + "".join(texts) + end

    def read_input(self, answer: str) -> str:
        """Return the input in an answer to a prompt for one; "" for none.

        Examples:
            >>> [FEWFEDPIT_PROMPTS.read_input(text) for text in ("Input: 1 and 2 ", "None.", "no input needed")]
            ['1 and 2', '', '']
        """
        text = re.sub(r"^\s*Input\s*:", "", answer).strip()
        return "" if re.fullmatch(r"(none|n/?a|no input( is)?( needed)?)\W*", text, re.IGNORECASE) else text

    def read_instruction(self, answer: str) -> str | None:
        """Return the instruction in an answer to the first prompt; None if the answer does not match.

        Examples:
            >>> FEWFEDPIT_PROMPTS.read_instruction(" Name a bird. ")
            'Name a bird.'
        """
        match = _compile(self.instruction.pattern).fullmatch(answer.strip())
        return match["instruction"].strip() if match else None

    def read_response(self, answer: str) -> tuple[str, str] | None:
        r"""Return input and response in an answer to the second prompt; None without a match or a response.

        Examples:
            >>> FEWFEDPIT_PROMPTS.read_response("Input: none\nResponse: The owl.")
            ('', 'The owl.')
            >>> FEWFEDPIT_PROMPTS.read_response("The owl.") is None
            True
        """
        match = _compile(self.response.pattern).fullmatch(answer.strip())
        if match is None or not match["response"].strip():
            return None
        given = (match.groupdict().get("input") or "").strip()  # the pattern may lack this group
        return "" if given.casefold() == self.response.no_input.casefold() else given, match[
            "response"
        ].strip()


def _compile(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.DOTALL | re.MULTILINE)  # cached by re


def _fill(text: str, row: Mapping[str, str], number: int) -> str:
    return Template(text).render({**row, "number": str(number)}).text


def _check_slots(name: str, text: str, known: tuple[str, ...], needed: str | None = None) -> None:
    slots = Template(text).slots
    if unknown := [slot for slot in slots if slot not in known]:
        raise ValueError(f"{name} has an unknown slot {{{unknown[0]}}}: use {', '.join(known)}")
    if needed is not None and needed not in slots:
        raise ValueError(f"{name} has no slot {{{needed}}}")


def _check_stop(name: str, texts: tuple[str, ...]) -> None:
    if not all(texts):
        raise ValueError(f"{name}={list(texts)}: an empty text would end every answer at once")


def _check_pattern(name: str, pattern: str, known: set[str], needed: str) -> None:
    try:
        groups = set(_compile(pattern).groupindex)
    except re.error as error:
        raise ValueError(f"{name}={pattern!r} is no regular expression: {error}") from None
    if needed not in groups or groups - known:
        raise ValueError(
            f"{name}={pattern!r} has the groups {sorted(groups)}, but needs (?P<{needed}>...) and may have "
            f"{' and '.join(sorted(known))}"
        )


_TEXT = r"(?:(?!^(?:Instruction|Input|Response|Output|Answer):).)*"  # no line begins with a label
_LABEL = "(?:Response|Output|Answer)"  # a model may write another label than the examples have

FEWFEDPIT_PROMPTS = SelfGenerationPrompts(
    instruction=InstructionPrompt(
        begin="Below is a list of tasks. Every task is different from the others, and each can be done by a language model "
        "that sees nothing else.\n\n",
        example="Task {number}: {instruction}\n",
        end="Task {number}:",
        stop=("\nTask ", "\n\n"),
        pattern="(?P<instruction>.*)",
    ),
    response=ResponsePrompt(
        begin="For each instruction, give the input that it needs (none if it needs no input) and then the right "
        "response.\n\n",
        example_with_input="Instruction: {instruction}\nInput: {input}\nResponse: {response}\n\n",
        example_without_input="Instruction: {instruction}\nInput: none\nResponse: {response}\n\n",
        end="Instruction: {instruction}\nInput:",
        stop=("\nInstruction:",),
        pattern=rf"(?:Input:)?(?P<input>{_TEXT})\n{_LABEL}:(?P<response>{_TEXT})",
        no_input="none",
    ),
)
"""Prompts in plain words, for models that were never tuned on a template."""


def prompts_in(template: Template, end: str, instruction: str, given: str) -> SelfGenerationPrompts:
    r"""Return prompts whose examples are rows in the clients' template, and whose answers are its next text.

    The second prompt ends where the response follows, so that the model has no label to write. Clients with inputs have the
    model write the input of a new instruction first. ``end`` follows each example, such as the end of a turn;
    ``instruction`` and ``given`` are the slots of instruction and input.

    Examples:
        >>> prompts = prompts_in(Template("Q: {question}\nA:"), "\n\n", "question", "input")
        >>> prompts.write_response_prompt([{"instruction": "1 + 1?", "input": "", "response": "2"}], "2 + 2?")
        'Q: 1 + 1?\nA: 2\n\nQ: 2 + 2?\nA:'
        >>> prompts.read_response("Answer: 4"), prompts.response.stop
        (('', '4'), ('\nQ:', '\nA:'))
    """
    slots = {instruction: "{instruction}", given: "{input}"}
    forms = [form.text for form in (template, template.without or template)]
    full, short = (
        "".join(
            escape(fixed) + ("" if slot is None else slots.get(slot, ""))
            for fixed, slot, _, _ in Formatter().parse(form)
        )
        for form in forms
    )
    short = short.replace("{input}", "")  # as rows with an empty input are rendered
    # An example ends before a fixed text, of which the first one begins a line.
    fixed_texts = [text for form in forms for text, *_ in Formatter().parse(f"\n{form}") if text.strip()]
    stops = tuple(dict.fromkeys([*map(_first_line, fixed_texts), *template.stops]))
    response = continuation(full, "{response}") + escape(end)
    asked = full.partition("{input}")[0].rstrip(" ")  # ends where an input follows
    return SelfGenerationPrompts(
        FEWFEDPIT_PROMPTS.instruction,
        ResponsePrompt(
            begin="",
            example_with_input=full + response,
            example_without_input=short + response,
            end=short,
            stop=stops,
            pattern=rf"(?:#* ?{_LABEL}:)?(?P<response>.*)",
        ),
        InputPrompt(asked, response_end=full, stop=stops) if given in template.slots else None,
    )


def _first_line(text: str) -> str:
    return ("\n" if text.startswith("\n") else "") + text.strip().splitlines()[0]
