"""Base of the tasks: rows become prompts, a model answers them, each answer is scored.

A task knows its format: the prompt of a row, and the right answer. The rows and the template of the prompts come from a
``Prompts`` object, such as `fedlight.datamodules.rows.task_rows.TaskRows`. Give it the template of the training,
or the task measures another format than the model has learned. A few-shot prompt consists of each example with its
answer and of the question, separated by blank lines, or as turns of a chat.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, islice
from statistics import fmean
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from fedlight.evaluation.tasks.model import AnswersPrompts, HoldsTokenizer, KnowsWhatFits
from fedlight.evaluation.tasks.result import TOO_LONG, Outcome, Result, Verdict
from fedlight.support.checks import Checked, check_range, refuse_below
from fedlight.support.seeding import derive_seed
from fedlight.support.types import Fields, Row

Normalization = Literal["sum", "tokens", "bytes"]


class Prompts(Protocol):
    """Source of rows and prompts."""

    def rows(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """Return the values of these columns in each row."""

    def for_tokenizer(self, tokenizer: Any) -> None:
        """Learn the model's tokenizer; prompts may be written with its chat template."""

    def prompt(self, fields: Fields, shots: Sequence[tuple[Fields, str]] = ()) -> str:
        """Return the template filled with texts by slot, after examples with their answers."""

    def continuation(self, response: str, closed: bool = False) -> str:
        """Return an answer as it follows its prompt, with ``closed`` up to the end token of a chat template."""


class Example(NamedTuple):
    """Row in the form of its task."""

    fields: Fields  # texts for the template's slots
    target: str  # the right answer
    response: str = ""  # text after the prompt where the row is shown as an example; "" for the target
    group: str = ""  # subject, domain or the like, whose score is reported separately
    choices: tuple[str, ...] = ()  # all possible answers; empty for free answers
    extra: Mapping[str, Any] = {}  # other values that scoring needs

    @property
    def shown(self) -> str:
        """Answer of a shown example."""
        return self.response or self.target


Ready = tuple[list[int], list[Example], list[str]]


