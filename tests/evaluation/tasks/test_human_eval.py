import os
import re
from pathlib import Path

import pytest
from tiny_world import write_rows

from fedlight.datamodules.rows.task_rows import TaskRows
from fedlight.evaluation.sandbox import Limits, SandboxError, missing_protection
from fedlight.evaluation.tasks.human_eval import CODE_STOPS, INSTRUCTION, HumanEval

pytestmark = pytest.mark.skipif(missing_protection() is not None, reason=f"{missing_protection()}")

SHARED = Path(os.environ.get("FEDLIGHT_SHARED", "missing"))
PROBLEMS = [
    {
        "task_id": f"HumanEval/{number}",
        "prompt": f'import math\n\ndef helper(x):\n    return x\n\ndef add{number}(x):\n    """Adds {{{number}}}."""\n',
        "entry_point": f"add{number}",
        "canonical_solution": f"    return x + {number}\n",
        "test": f"def check(candidate):\n    assert candidate(helper(math.floor(1.5))) == {number + 1}\n",
    }
    for number in range(3)
]


class Writes:
    """A model that gives these answers to everything; notes how it was asked."""

    def __init__(self, *answers: str) -> None:
        self.answers, self.asked = answers, []

    def generate(self, prompts, n, temperature, top_p, max_new_tokens, seed, *, stop, strip):
        self.asked.append((list(prompts), n, list(stop)))
        return [list(self.answers[:n]) for _ in prompts]

    def log_likelihoods(self, prompts, continuations):
        raise AssertionError


@pytest.fixture
def rows(tmp_path):
    return TaskRows(str(write_rows(tmp_path / "problems.jsonl", PROBLEMS)), template="{instruction}")


def test_greedy_answers(rows) -> None:
    model = Writes("    return x + 1\n\nprint(1)")
    result = HumanEval(rows, instruction=None).run(model)
    assert [outcome.score for outcome in result.outcomes] == [0.0, 1.0, 0.0]
    assert model.asked == [([row["prompt"] for row in reversed_by_length()], 1, CODE_STOPS)]
    assert result.outcomes[0].verdicts[0].note == "error: AssertionError"
    assert result.outcomes[1].verdicts[0].read == PROBLEMS[1]["prompt"] + "    return x + 1\n\n"
    assert result.outcomes[1].verdicts[0].note == ""
    templated = TaskRows(rows.source, template="Question: {instruction}\nAnswer:")
    assert HumanEval(templated, instruction=None).stop == [*CODE_STOPS, "\nQuestion:"]


def reversed_by_length():
    return sorted(PROBLEMS, key=lambda row: -len(row["prompt"]))


def test_instructions_are_asked_without_stops(rows) -> None:
    model = Writes("Sure:\n```python\ndef add2(x):\n    return x + 2\n```")
    result = HumanEval(rows).run(model)
    assert result.mean == pytest.approx(1 / 3)
    assert model.asked[0][0][0] == INSTRUCTION.replace("{prompt}", PROBLEMS[0]["prompt"])
    assert model.asked[0][2] == []
    assert result.outcomes[0].verdicts[0].note.startswith("error: ")


def test_pass_at_k_of_several_samples_and_of_an_endless_answer(rows) -> None:
    model = Writes("    return x + 1", "    return x + 2", "    return x + 1", "")
    result = HumanEval(rows, instruction=None, samples=4, temperature=0.8, k=2).run(model)
    assert [outcome.score for outcome in result.outcomes] == pytest.approx([0.0, 1 - 1 / 6, 1 - 3 / 6])
    assert result.unread == 0.25
    limits = Limits(wall_seconds=0.5)
    result = HumanEval(rows, instruction=None, limit=1, limits=limits).run(Writes("    while True: pass"))
    assert (result.mean, result.outcomes[0].verdicts[0].note) == (0.0, "timeout: ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"instruction": "Write it."}, "HumanEval.instruction='Write it.' lacks the problem"),
        ({"k": 2}, "HumanEval.k=2 has to be from 1 to samples=1"),
        ({"k": 0}, "HumanEval.k=0 has to be"),
        ({"processes": 0}, "HumanEval.processes=0 must be at least 1"),
    ],
)
def test_settings_that_do_not_fit_are_refused(rows, options, message) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        HumanEval(rows, **options)


def test_a_machine_without_protection_is_refused_before_the_model_works(rows, monkeypatch) -> None:
    why = "fedlight.evaluation.tasks.human_eval.missing_protection"
    monkeypatch.setattr(why, lambda: "this is another system")
    with pytest.raises(
        SandboxError, match=r"runs code of the model, and this is another system: .*unprotected"
    ):
        HumanEval(rows)
    HumanEval(rows, unprotected=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"test": ""}, "test: empty"),
        ({"test": "assert add0(1) == 1"}, "test does not define check"),
        ({"entry_point": "add 0"}, "prompt does not define add 0"),
        ({"prompt": ["Add 0."]}, "prompt does not define add0"),
    ],
)
def test_rows_without_tests_are_refused(change, message, tmp_path) -> None:
    file = write_rows(tmp_path / "broken.jsonl", [{**PROBLEMS[0], **change}])
    with pytest.raises(ValueError, match=rf"HumanEval.data, row 0: {message}"):
        HumanEval(TaskRows(str(file), template="{instruction}")).read()


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.exists(), reason="set FEDLIGHT_SHARED to the folder with the real data")
@pytest.mark.parametrize(
    ("form", "step", "passed"),
    [
        ("{canonical_solution}", 4, 41),
        ("    pass", 16, 0),
        ("```\n{prompt}{canonical_solution}```", 16, 11),
    ],
)
def test_real_problems(form: str, step: int, passed: int) -> None:
    data = TaskRows(str(SHARED / "data" / "humaneval" / "HumanEval.jsonl.gz"), template="{instruction}")
    task = HumanEval(data, instruction=None)
    _, examples, _ = task.read()
    names = ["prompt", "canonical_solution"]
    answers = [[re.sub(r"{(\w+)}", lambda slot, row=row: row[slot[1]], form)] for row in data.rows(names)]
    found = task.judge(examples[::step], answers[::step])
    assert sum(verdict.score for (verdict,) in found) == passed, [verdict.note for (verdict,) in found]
