"""FewFedPIT's filters of generated texts, and the reasons for dropping one.

Zhang et al., "FewFedPIT", https://arxiv.org/abs/2403.06131, section 3.3: instructions of a wrong format are dropped, then
instructions near a local one (ROUGE-L above 0.7), which makes the client's training data more diverse. Here a whole example
is compared too, and a long response or input with the client's long ones: private text stays private under a new
instruction, in another field, and amid new text. A new instruction may hold a local one and as much text again.
"""

import re
from collections.abc import Iterable, Mapping, Sequence

from fedlight.evaluation.rouge_l import KnownTexts, tokenize, warn_of_scripts

EMPTY = "empty"
NO_LETTER = "no_letter"
TOO_SHORT = "too_short"
REFUSAL = "refusal"
REPEATED = "repeated"
NEAR_INSTRUCTION = "near_instruction"
NO_MATCH = "no_match"
NEAR_EXAMPLE = "near_example"
NEAR_RESPONSE = "near_response"
NEAR_INPUT = "near_input"
CUT_OFF = "cut_off"
PROMPT_TOO_LONG = "prompt_too_long"
REASONS = (
    *(EMPTY, NO_LETTER, TOO_SHORT, REFUSAL, REPEATED, NEAR_INSTRUCTION),
    *(NO_MATCH, NEAR_EXAMPLE, NEAR_RESPONSE, NEAR_INPUT, CUT_OFF, PROMPT_TOO_LONG),
)

LONG = 40
"""Characters from which responses and inputs are compared: names, numbers, yes and no are equal without a copy."""

REFUSALS = ("As a", "As an", "Sorry", "I'm sorry", "I am sorry", "I cannot", "I can't")
"""Beginnings of answers in which a model refuses or talks about itself."""


def check_format(instruction: str, min_words: int, refusals: Iterable[str]) -> str | None:
    """Return the fault of a stripped instruction's format; None without a fault.

    Blanks separate words. The case of refusals, which are whole words, does not matter.

    Examples:
        >>> [check_format(text, 3, ("As a",)) for text in ("", "1 + 2 =", "Say no.", "As a model, I ...")]
        ['empty', 'no_letter', 'too_short', 'refusal']
        >>> check_format("As always, name a planet.", 3, ("As a",)) is None
        True
    """
    if not instruction:
        return EMPTY
    if not any(character.isalpha() for character in instruction):
        return NO_LETTER
    if len(instruction.split()) < min_words:
        return TOO_SHORT
    # A refusal is whole words: "As a" does not begin "As always".
    matches = (re.match(rf"{re.escape(text)}(?!\w)", instruction, re.IGNORECASE) for text in refusals)
    return REFUSAL if any(matches) else None


class OwnTexts:
    """A client's own instructions and examples (``instruction``, ``input``, ``response``), and those made for it so far.

    ``max_rouge_l`` is the most ROUGE-L F1 with its own instructions and examples, and of a long response or input with its
    own long ones, whole or in part, in [0, 1]; 1 for no limit.
    """

    def __init__(self, rows: Sequence[Mapping[str, str]], max_rouge_l: float) -> None:
        long = [text for row in rows for text in (row["response"], row["input"]) if len(text) >= LONG]
        self._instructions = _Known([row["instruction"] for row in rows], max_rouge_l)
        self._examples = _Known([_join(row) for row in rows], max_rouge_l)
        self._long = _Known(long, max_rouge_l)
        self._made: set[str] = set()
        if max_rouge_l < 1:
            said = "copies of them with other words are not dropped, equal ones are"
            warn_of_scripts(map(_join, rows), said)

    def check_instruction(self, instruction: str) -> str | None:
        """Return the fault of a new instruction; without a fault, remember it and return None.

        Examples:
            >>> texts = OwnTexts([{"instruction": "Name a large planet.", "input": "", "response": "Saturn."}], 0.7)
            >>> texts.check_instruction("Name a planet."), texts.check_instruction("Write a poem.")
            ('near_instruction', None)
            >>> texts.check_instruction("write a  poem.")
            'repeated'
        """
        key = _fold(instruction)
        if key in self._made:
            return REPEATED
        if self._instructions.near(instruction):
            return NEAR_INSTRUCTION
        self._made.add(key)
        return None

    def check_example(self, row: Mapping[str, str]) -> str | None:
        """Return the fault of a new example that copies one of the client's own, or its long text; None without a fault.

        Examples:
            >>> texts = OwnTexts([{"instruction": "Name it.", "input": "a b c d e", "response": "Saturn."}], 0.7)
            >>> texts.check_example({"instruction": "Say it.", "input": "a b c d e", "response": "Saturn."})
            'near_example'
            >>> long = "It is cold, it has rings, and a year there takes longer than twenty-nine of ours."
            >>> texts = OwnTexts([{"instruction": "Describe Saturn.", "input": "", "response": long}], 0.7)
            >>> asked = "Write a poem of four lines about the time that the largest of all the gas giants takes."
            >>> texts.check_example({"instruction": asked, "input": "", "response": f"{asked} {long}"})
            'near_response'
            >>> texts.check_example({"instruction": asked, "input": long, "response": "Thirty years."})
            'near_input'
        """
        if self._examples.near(_join(row)):
            return NEAR_EXAMPLE
        for name, fault in (("response", NEAR_RESPONSE), ("input", NEAR_INPUT)):
            if len(row[name]) >= LONG and self._long.overlaps(row[name]):  # short ones may be equal
                return fault
        return None


class _Known:
    """Texts of a client: near by ROUGE-L, or, without a token, by equality up to case and white space."""

    def __init__(self, texts: Sequence[str], max_rouge_l: float) -> None:
        self._texts = KnownTexts(max_rouge_l)
        for text in dict.fromkeys(texts):
            self._texts.add(text)
        # ROUGE-L has tokens of Latin letters and digits alone; texts of other scripts are compared whole.
        self._without_tokens = {_fold(text) for text in texts if max_rouge_l < 1 and not tokenize(text)}

    def near(self, text: str) -> bool:
        return _fold(text) in self._without_tokens or self._texts.near(text) is not None

    def overlaps(self, text: str) -> bool:
        return self.near(text) or self._texts.overlaps(text)


def _fold(text: str) -> str:
    return " ".join(text.casefold().split())


def _join(row: Mapping[str, str]) -> str:
    return "\n".join(text for text in (row["instruction"], row["input"], row["response"]) if text)
