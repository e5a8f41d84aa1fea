"""HumanEval: 164 functions to write from their head and docstring; tests, run in the sandbox, decide.

Chen et al., "Evaluating Large Language Models Trained on Code", 2021, https://arxiv.org/abs/2107.03374. The score is pass@k
(pass@1 by default, from one greedy answer). Deviations from the authors' program: tests and function run in two processes
(`fedlight.evaluation.sandbox.check_function`), the tests use the prompt's own helpers, and processor time is limited (3 s as
there) instead of time on the clock.

A model trained on code continues the prompt and does not stop by itself. One trained on instructions answers with words, a
fenced block and the whole function. `complete_program` reads both.
"""

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from math import comb
from typing import Any

from fedlight.evaluation.sandbox import Limits, SandboxError, check_function, missing_protection
from fedlight.evaluation.tasks.result import Verdict
from fedlight.evaluation.tasks.task import Example, Prompts, Task
from fedlight.support.checks import refuse_below
from fedlight.support.types import Row

CODE_STOPS = ["\nclass ", "\ndef ", "\n#", "\nif ", "\nprint("]  # the paper's, section 2.1
INSTRUCTION = "Create a Python script for this problem:\n{prompt}"  # as WizardCoder and others ask instruction-tuned models

FENCE = re.compile(r"```[^\n`]*\n(.*?)(?:\n[ \t]*```|\Z)", re.DOTALL)
CODE = r"(?:async )?def \w+|class \w+\s*[:(]|import \w[\w., ]*$|from [\w.]+ import |@\w|[A-Z_]+ = |"
CODE += r"\w+ = (?:lambda\b|[\[({\"']|\S+$)"  # other constants
CODE_BEGINS = re.compile(CODE)  # but not a sentence that begins with such a word
CODE_CONTINUES = re.compile(CODE + r"|#|[)\]}]")  # not indented: also comments and closing brackets
INDENTATION = "    "


class HumanEval(Task):
    """Task of functions to be completed.

    Args:
        data: rows with ``prompt``, ``test``, ``entry_point``; the template has the slot ``instruction`` (an empty ``input``
            is given as well): ``"{instruction}"`` for models that continue code, the training's template for tuned ones.
        instruction: an instruction with ``{prompt}``; None: the prompt itself, to be continued, and generation stops at the
            next definition. An answer may be the rest of the function or all of it either way.
        k: samples of pass@k, at most ``samples``.
        processes: problems that are tested at the same time, by two processes each, each with the memory of ``limits``.
        unprotected: run the code without a sandbox; see `fedlight.evaluation.sandbox.run_python`.
        limits: of each process.
        limit, batch_size, max_new_tokens, samples, temperature, top_p, stop, seed: see
            `Task`. There are no shots.

    Raises:
        ValueError: a setting is out of range.
        SandboxError: this machine cannot sandbox a process.
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
        if instruction is None and options.get("stop") is None:
            options["stop"] = list(CODE_STOPS)
        super().__init__(data, **options)
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
                f"HumanEval runs code of the model, and {missing}: run it elsewhere, or set unprotected to true where "
                "nothing can be lost, in a container for example"
            )
        self.instruction = "{prompt}" if instruction is None else instruction
        self.k, self.processes, self.unprotected, self.limits = k, processes, unprotected, limits or Limits()

    def example(self, row: Row) -> Example:
        """Return the problem as an instruction, with the name of the function as the target."""
        if empty := [name for name in self.names if not row[name]]:
            raise ValueError(f"{', '.join(empty)}: empty")
        # Else no answer could pass.
        for column, name in (("prompt", row["entry_point"]), ("test", "check")):
            if not _defines(str(row[column]), str(name)):
                raise ValueError(
                    f"{column} does not define {name}: map columns to rows in the form of HumanEval"
                )
        asked = self.instruction.replace("{prompt}", row["prompt"])  # code is full of braces
        return Example({"instruction": asked, "input": ""}, row["entry_point"], extra=row)

    def score(self, example: Example, answer: str) -> Verdict:
        """Score 1 for a function that passes its tests."""
        prompt, name = example.extra["prompt"], example.target
        program = complete_program(prompt, answer, name)
        tests = f"{example.extra['test']}\ncheck({name})"
        check = check_function(program, name, tests, stub(prompt), self.limits, self.unprotected)
        note = "" if check.passed else f"{check.outcome}: {check.detail}"
        return Verdict(float(check.passed), program if answer.strip() else None, note)

    def judge(self, examples: Sequence[Example], answers: Sequence[Sequence[str]]) -> list[list[Verdict]]:
        """Return verdicts; several problems are tested at a time, and equal answers to a problem once."""
        pairs = [(row, answer) for row, written in enumerate(answers) for answer in dict.fromkeys(written)]
        # Threads suffice: each waits for its two processes.
        with ThreadPoolExecutor(self.processes) as pool:
            verdicts = dict(
                zip(pairs, pool.map(lambda pair: self.score(examples[pair[0]], pair[1]), pairs), strict=True)
            )
        return [[verdicts[row, answer] for answer in written] for row, written in enumerate(answers)]

    def reduce(self, scores: Sequence[float]) -> float:
        """Return pass@k, estimated from ``samples`` answers."""
        return pass_at_k(len(scores), round(sum(scores)), self.k)


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Return the unbiased estimate for one problem, in [0, 1]; its mean over problems is the score.

    Chen et al. 2021, eq. 1: pass@k = 1 - C(n - c, k) / C(n, k), the probability that k of n samples, c of them right,
    include a right one.
    """
    return 1.0 - comb(samples - correct, k) / comb(samples, k)


