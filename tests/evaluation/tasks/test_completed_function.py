from itertools import combinations
from statistics import fmean

import pytest

from fedlight.evaluation.tasks.human_eval import complete_program, pass_at_k

PROMPT = 'from typing import List\n\ndef total(x: List[int]) -> int:\n    """Sum."""\n'
BODY = "    n = 0\n    for y in x:\n        n += y\n    return n\n"
WHOLE = "def total(x):\n" + BODY


def works(answer: str) -> bool:
    """The program defines a function that adds; trusted here, so it is run."""
    names: dict[str, object] = {"__name__": "program"}
    exec(complete_program(PROMPT, answer, "total"), names)
    return names["total"]([1, 2, 3]) == 6  # type: ignore[operator]


@pytest.mark.parametrize(
    "answer",
    [
        BODY,
        "\n" + BODY,
        BODY.strip(),
        BODY + "\n\nprint(total(input()))\nnot Python",
        BODY + "\nif __name__ == '__main__':\n    input()",
        BODY + "\n# the next one\ndef other(x:",
        BODY + "\nclass A(:",
        "n = 0\nfor y in x:\n    n += y\nreturn n",
        "for y in x:\n    pass\nreturn sum(x)",
        "    return sum(x)",
        "return sum(x)",
        "\treturn sum(x)",
        "if x:\n        return sum(x)\n    return 0",
        WHOLE,
        PROMPT + BODY,
        f"```python\n{WHOLE}```",
        f"```\n{WHOLE}\n```\nThis adds.",
        f"Here it is:\n\n```python\n{PROMPT}{BODY}```\n\nFor example:\n```python\nprint(total([1]))\n```",
        f"First:\n```bash\npip install x\n```\nthen\n```python\n{WHOLE}```",
        f"```python\n{BODY}```",
        f"```python\n{WHOLE}",
        f"Sure, here is the function:\n{WHOLE}\nIt adds the numbers one by one.",
        f"  {WHOLE}".replace("\n", "\n  "),
        "import math\n\ndef helper(x):\n    return sum(x)\n\n\ndef total(x):\n    return helper(x)\n",
        "def total(x):\n    return helper(x)\n\ndef helper(x):\n    return sum(x)\nDone.",
        "def total(\n    x,\n):\n    return sum(x)\n",
        "Import the list from here:\nimport math\ndef total(x):\n    return int(math.fsum(x))\n",
        "from the start, class by class:\ndef total(x):\n    return sum(x)\n",
        "```python\ntry:\n    zero = 0\nfinally:\n    pass\n\ndef total(x):\n    return sum(x) + zero\n```",
        "ZERO = 0\ndef total(x):\n    return sum(x) + ZERO\n",
        "zeros = [0, 0]\nzero = 0\ndef total(x):\n    return sum(x) + zero + sum(zeros)\n",
        "n = 3 is one case:\nzero = 0\ntotal = lambda x: sum(x) + zero\nIt adds.",
        "```python\ntotal = lambda x: sum(x)\n```",
    ],
)
def test_answers_of_every_form(answer: str) -> None:
    assert works(answer)


@pytest.mark.parametrize(
    "answer", ["", "   \n", "I cannot do that.", "```\n```", "    pass", "def total(x): return 0"]
)
def test_answers_without_the_function_do_not_work(answer: str) -> None:
    try:
        assert not works(answer)
    except SyntaxError:
        assert answer not in ("    pass", "def total(x): return 0")


@pytest.mark.parametrize("samples", [1, 4, 7])
def test_it_is_the_share_of_draws_with_a_right_sample(samples: int) -> None:
    for correct in range(samples + 1):
        outcomes = [True] * correct + [False] * (samples - correct)
        for k in range(1, samples + 1):
            drawn = fmean(any(draw) for draw in combinations(outcomes, k))
            assert pass_at_k(samples, correct, k) == pytest.approx(drawn, abs=1e-12)


def test_many_samples_do_not_overflow() -> None:
    assert pass_at_k(2000, 1000, 1) == 0.5
    assert pass_at_k(2000, 0, 100) == 0.0
    assert pass_at_k(2000, 1950, 100) == 1.0
