"""A task: rows become prompts, a model answers them, each answer is scored.

A task knows its own format: which prompt a row makes, and what a right answer is. Where the rows are and in which
template the prompts stand is the business of a ``Prompts`` object, such as
:class:`fedlight.datamodules.rows.task_rows.TaskRows`;
give it the template of the training, else another format is measured than was learnt. With few-shot examples the prompt
is that of each example with its answer, one after the other, a blank line between two.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from statistics import fmean
from typing import Any, NamedTuple, Protocol

import numpy as np

from fedlight.evaluation.tasks.model import AnswersPrompts, KnowsWhatFits
from fedlight.evaluation.tasks.result import TOO_LONG, Outcome, Result, Verdict
from fedlight.support.checks import refuse_below
from fedlight.support.seeding import derive_seed
from fedlight.support.types import Fields, Row


class Prompts(Protocol):
    """Where rows come from and how a prompt looks."""

    def rows(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """The values of these names in each row."""

    def prompt(self, fields: Mapping[str, str]) -> str:
        """The template, filled with texts by slot."""


class Example(NamedTuple):
    """What a row is to a task.

    Attributes:
        fields: texts for the template's slots.
        target: the right answer.
        response: what follows the prompt where the row is shown as an example; "" for the target itself.
        group: subject, domain or the like, whose score is given by itself.
        choices: the answers there are; none where the answer is free.
        extra: what else scoring needs.
    """

    fields: Fields
    target: str
    response: str = ""
    group: str = ""
    choices: tuple[str, ...] = ()
    extra: Mapping[str, Any] = {}

    @property
    def shown(self) -> str:
        """The answer as an example shows it."""
        return self.response or self.target


Ready = tuple[list[int], list[Example], list[str]]


class Task(ABC):
    """Rows, prompts, answers, scores. A subclass says what an example is and what an answer to it is worth.

    Args:
        data: where the rows are and how prompts look.
        shots: where few-shot examples are, other rows than those of ``data``; they are shown in the template of ``data``.
        num_shots: examples in front of every question; see :meth:`choose_shots`.
        limit: at most so many rows, drawn by ``seed`` and kept in order; None: all.
        batch_size: prompts that are answered at once.
        max_new_tokens: most tokens of an answer; None: the task's own ``answer_tokens``.
        samples: answers to each prompt; above 1 they have to be drawn.
        temperature: of the draws; 0 is greedy.
        top_p: share of the probability to draw from, in (0, 1].
        stop: texts at which an answer ends; None: the task's own ``stops``.
        seed: of the limit, the shots and the draws.

    Raises:
        ValueError: a setting is out of range, or two do not go together.
    """

    names: tuple[str, ...] = ("instruction", "input", "response")
    """What is read of each row."""

    answer_tokens: int = 64
    stops: tuple[str, ...] = ()

    def __init__(
        self,
        data: Prompts,
        shots: Prompts | None = None,
        num_shots: int = 0,
        limit: int | None = None,
        batch_size: int = 16,
        max_new_tokens: int | None = None,
        samples: int = 1,
        temperature: float = 0.0,
        top_p: float = 1.0,
        stop: list[str] | None = None,
        seed: int = 0,
    ) -> None:
        name = type(self).__name__
        refuse_below(1, f"{name}.", limit=limit, batch_size=batch_size, samples=samples)
        if num_shots < 0 or (num_shots > 0 and shots is None):
            raise ValueError(
                f"{name}.num_shots={num_shots}: set shots to where the examples are, or num_shots to 0"
            )
        if samples > 1 and temperature == 0:
            raise ValueError(
                f"{name}.samples={samples} greedy answers are all the same: set temperature above 0"
            )
        self.data, self.shots, self.num_shots, self.limit = data, shots, num_shots, limit
        self.batch_size, self.samples, self.temperature, self.top_p = batch_size, samples, temperature, top_p
        self.max_new_tokens = self.answer_tokens if max_new_tokens is None else max_new_tokens
        self._ready: Ready | None = None
        self.stop, self.seed = list(self.stops) if stop is None else list(stop), seed

    @abstractmethod
    def example(self, row: Row) -> Example:
        """What a row, with the task's ``names``, asks and what its right answer is.

        Raises:
            ValueError: the row is not one of this task.
        """

    @abstractmethod
    def score(self, example: Example, answer: str) -> Verdict:
        """What an answer is worth."""

    def judge(self, examples: Sequence[Example], answers: Sequence[Sequence[str]]) -> list[list[Verdict]]:
        """A verdict on each answer to each example; a task with slow scoring may do several at once."""
        return [
            [self.score(example, one) for one in own] for example, own in zip(examples, answers, strict=True)
        ]

    def reduce(self, scores: Sequence[float]) -> float:
        """The score of a row from those of its answers: their mean."""
        return fmean(scores)

    def answer(
        self, model: AnswersPrompts, prompts: Sequence[str], examples: Sequence[Example]
    ) -> list[list[str]]:
        """The model's answers to a batch of prompts, as many as ``samples`` to each, with white space as it wrote it."""
        return model.generate(
            prompts,
            self.samples,
            self.temperature,
            self.top_p,
            self.max_new_tokens,
            derive_seed(self.seed, "task", *prompts),
            stop=self.stop,
            strip=False,
        )

    def new_tokens(self, examples: Sequence[Example]) -> int:
        """Most tokens that come behind a prompt."""
        return self.max_new_tokens

    def choose_shots(self, example: Example, pool: Sequence[Example]) -> Sequence[Example]:
        """The examples to show in front of a question: the first ones of its group where the pool has the group.

        The question itself is never among them, should it be in the pool.
        """
        own = [shot for shot in pool if shot.group == example.group] or pool
        others = list(islice((shot for shot in own if shot.fields != example.fields), self.num_shots))
        if len(others) < self.num_shots:
            raise ValueError(
                f"num_shots={self.num_shots}, but shots has only {len(others)} other rows for {example.group!r}"
            )
        return others

    def read(self) -> Ready:
        """The rows to answer: their numbers in the source, what they ask, and their prompts. Reads once.

        Raises:
            ValueError: a row is not one of this task, or there are too few shots.
        """
        if self._ready is None:
            self._ready = self._read()
        return self._ready

    def run(self, model: AnswersPrompts, say: Callable[[int, int], None] | None = None) -> Result:
        """Has a model answer all rows and scores what it says.

        Args:
            model: see :class:`AnswersPrompts`.
            say: is told after each batch how many prompts are answered, and how many there are.
        """
        index, examples, prompts = self.read()
        fits = [True] * len(prompts)
        if isinstance(model, KnowsWhatFits):
            fits = model.fits(prompts, self.new_tokens(examples))
        answers: list[list[str]] = [[] for _ in prompts]
        # Little padding, and what takes the most memory first.
        order = sorted(np.flatnonzero(fits).tolist(), key=lambda row: -len(prompts[row]))
        for start in range(0, len(order), self.batch_size):
            batch = order[start : start + self.batch_size]
            given = self.answer(model, [prompts[row] for row in batch], [examples[row] for row in batch])
            for row, texts in zip(batch, given, strict=True):
                answers[row] = texts
            if say is not None:
                say(start + len(batch), len(order))
        return Result(self._outcomes(index, examples, prompts, answers, fits))

    def _outcomes(
        self,
        index: Sequence[int],
        examples: Sequence[Example],
        prompts: Sequence[str],
        answers: Sequence[list[str]],
        fits: Sequence[bool],
    ) -> list[Outcome]:
        """What was not asked, as it does not fit into the model, counts as wrong."""
        asked = [row for row, is_asked in enumerate(fits) if is_asked]
        judged = self.judge([examples[row] for row in asked], [answers[row] for row in asked])
        verdicts = [[Verdict(0.0, None, TOO_LONG)] for _ in prompts]
        for row, found in zip(asked, judged, strict=True):
            verdicts[row] = found
        return [
            Outcome(
                index[row],
                prompts[row],
                example.target,
                example.group,
                answers[row],
                verdicts[row],
                self.reduce([verdict.score for verdict in verdicts[row]]) if fits[row] else 0.0,
                example.fields,
            )
            for row, example in enumerate(examples)
        ]

    def _read(self) -> Ready:
        examples = self._examples(self.data, "data")
        index = list(range(len(examples)))
        if self.limit is not None and self.limit < len(index):
            stream = np.random.default_rng(derive_seed(self.seed, "limit"))
            index = sorted(stream.choice(len(index), self.limit, replace=False).tolist())
        pool = self._examples(self.shots, "shots") if self.shots is not None and self.num_shots else []
        chosen = [examples[row] for row in index]
        return index, chosen, [self._prompt(example, pool) for example in chosen]

    def _examples(self, data: Prompts, setting: str) -> list[Example]:
        examples = []
        for number, row in enumerate(data.rows(self.names)):
            try:
                examples.append(self.example(row))
            except ValueError as error:
                raise ValueError(f"{type(self).__name__}.{setting}, row {number}: {error}") from None
        return examples

    def _prompt(self, example: Example, pool: Sequence[Example]) -> str:
        shots = self.choose_shots(example, pool)
        asked = [self.data.prompt(shot.fields) for shot in shots]
        shown = [prompt + continuation(prompt, shot.shown) for prompt, shot in zip(asked, shots, strict=True)]
        return "\n\n".join([*shown, self.data.prompt(example.fields)])


def continuation(prompt: str, response: str) -> str:
    r"""Return a response as it follows its prompt in training, with a blank between the two.

    Example:
        >>> continuation("Answer:", "B"), continuation("Answer:\n", "B")
        (' B', 'B')
    """
    return response if prompt[-1:].isspace() else f" {response}"
