"""Multiple choice: the choice that the model finds likeliest after the question, and beside it the one that it writes.

D. Hendrycks et al., "Measuring Massive Multitask Language Understanding", ICLR 2021, https://arxiv.org/abs/2009.03300:
the question, the choices by letters, and the likeliest letter; a subject's examples come from its own rows. The medical
questions of the FedDCA paper (Table 9) are six of the subjects: anatomy, clinical knowledge, college biology, college
medicine, medical genetics and professional medicine, 1,089 questions.
"""

import re
from collections.abc import Sequence
from typing import Any, Literal

from fedlight.evaluation.tasks.exact_match import text_of
from fedlight.evaluation.tasks.result import Verdict
from fedlight.evaluation.tasks.task import Example, Normalization, Prompts, Task
from fedlight.support.types import Row

LETTERS = "ABCDEFGHIJ"
WORD, WORD_OR_SIGN = re.compile(r"\w+"), re.compile(r"\w+|[^\w\s]")
INSTRUCTION = "Answer the following multiple choice question{about}. Give the letter of the right choice."


class MultipleChoice(Task):
    """Task of questions with choices; the rows have ``question``, ``choices``, ``answer`` (a letter or a number from 0).

    Small models prefer a letter whatever the question: the shares of the choices, written and likeliest, are logged.

    Args:
        data: rows as above and, where wanted, ``subject``; few-shot examples come from the question's own subject.
        subject: whether the rows have a subject, which is named in the instruction and scored separately.
        by: ``letter`` compares the letters; ``text`` compares the choices themselves, without showing letters.
        normalize: with ``text``, compare the ``sum`` of the log-probabilities, or their mean by ``tokens`` or by ``bytes``.
        instruction: ``{about}`` becomes " about SUBJECT", or nothing.
        choices: the same of every row, whose ``answer`` may be their text; None: the rows have a column of ``choices``.
        context: whether the rows have a ``context``, a text or a list of texts, which is shown before the question.
        options: see `Task`. The score is that of the likeliest choice.

    Raises:
        ValueError: see ``Task``; a normalization of letters, which are equally long.
    """

    answer_tokens = 16
    by_likelihood = True

    def __init__(
        self,
        data: Prompts,
        subject: bool = True,
        by: Literal["letter", "text"] = "letter",
        normalize: Normalization = "sum",
        instruction: str = INSTRUCTION,
        choices: list[str] | None = None,
        context: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(data, **options)
        if by == "letter" and normalize != "sum":
            raise ValueError(
                f"MultipleChoice.normalize={normalize} is for by=text: letters are all equally long"
            )
        self.by, self.normalize, self.instruction = by, normalize, instruction
        self.choices = choices or []
        named = {"choices": not self.choices, "subject": subject, "context": context}
        self.names = ("question", "answer", *(name for name, is_read in named.items() if is_read))

    def example(self, row: Row) -> Example:
        """Return the instruction, the question with its choices, and the right choice."""
        # A text, or an object such as ARC's, would be read as its letters or keys.
        if not self.choices and not isinstance(row["choices"], list):
            raise ValueError(
                f"the choices {row['choices']!r} are no list: set columns.choices to a list of texts"
            )
        choices = self.choices or [text_of(choice) for choice in row["choices"]]
        is_named = text_of(row["answer"]) in self.choices
        right = choices.index(text_of(row["answer"])) if is_named else index_of(row["answer"], len(choices))
        if len(choices) > len(LETTERS):
            raise ValueError(f"{len(choices)} choices, but only {len(LETTERS)} letters")
        if self.by == "text" and not all(choices):
            raise ValueError(f"one of the choices {choices} is empty and cannot be compared by its text")
        subject = text_of(row.get("subject"))
        shown = tuple(LETTERS[: len(choices)]) if self.by == "letter" else tuple(choices)
        lines = [f"{letter}. {text}" for letter, text in zip(LETTERS, choices, strict=False)]
        context = row.get("context") or []
        if not isinstance(context, str | list):
            raise ValueError(
                f"the context {context!r} is neither a text nor a list: set columns.context to one"
            )
        before = [context] if isinstance(context, str) else [*map(text_of, context)]
        question = [*before, text_of(row["question"]), *(lines if self.by == "letter" else [])]
        about = f" about {subject.replace('_', ' ')}" if subject else ""
        fields = {"instruction": self.instruction.replace("{about}", about), "input": "\n".join(question)}
        return Example(fields, shown[right], group=subject, choices=shown)

    def new_tokens(self, examples: Sequence[Example]) -> int:
        """Return the most tokens of an answer, or of the longest choice and a blank."""
        # A text has at least as many bytes as tokens.
        longest = max(len(choice.encode()) for example in examples for choice in example.choices)
        return max(self.max_new_tokens, 1 + longest)

    def score(self, example: Example, answer: str) -> Verdict:
        """Score 1 for an answer that names the right choice; it is read as a letter, or as one of the fixed choices."""
        if self.by == "letter":
            read = letter_in(answer, len(example.choices))
            return Verdict(float(read == example.target), read)
        named = choice_in(answer, example.choices)
        read = named if self.choices or named is None else LETTERS[example.choices.index(named)]
        return Verdict(float(named == example.target), read)


def letter_in(answer: str, number: int) -> str | None:
    r"""Return the first of the letters that stands alone in an answer; None where none does.

    Examples:
        >>> letter_in(" B. femur", 4), letter_in(r"It is $\boxed{C}$", 4), letter_in("A bone.", 4), letter_in("E", 4)
        ('B', 'C', None, None)
        >>> letter_in("Answer:B", 4)
        'B'
    """
    # In "A bone" the letter is an article: a mark or the end of the line has to follow it.
    letter = re.search(rf"(?:^|(?<=[\s({{\"'*:]))[{LETTERS[:number]}](?=[.):,}}*\"']|\s*$|\s*\n)", answer)
    return letter.group() if letter else None


def choice_in(answer: str, choices: Sequence[str]) -> str | None:
    """Return the longest choice that begins an answer, else the only choice in it, else None.

    Examples:
        >>> choice_in(" Yes, it does", ["yes", "no"]), choice_in("It is no.", ["yes", "no"]), choice_in("Note", ["no"])
        ('yes', 'no', None)
        >>> choice_in("-5.", ["5", "-5"]), choice_in(" 5", ["5", "-5"]), choice_in("", ["<", ">"])
        ('-5', '5', None)
    """
    if answer in choices:  # the likeliest
        return answer
    texts = (answer, *choices)
    # The blanks around keep "no" from being read in "note".
    said, *each = [f" {' '.join(WORD.findall(text.casefold()))} " for text in texts]
    if "  " in each or len(set(each)) < len(set(choices)):  # their signs or their case tell them apart
        said, *each = [f" {' '.join(WORD_OR_SIGN.findall(text))} " for text in texts]
    phrases = dict(zip(choices, each, strict=True))
    begun = [choice for choice, phrase in phrases.items() if said.startswith(phrase)]
    candidates = begun or [choice for choice, phrase in phrases.items() if phrase in said]
    return max(candidates, key=lambda choice: len(phrases[choice])) if begun or len(candidates) == 1 else None


def index_of(answer: Any, number: int) -> int:
    """Return the index of a choice named by its letter or its number from 0; ValueError if it is none of ``number``.

    Examples:
        >>> index_of("C", 4), index_of(2, 4), index_of("2", 4)
        (2, 2, 2)
    """
    text = text_of(answer)
    index = int(text) if text.isdecimal() else LETTERS.find(text) if len(text) == 1 else -1
    if not 0 <= index < number:
        raise ValueError(
            f"the answer {answer!r} is none of the {number} choices: a letter from A, or a number from 0"
        )
    return index
