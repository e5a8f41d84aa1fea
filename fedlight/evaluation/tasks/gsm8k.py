r"""GSM8K: word problems with worked solutions that end in a number; only that number counts.

K. Cobbe et al., "Training Verifiers to Solve Math Word Problems", 2021, https://arxiv.org/abs/2110.14168. The number of a
reference solution follows ``####``. So does that of a model's answer where it writes the mark; else its last number
counts, for models not trained on this format (the flexible extraction of EleutherAI's lm-evaluation-harness).
Numbers are compared as numbers: 1,000 equals $1000.00.
"""

import re
from decimal import Decimal

from fedlight.evaluation.tasks.exact_match import text_of
from fedlight.evaluation.tasks.result import Verdict
from fedlight.evaluation.tasks.task import Example, Task
from fedlight.support.types import Row

MARK = "####"
# A minus belongs to the number unless a digit or word precedes it, or a blank follows it: "5-3", "5 - 3", "- 3 cats".
# LaTeX writes \$ for $.
MINUS = r"(?:(?<![\w).%])[-\u2212])?"
NUMBER = re.compile(MINUS + r"(?:\\?[$\u20ac\u00a3]\s?-?)?(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)")


class GSM8K(Task):
    """Task of math word problems; the rows have ``question`` and ``answer``.

    Arguments are those of `Task`. Few-shot examples show their worked solutions.
    """

    names = ("question", "answer")
    answer_tokens = 400

    def example(self, row: Row) -> Example:
        """Return the question as an instruction, and the number that ends the solution."""
        target = final_number(text_of(row["answer"]), marked=True)
        if target is None:
            raise ValueError(f"the answer has no number behind {MARK}")
        question = text_of(row["question"])
        response = re.sub(r"<<.*?>>", "", text_of(row["answer"]))  # the calculator's annotations
        return Example({"instruction": question, "input": ""}, f"{target:f}", response)

    def score(self, example: Example, answer: str) -> Verdict:
        """Score 1 for an answer that ends in the right number."""
        read = final_number(answer)
        return Verdict(float(read == Decimal(example.target)), None if read is None else f"{read:f}")


def final_number(text: str, marked: bool = False) -> Decimal | None:
    """Return the number after the first ``####``, else, unless ``marked``, the last number; None without a number.

    Examples:
        >>> final_number("7 * 5 = <<7*5=35>>35 #### 1,035"), final_number("So it is $2.50.")
        (Decimal('1035'), Decimal('2.50'))
        >>> final_number("It falls by 5-3 = 2, to -4 degrees."), final_number("no idea")
        (Decimal('-4'), None)
    """
    before, mark, behind = text.partition(MARK)
    numbers = NUMBER.findall(behind if mark else before)
    if not numbers or (marked and not mark):
        return None
    return number_of(numbers[0] if mark else numbers[-1])


def number_of(text: str) -> Decimal:
    """Return the value of a written number, without currency and commas; two signs, as in "-$-5", count as one.

    Examples:
        >>> number_of("-$1,234.50"), number_of(".5"), number_of("-$-5")
        (Decimal('-1234.50'), Decimal('0.5'), Decimal('-5'))
    """
    sign = "-" if re.search("[-\u2212]", text) else ""
    return Decimal(sign + re.sub(r"[^\d.]", "", text))
