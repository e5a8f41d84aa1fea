"""HumanEval: 164 functions to be written from their head and docstring; tests decide, run in the sandbox.

Chen et al., "Evaluating Large Language Models Trained on Code", 2021, https://arxiv.org/abs/2107.03374. The score is pass@k
(pass@1 by default: one greedy answer). Deviation from the authors' program: tests and function run in two processes (see
fedlight/evaluation/sandbox/check.py), helpers in the prompt are the prompt's own on the side of the tests, and time is
limited on the processor (3 s as there, but not counting what else the machine does).
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fedlight.evaluation.pass_at_k import pass_at_k
from fedlight.evaluation.sandbox import Check, Limits, SandboxError, check_function, missing_protection
from fedlight.evaluation.tasks.completed_function import complete_program, stub
from fedlight.evaluation.tasks.result import Verdict
from fedlight.evaluation.tasks.task import Example, Prompts, Task
from fedlight.support.checks import refuse_below
from fedlight.support.types import Row

CODE_STOPS = ["\nclass ", "\ndef ", "\n#", "\nif ", "\nprint("]  # the paper's, section 2.1
INSTRUCTION = "Create a Python script for this problem:\n{prompt}"  # as WizardCoder and others ask instruction-tuned models


class HumanEval(Task):
    """Functions to be completed.

    Args:
        data: rows with ``prompt``, ``test``, ``entry_point``; the template has the slot ``instruction`` (an empty ``input``
            is given as well): ``"{instruction}"`` alone for models that go on writing code, the training's for tuned ones.
        instruction: what is asked, with ``{prompt}``; None: the prompt itself, to be gone on with. Only then generation
            stops at the next definition. An answer may be the rest of the function or all of it either way.
        k: of pass@k, at most ``samples``.
        processes: problems that are tested at the same time, two processes each, each with the memory of ``limits``.
        unprotected: run the code where nothing can lock it up; see `fedlight.evaluation.sandbox.run_python`.
        limits: of each process.
        limit, batch_size, max_new_tokens, samples, temperature, top_p, stop, seed: see
            :class:`~fedlight.evaluation.tasks.task.Task`. There are no shots.

    Raises:
        ValueError: a setting is out of range. SandboxError: this machine cannot lock up a process.
    """

    names = ("prompt", "test", "entry_point")
    answer_tokens = 512

    def __init__(
        self,
        data: Prompts,
        instruction: str | None = INSTRUCTION,
        k: int = 1,
        processes: int = 2,
        unprotected: bool = False,
        limits: Limits | None = None,
        **options: Any,
    ) -> None:
        super().__init__(data, **options)
        if instruction is None and options.get("stop") is None:
            self.stop = list(CODE_STOPS)
        if instruction is not None and "{prompt}" not in instruction:
            raise ValueError(
                f"HumanEval.instruction={instruction!r} lacks the problem: put {{prompt}} where it belongs"
            )
        if not 1 <= k <= self.samples:
            raise ValueError(
                f"HumanEval.k={k} has to be from 1 to samples={self.samples}: draw more samples or lower k"
            )
        refuse_below(1, "HumanEval.", processes=processes)
        if not unprotected and (missing := missing_protection()):
            raise SandboxError(
                f"HumanEval runs what the model writes, and {missing}: run it elsewhere, or set unprotected to true where "
                "nothing can be lost, in a container for example"
            )
        self.instruction = "{prompt}" if instruction is None else instruction
        self.k, self.processes, self.unprotected, self.limits = k, processes, unprotected, limits or Limits()

    def example(self, row: Row) -> Example:
        """The problem as an instruction; the target is the name of the function."""
        if empty := [name for name in self.names if not row[name]]:
            raise ValueError(f"{', '.join(empty)}: empty")
        asked = self.instruction.replace("{prompt}", row["prompt"])  # code is full of braces
        return Example({"instruction": asked, "input": ""}, row["entry_point"], extra=row)

    def score(self, example: Example, answer: str) -> Verdict:
        """1 where the function passes its tests."""
        prompt, name = example.extra["prompt"], example.target
        program = complete_program(prompt, answer, name)
        tests = f"{example.extra['test']}\ncheck({name})"
        check = check_function(program, name, tests, stub(prompt), self.limits, self.unprotected)
        return Verdict(float(check.passed), program if answer.strip() else None, _note(check))

    def judge(self, examples: Sequence[Example], answers: Sequence[Sequence[str]]) -> list[list[Verdict]]:
        """Several at a time; equal answers to a problem are tested once."""
        pairs = [(row, answer) for row, own in enumerate(answers) for answer in dict.fromkeys(own)]
        with ThreadPoolExecutor(self.processes) as pool:
            found = dict(
                zip(pairs, pool.map(lambda pair: self.score(examples[pair[0]], pair[1]), pairs), strict=True)
            )
        return [[found[row, answer] for answer in own] for row, own in enumerate(answers)]

    def reduce(self, scores: Sequence[float]) -> float:
        """pass@k from as many answers as ``samples``."""
        return pass_at_k(len(scores), round(sum(scores)), self.k)


def _note(check: Check) -> str:
    return "" if check.passed else f"{check.outcome}: {check.detail}"