class Task(Checked, ABC):
    """Base class of tasks: a subclass defines the example of a row and the score of an answer.

    Args:
        data: source of rows and prompts.
        shots: source of few-shot examples, other rows than those of ``data``; shown in the template of ``data``.
        num_shots: number of examples before every question; see `choose_shots`.
        limit: largest number of rows, drawn by ``seed`` and kept in order; None: all.
        batch_size: prompts that are answered at once.
        max_new_tokens: largest number of tokens in an answer; None: the task's own ``answer_tokens``. With 0 nothing is
            written, and only the likeliest choice counts.
        samples: answers to each prompt; more than one requires a temperature.
        temperature: of the answers; 0 is greedy.
        top_p: share of the probability to draw from, in (0, 1].
        stop: texts that end an answer, besides those of the template; None: the task's own ``stops``.
        seed: of the limit and the answers.

    Attributes:
        names: columns that are read from each row.

    Raises:
        ValueError: a setting is out of range, or two contradict each other.
    """

    names: tuple[str, ...] = ("instruction", "input", "response")

    answer_tokens: int = 64
    stops: tuple[str, ...] = ()
    by_likelihood: bool = False
    """Whether the likeliest choice decides the score, not the one that the model writes."""
    normalize: Normalization = "sum"

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
        refuse_below(0 if self.by_likelihood else 1, f"{name}.", max_new_tokens=max_new_tokens)
        if num_shots < 0 or (num_shots > 0 and shots is None):
            raise ValueError(
                f"{name}.num_shots={num_shots}: set shots to the source of the examples, or num_shots to 0"
            )
        check_range(f"{name}.temperature", temperature, 0, float("inf"))
        check_range(f"{name}.top_p", top_p, 0, 1, above_low=True)
        if samples > 1 and temperature == 0:
            raise ValueError(
                f"{name}.samples={samples} greedy answers are all equal: set temperature above 0"
            )
        self.data, self.shots, self.num_shots, self.limit = data, shots, num_shots, limit
        self.batch_size, self.samples, self.temperature, self.top_p = batch_size, samples, temperature, top_p
        self.max_new_tokens = self.answer_tokens if max_new_tokens is None else max_new_tokens
        self._ready: Ready | None = None
        self._form: str | None = None
        self.stop, self.seed = list(self.stops) if stop is None else list(stop), seed
        # The next question of the source would begin with these; a run-on is never wanted.
        self.stop += getattr(data, "stops", ())
        if not all(self.stop):
            raise ValueError(f"{name}.stop={self.stop}: an empty text would end every answer at once")

    @abstractmethod
    def example(self, row: Row) -> Example:
        """Return the question and the right answer of a row, which has the task's ``names``.

        Raises:
            ValueError: the row does not belong to this task.
        """

    @abstractmethod
    def score(self, example: Example, answer: str) -> Verdict:
        """Return the score of an answer."""

    def judge(self, examples: Sequence[Example], answers: Sequence[Sequence[str]]) -> list[list[Verdict]]:
        """Return a verdict on each answer to each example; a task with slow scoring may score several at once."""
        return [
            [self.score(example, answer) for answer in written]
            for example, written in zip(examples, answers, strict=True)
        ]

    def reduce(self, scores: Sequence[float]) -> float:
        """Return the score of a row from the scores of its answers: their mean."""
        return fmean(scores)

    def answer(
        self, model: AnswersPrompts, prompts: Sequence[str], examples: Sequence[Example]
    ) -> list[list[str]]:
        """Return ``samples`` answers to each prompt of a batch, with white space, and then the likeliest choice, if any."""
        written: list[list[str]] = [[] for _ in prompts]
        if self.max_new_tokens:
            written = model.generate(
                prompts,
                n=self.samples,
                temperature=self.temperature,
                top_p=self.top_p,
                max_new_tokens=self.max_new_tokens,
                seed=derive_seed(
                    self.seed, "task", *prompts
                ),  # the same in whichever process answers the batch
                stop=self.stop,
                strip=False,  # the first line of a function's body needs its blanks
            )
        choices = [example.choices for example in examples]
        if not all(choices):
            return written
        best = self._likeliest(model, prompts, choices)
        return [[*texts, choice] for texts, choice in zip(written, best, strict=True)]

    def _likeliest(
        self, model: AnswersPrompts, prompts: Sequence[str], choices: Sequence[Sequence[str]]
    ) -> list[str]:
        """Return the likeliest of its choices after each prompt; "" where the model gives NaN for one."""
        texts = [[self.data.continuation(choice) for choice in of_prompt] for of_prompt in choices]
        best = []
        for of_prompt, likelihoods in zip(choices, model.log_likelihoods(prompts, texts), strict=True):
            lengths = {
                "sum": [1] * len(of_prompt),
                "tokens": [text.tokens for text in likelihoods],
                "bytes": [len(text.encode()) for text in of_prompt],
            }[self.normalize]
            scores = [text.log_prob / length for text, length in zip(likelihoods, lengths, strict=True)]
            best.append("" if np.isnan(scores).any() else of_prompt[scores.index(max(scores))])
        return best

    def new_tokens(self, examples: Sequence[Example]) -> int:
        """Return the largest number of tokens that follow a prompt."""
        return self.max_new_tokens

    def choose_shots(self, example: Example, pool: Sequence[Example]) -> Sequence[Example]:
        """Return the examples to show before a question, without it: the first of its group if the pool has any."""
        candidates = [shot for shot in pool if shot.group == example.group] or pool
        # The pool may have the question itself.
        others = list(islice((shot for shot in candidates if shot.fields != example.fields), self.num_shots))
        if len(others) < self.num_shots:
            raise ValueError(
                f"num_shots={self.num_shots}, but shots has only {len(others)} other rows for {example.group!r}"
            )
        return others

    def read(self, holder: object = None) -> Ready:
        """Return the rows to answer: their indices in the source, their examples, and their prompts.

        Reads once for each chat template.

        Args:
            holder: module or data with the model's tokenizer, which prompts in its chat template need.

        Raises:
            ValueError: a row does not belong to this task, or there are too few shots.
        """
        tokenizer = holder.tokenizer if isinstance(holder, HoldsTokenizer) else None
        form = self._form if tokenizer is None else getattr(tokenizer, "chat_template", None)
        if self._ready is None or form != self._form:
            if tokenizer is not None:
                self.data.for_tokenizer(tokenizer)
            self._ready, self._form = self._read(), form
        return self._ready

    def run(
        self,
        model: AnswersPrompts,
        report: Callable[[int, int], None] | None = None,
        for_each: Callable[..., Iterable[Any]] = map,
    ) -> Result:
        """Have a model answer all rows and score its answers.

        Args:
            model: see `AnswersPrompts`.
            report: called after each batch with the number of answered prompts and that of all prompts.
            for_each: function that answers the batches, such as `fedlight.processes.work.for_each`, which shares them.
        """
        index, examples, prompts = self.read(model)
        fits = [True] * len(prompts)
        if isinstance(model, KnowsWhatFits):
            fits = model.fits(prompts, self.new_tokens(examples))
        answers: list[list[str]] = [[] for _ in prompts]
        # By length: little padding, and the batch that needs the most memory comes first.
        order = sorted(np.flatnonzero(fits).tolist(), key=lambda row: -len(prompts[row]))

        def answer(start: int) -> list[list[str]]:
            batch = order[start : start + self.batch_size]
            given = self.answer(model, [prompts[row] for row in batch], [examples[row] for row in batch])
            if report is not None:
                report(start + len(batch), len(order))
            return given

        given = for_each(answer, range(0, len(order), self.batch_size))
        for row, texts in zip(order, chain.from_iterable(given), strict=True):
            answers[row] = texts
        outcomes = self._outcomes(index, examples, prompts, answers, fits)
        return Result(outcomes, choices=all(example.choices for example in examples))

    def _outcomes(
        self,
        index: Sequence[int],
        examples: Sequence[Example],
        prompts: Sequence[str],
        answers: Sequence[list[str]],
        fits: Sequence[bool],
    ) -> list[Outcome]:
        """Return the outcomes; a row whose prompt does not fit into the model counts as wrong."""
        asked = [row for row, is_asked in enumerate(fits) if is_asked]
        judged = self.judge([examples[row] for row in asked], [answers[row] for row in asked])
        # As for a row with answers: one on each written one, one on the likeliest choice.
        written = self.samples if self.max_new_tokens else 0
        verdicts = [
            [Verdict(0.0, None, TOO_LONG)] * (written + bool(example.choices)) for example in examples
        ]
        for row, row_verdicts in zip(asked, judged, strict=True):
            verdicts[row] = row_verdicts
        return [
            Outcome(
                index[row],
                prompts[row],
                example.target,
                example.group,
                answers[row],
                verdicts[row],
                self._score_row(example, verdicts[row]) if fits[row] else 0.0,
                example.fields,
            )
            for row, example in enumerate(examples)
        ]

    def _score_row(self, example: Example, verdicts: Sequence[Verdict]) -> float:
        if example.choices:
            verdicts = verdicts[-1:] if self.by_likelihood else verdicts[:-1]
        return self.reduce([verdict.score for verdict in verdicts])

    def _read(self) -> Ready:
        examples = self._examples(self.data, "data")
        index = list(range(len(examples)))
        if self.limit is not None and self.limit < len(index):
            stream = np.random.default_rng(derive_seed(self.seed, "limit"))
            index = sorted(stream.choice(len(index), self.limit, replace=False).tolist())
        pool = self._examples(self.shots, "shots") if self.shots is not None and self.num_shots else []
        chosen = [examples[row] for row in index]
        prompts = [self._prompt(example, pool) for example in chosen]
        if "" in prompts:  # a model has nothing to go on from, which would be told after hours of training
            raise ValueError(
                f"{type(self).__name__}.data, row {index[prompts.index('')]}: the prompt is empty: leave the row out"
            )
        return index, chosen, prompts

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
        return self.data.prompt(example.fields, [(shot.fields, shot.shown) for shot in shots])


def continuation(prompt: str, response: str) -> str:
    r"""Return a response as it follows its prompt in training, after a blank unless the prompt ends in white space."""
    return response if prompt[-1:].isspace() else f" {response}"
