"""Batched generation of answers to prompts with demonstrations, of all clients together."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple, Protocol, runtime_checkable

from fedlight.datamodules.synthesis.filters import CUT_OFF, PROMPT_TOO_LONG
from fedlight.evaluation.tasks.model import AnswersPrompts, KnowsWhatFits
from fedlight.processes.work import for_each
from fedlight.support.console import progress_bar
from fedlight.support.seeding import derive_seed
from fedlight.support.types import Fields

# Share of ``max_new_tokens`` from which an answer counts as cut off; its text may give fewer tokens than were generated.
CUT_SHARE = 0.98


@runtime_checkable
class HasTokenizer(Protocol):
    """Model with a tokenizer, by which cut-off answers are found."""

    tokenizer: Any


class Prompt(NamedTuple):
    """Prompt whose demonstrations may be dropped until it fits.

    Attributes:
        demonstrations: rows to show.
        write: function from demonstrations to the prompt's text.
    """

    demonstrations: Sequence[Fields]
    write: Callable[[list[Fields]], str]


class Reply(NamedTuple):
    """Reply to a prompt.

    Attributes:
        text: stripped of white space.
        fault: reason for an empty or cut-off text; None without a fault.
        num_demonstrations: demonstrations left in the prompt.
    """

    text: str
    fault: str | None
    num_demonstrations: int


@dataclass(frozen=True)
class BatchGenerator:
    """Generator of answers in batches, which several processes share.

    Attributes:
        model: generating model; without a ``tokenizer``, no answer counts as cut off.
        max_new_tokens: most tokens of an answer.
        stop: texts before which an answer ends.
        temperature: 0 for greedy decoding.
        top_p: share of the probability to draw from.
        batch_size: prompts per batch.
        keep_cut: cut-off answers have no fault.
    """

    model: AnswersPrompts
    max_new_tokens: int
    stop: Sequence[str]
    temperature: float
    top_p: float
    batch_size: int
    keep_cut: bool

    def generate(self, prompts: Sequence[Prompt], seed: int, label: str) -> list[Reply]:
        """Return an answer to each prompt; draws depend on the seed and on the prompts of a batch."""
        fitted = self._fit(prompts)
        texts = iter(self._generate([text for text, _ in fitted if text is not None], seed, label))
        answers = []
        for prompt, number in fitted:
            text, cut = ("", False) if prompt is None else next(texts)
            fault = PROMPT_TOO_LONG if prompt is None else CUT_OFF if cut and not self.keep_cut else None
            answers.append(Reply(text, fault, number))
        return answers

    def _fit(self, prompts: Sequence[Prompt]) -> list[tuple[str | None, int]]:
        """Return each prompt's text with as many demonstrations as fit and their number; None if none fits."""
        shown = [list(prompt.demonstrations) for prompt in prompts]
        found: list[tuple[str | None, int]] = [(None, 0)] * len(prompts)
        pending = list(range(len(prompts)))
        while pending:
            texts = [prompts[index].write(shown[index]) for index in pending]
            fits = [True] * len(texts)
            if isinstance(self.model, KnowsWhatFits):
                fits = self.model.fits(texts, self.max_new_tokens)
            for index, text, fit in zip(pending, texts, fits, strict=True):
                if fit:
                    found[index] = text, len(shown[index])
                elif shown[index]:  # dropping the longest demonstration gains most room
                    shown[index].remove(max(shown[index], key=lambda row: sum(map(len, row.values()))))
            pending = [index for index in pending if found[index][0] is None and shown[index]]
        return found

    def _generate(self, prompts: list[str], seed: int, label: str) -> list[tuple[str, bool]]:
        """Return the text of each answer and whether it was cut off."""
        # Greedy answers to equal prompts are equal. Prompts are sorted by length, as the longest pads its whole batch.
        distinct = list(dict.fromkeys(prompts)) if self.temperature == 0 else prompts
        order = sorted(range(len(distinct)), key=lambda index: -len(distinct[index]))
        with progress_bar(label, len(order)) as advance:

            def answer(at: int) -> list[str]:
                batch = order[at : at + self.batch_size]
                answers = self.model.generate(
                    [distinct[index] for index in batch],
                    n=1,
                    temperature=self.temperature,
                    top_p=self.top_p,
                    max_new_tokens=self.max_new_tokens,
                    seed=derive_seed(seed, at),
                    stop=self.stop,
                    strip=True,
                )
                advance(len(batch))
                return [text for (text,) in answers]

            answered = chain.from_iterable(for_each(answer, range(0, len(order), self.batch_size)))
        by_place = dict(zip(order, answered, strict=True))
        texts = [by_place[index] for index in range(len(distinct))]
        answers_and_cuts = list(zip(texts, self._find_cut(texts), strict=True))
        if self.temperature > 0:
            return answers_and_cuts
        by_prompt = dict(zip(distinct, answers_and_cuts, strict=True))
        return [by_prompt[prompt] for prompt in prompts]

    def _find_cut(self, texts: list[str]) -> list[bool]:
        """Return whether each answer reached the token limit."""
        if not texts or not isinstance(self.model, HasTokenizer):
            return [False] * len(texts)
        ids = self.model.tokenizer(texts, add_special_tokens=False)["input_ids"]
        return [len(row) >= CUT_SHARE * self.max_new_tokens for row in ids]
