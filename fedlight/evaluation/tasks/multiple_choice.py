"""Multiple choice, answered by likelihood: the choice that the model finds likeliest after the question.

D. Hendrycks et al., "Measuring Massive Multitask Language Understanding", ICLR 2021, https://arxiv.org/abs/2009.03300:
the question, the choices by letters, and the likeliest letter; a subject's examples come from its own rows. The medical
questions of the FedDCA paper (Table 9) are six of the subjects: anatomy, clinical knowledge, college biology, college
medicine, medical genetics and professional medicine, 1,089 questions.
"""

from collections.abc import Sequence
from typing import Any, Literal

from fedlight.evaluation.tasks.exact_match import text_of
from fedlight.evaluation.tasks.model import AnswersPrompts
from fedlight.evaluation.tasks.result import Verdict
from fedlight.evaluation.tasks.task import Example, Prompts, Task
from fedlight.support.types import Row

LETTERS = "ABCDEFGHIJ"
INSTRUCTION = "Answer the following multiple choice question{about}. Give the letter of the right choice."


class MultipleChoice(Task):
    """Task of questions with choices; the rows have ``question``, ``choices``, ``answer`` (a letter or a number from 0).

    Args:
        data: rows as above and, where wanted, ``subject``; few-shot examples come from the question's own subject.
        subject: whether the rows have a subject, which is named in the instruction and scored by itself.
        by: ``letter`` compares the letters; ``text`` compares the choices themselves, without showing letters.
        normalize: with ``text``, compare the ``sum`` of the log-probabilities, or their mean by ``tokens`` or by ``bytes``.
        instruction: ``{about}`` becomes " about SUBJECT", or nothing.
        options: see `Task`; no text is drawn or written here.

    Raises:
        ValueError: see ``Task``; a normalization of letters, which are equally long.
    """

    def __init__(
        self,
        data: Prompts,
        subject: bool = True,
        by: Literal["letter", "text"] = "letter",
        normalize: Literal["sum", "tokens", "bytes"] = "sum",
        instruction: str = INSTRUCTION,
        **options: Any,
    ) -> None:
        super().__init__(data, **options)
        if by == "letter" and normalize != "sum":
            raise ValueError(
                f"MultipleChoice.normalize={normalize} is for by=text: letters are all equally long"
            )
        self.by, self.normalize, self.instruction = by, normalize, instruction
        self.names = ("question", "choices", "answer", *(["subject"] if subject else []))

    def example(self, row: Row) -> Example:
        """Return the instruction, the question with its choices, and the right choice."""
        choices = [text_of(choice) for choice in row["choices"]]
        right = index_of(row["answer"], len(choices))
        if len(choices) > len(LETTERS):
            raise ValueError(f"{len(choices)} choices, but only {len(LETTERS)} letters")
        if self.by == "text" and not all(choices):
            raise ValueError(f"one of the choices {choices} is empty and cannot be compared by its text")
        subject = text_of(row.get("subject"))
        shown = tuple(LETTERS[: len(choices)]) if self.by == "letter" else tuple(choices)
        lines = [f"{letter}. {text}" for letter, text in zip(LETTERS, choices, strict=False)]
        question = [text_of(row["question"]), *(lines if self.by == "letter" else [])]
        about = f" about {subject.replace('_', ' ')}" if subject else ""
        fields = {"instruction": self.instruction.replace("{about}", about), "input": "\n".join(question)}
        return Example(fields, shown[right], group=subject, choices=shown)

    def answer(
        self, model: AnswersPrompts, prompts: Sequence[str], examples: Sequence[Example]
    ) -> list[list[str]]:
        """Return the likeliest choice of each example."""
        choices = [[self.data.continuation(choice) for choice in example.choices] for example in examples]
        found = model.log_likelihoods(prompts, choices)
        best = []
        for example, texts, likelihoods in zip(examples, choices, found, strict=True):
            lengths = {
                "sum": [1] * len(texts),
                "tokens": [one.tokens for one in likelihoods],
                "bytes": [len(text.strip().encode()) for text in texts],
            }[self.normalize]
            scores = [one.log_prob / length for one, length in zip(likelihoods, lengths, strict=True)]
            best.append([example.choices[scores.index(max(scores))]])
        return best

    def new_tokens(self, examples: Sequence[Example]) -> int:
        """Return the bytes of the longest choice, at least its tokens, plus the blank before it; nothing is generated."""
        return 1 + max(len(choice.encode()) for example in examples for choice in example.choices)

    def score(self, example: Example, answer: str) -> Verdict:
        """Score 1 for the right choice."""
        return Verdict(float(answer == example.target), answer)


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
