"""Which of the texts that a client's model wrote are kept: the filters of FewFedPIT, and the reasons for dropping.

Zhang et al., "FewFedPIT", https://arxiv.org/abs/2403.06131, section 3.3: failed instructions go by their format, then
those too near to a local one (ROUGE-L above 0.7), so that what the client trains on gets more diverse.
"""

import re
from collections.abc import Iterable, Mapping, Sequence

from fedlight.evaluation.rouge_l import KnownTexts, tokenize

EMPTY = "empty"
NO_LETTER = "no_letter"
TOO_SHORT = "too_short"
REFUSAL = "refusal"
REPEATED = "repeated"
NEAR_INSTRUCTION = "near_instruction"
NO_MATCH = "no_match"
NEAR_EXAMPLE = "near_example"
CUT_OFF = "cut_off"
PROMPT_TOO_LONG = "prompt_too_long"
REASONS = (
    *(EMPTY, NO_LETTER, TOO_SHORT, REFUSAL, REPEATED, NEAR_INSTRUCTION),
    *(NO_MATCH, NEAR_EXAMPLE, CUT_OFF, PROMPT_TOO_LONG),
)

REFUSALS = ("As a", "As an", "Sorry", "I'm sorry", "I am sorry", "I cannot", "I can't")
"""How a model begins that talks about itself in place of writing what it was asked for."""


def format_fault(instruction: str, min_words: int, refusals: Iterable[str]) -> str | None:
    """What is wrong with an instruction by itself; None where nothing is.

    Args:
        instruction: without white space around it.
        min_words: fewest words, as blanks separate them.
        refusals: whole words that it must not begin with, in upper or lower case.

    Example:
        >>> [format_fault(text, 3, ("As a",)) for text in ("", "1 + 2 =", "Say no.", "As a model, I ...")]
        ['empty', 'no_letter', 'too_short', 'refusal']
        >>> format_fault("As always, name a planet.", 3, ("As a",)) is None
        True
    """
    if not instruction:
        return EMPTY
    if not any(character.isalpha() for character in instruction):
        return NO_LETTER
    if len(instruction.split()) < min_words:
        return TOO_SHORT
    begun = (re.match(rf"{re.escape(text)}(?!\w)", instruction, re.IGNORECASE) for text in refusals)
    return REFUSAL if any(begun) else None


class OwnTexts:
    """What a client has already: its own instructions and examples, and the instructions that were made for it.

    ROUGE-L sees Latin letters and digits alone. Of a text without any, what is equal but for case and white space is near.

    Args:
        rows: its own, each with ``instruction``, ``input`` and ``response``.
        max_rouge_l: most ROUGE-L F1 with its own instructions or examples, in [0, 1]; at 1 nothing is too near.
    """

    def __init__(self, rows: Sequence[Mapping[str, str]], max_rouge_l: float) -> None:
        self._instructions, self._examples = KnownTexts(max_rouge_l), KnownTexts(max_rouge_l)
        self._made: set[str] = set()
        wholes = (
            [text for row in rows for text in (row["instruction"], _whole(row))] if max_rouge_l < 1 else []
        )
        self._unseen = {_folded(text) for text in wholes if not tokenize(text)}
        for instruction in dict.fromkeys(row["instruction"] for row in rows):
            self._instructions.add(instruction)
        for row in rows:
            self._examples.add(_whole(row))

    def instruction_fault(self, instruction: str) -> str | None:
        """Why a new instruction is none; where it is one, it is known from then on.

        Example:
            >>> own = OwnTexts([{"instruction": "Name a large planet.", "input": "", "response": "Saturn."}], 0.7)
            >>> own.instruction_fault("Name a planet."), own.instruction_fault("Write a poem.")
            ('near_instruction', None)
            >>> own.instruction_fault("write a  poem.")
            'repeated'
        """
        key = _folded(instruction)
        if key in self._made:
            return REPEATED
        if key in self._unseen or self._instructions.near(instruction) is not None:
            return NEAR_INSTRUCTION
        self._made.add(key)
        return None

    def example_fault(self, row: Mapping[str, str]) -> str | None:
        """Why a new example is none: it copies one of the client's own.

        Example:
            >>> own = OwnTexts([{"instruction": "Name it.", "input": "a b c d e", "response": "Saturn."}], 0.7)
            >>> own.example_fault({"instruction": "Say it.", "input": "a b c d e", "response": "Saturn."})
            'near_example'
        """
        text = _whole(row)
        near = _folded(text) in self._unseen or self._examples.near(text) is not None
        return NEAR_EXAMPLE if near else None


def _folded(text: str) -> str:
    return " ".join(text.casefold().split())


def _whole(row: Mapping[str, str]) -> str:
    return "\n".join(text for text in (row["instruction"], row["input"], row["response"]) if text)