def complete_program(prompt: str, answer: str, function: str) -> str:
    r"""Return the prompt's function, completed by an answer; the prompt ends with its head, with or without a docstring.

    Examples:
        >>> prompt = "def double(x):\n    'Twice x.'\n"
        >>> print(complete_program(prompt, "    return 2 * x\n\nprint(double(3))", "double"))
        def double(x):
            'Twice x.'
            return 2 * x
        <BLANKLINE>
    """
    # No parser reads the answer: the text is not trusted, and deep nesting can crash a parser.
    code = _extract_block(answer, function)
    if _defines(code, function):
        return f"{stub(prompt)}\n{_extract_function(code, function, fenced=code != answer)}"
    gap = "" if prompt.endswith("\n") or code[:1] == "\n" else "\n"
    return f"{prompt}{gap}{_extract_body(code)}"


def stub(prompt: str) -> str:
    """Return the prompt as a program: its imports, its helpers, and the function with an empty body."""
    return f"{prompt}\n{INDENTATION}pass\n"


def _defines(code: str, function: str) -> bool:
    name = re.escape(function)
    return re.search(rf"^[ \t]*(?:(?:async )?def {name}\b|{name} = lambda\b)", code, re.MULTILINE) is not None


def _extract_block(answer: str, function: str) -> str:
    """Return the first fenced block with the function, else the first block, else the answer as it is."""
    blocks = [fence.group(1) for fence in FENCE.finditer(answer)]
    return next((block for block in blocks if _defines(block, function)), blocks[0] if blocks else answer)


def _extract_function(code: str, function: str, fenced: bool) -> str:
    """Return the code from its first line, in a fenced block that of the block, up to the words after the function."""
    lines = code.expandtabs(4).splitlines()
    begins = re.compile(r"\S") if fenced else CODE_BEGINS
    begin = next(number for number, line in enumerate(lines) if begins.match(line.lstrip()))
    definition = next(number for number, line in enumerate(lines) if _defines(line, function))
    margin = len(lines[begin]) - len(lines[begin].lstrip())  # the whole block may be indented
    lines = [line[margin:] if not line[:margin].strip() else line for line in lines]
    kept = lines[begin : definition + 1]
    for line in lines[definition + 1 :]:
        if line[:1].strip() and not CODE_CONTINUES.match(line):  # words after the code
            break
        kept.append(line)
    return "\n".join(kept)


def _extract_body(code: str) -> str:
    lines = code.expandtabs(4).splitlines()
    while lines and not lines[0].strip():
        lines.pop(0)
    if lines and not lines[0][0].isspace():
        lines = _indent(lines)
    end = next((number for number, line in enumerate(lines) if line[:1].strip()), len(lines))
    return "\n".join(lines[:end]) + "\n"


def _indent(lines: list[str]) -> list[str]:
    """Indent a body whose first line is not indented: that line alone lost its blanks, or the whole body has none.

    Examples:
        >>> _indent(["n = 0", "    return n"]), _indent(["n = 0", "return n"])
        (['    n = 0', '    return n'], ['    n = 0', '    return n'])
        >>> _indent(["for x in y:", "        pass"]), _indent(["for x in y:", "    pass"])
        (['    for x in y:', '        pass'], ['    for x in y:', '        pass'])
    """
    depths = [len(line) - len(line.lstrip()) for line in lines[1:] if line.strip()]
    following, least = next(iter(depths), 0), min((depth for depth in depths if depth), default=0)
    deeper = lines[0].rstrip().endswith((":", ",", "(", "[", "{"))  # then the next line is indented anyway
    if following == 0 or (deeper and following == least < 8):
        return [INDENTATION + line for line in lines]
    return [(INDENTATION if deeper else " " * least) + lines[0], *lines[1:]]
