"""Exact match: an answer is right if it equals its row's response, up to case, blanks and a final full stop; or ROUGE-L."""

from collections.abc import Sequence
from typing import Any, Literal

from fedlight.evaluation.rouge_l import rouge_l_of_pairs, tokenize
from fedlight.evaluation.tasks.result import Verdict
from fedlight.evaluation.tasks.task import Example, Prompts, Task
from fedlight.support.types import Row


class ExactMatch(Task):
    """Task of instruction rows with one right answer each.

    Args:
        data: rows with the slots of the template, ``response`` and, where wanted, ``group``.
        slots: names of the template's slots.
        group: column of a row's group, whose score is reported separately; None: no groups.
        by: ``equality``, a score of 0 or 1, or ``rouge_l`` with the response, in [0, 1], for answers of whole sentences.
        shots, num_shots, limit, batch_size, max_new_tokens, samples, temperature, top_p, stop, seed: see
            `Task`.
    """

    answer_tokens = 32

    def __init__(
        self,
        data: Prompts,
        slots: Sequence[str] = ("instruction", "input"),
        group: str | None = None,
        by: Literal["equality", "rouge_l"] = "equality",
        **options: Any,
    ) -> None:
        super().__init__(data, **options)
        self.by = by
        self.slots, self.group = tuple(slots), group
        self.names = (*self.slots, "response", *([] if group is None else [group]))

    def example(self, row: Row) -> Example:
        """Return the texts of the slots and of the response."""
        target = text_of(row["response"])
        if not normalized(target):  # else an empty answer would be right
            raise ValueError(f"the response {target!r} is empty")
        if self.by == "rouge_l" and not tokenize(target):  # else no answer would be right
            raise ValueError(
                f"the response {target!r} has no Latin letter or digit for ROUGE-L: set by to equality"
            )
        fields = {slot: text_of(row[slot]) for slot in self.slots}
        return Example(fields, target, group="" if self.group is None else text_of(row[self.group]))

    def score(self, example: Example, answer: str) -> Verdict:
        """Score equality after `normalized`, or ROUGE-L; an empty answer counts as unread."""
        read = normalized(answer)
        if self.by == "rouge_l":
            return Verdict(float(rouge_l_of_pairs([answer], [example.target])[0]), read or None)
        return Verdict(float(read == normalized(example.target)), read or None)


def text_of(value: Any) -> str:
    """Return a value as stripped text; "" for None."""
    return "" if value is None else str(value).strip()


def normalized(text: str) -> str:
    r"""Return a text in lower case, with one blank between words and no full stop at its end.

    Examples:
        >>> normalized(" The  Cat\nsat . ") == normalized("the cat sat")
        True
        >>> normalized("3.5"), normalized("...")
        ('3.5', '')
    """
    return " ".join(text.casefold().split()).rstrip(" .")
