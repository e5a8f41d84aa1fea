"""Many prompts with demonstrations, of all clients at once, to a model: what fits, in what batches, what was cut off."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

from fedlight.datamodules.synthesis.filters import CUT_OFF, PROMPT_TOO_LONG
from fedlight.evaluation.tasks.model import AnswersPrompts, KnowsWhatFits
from fedlight.support.console import progress_bar
from fedlight.support.seeding import derive_seed
from fedlight.support.types import Fields

CUT_SHARE = 0.98
"""Of ``max_new_tokens``: from there on an answer counts as cut off. Its tokens are counted anew, which may be fewer."""


@runtime_checkable
class HasTokenizer(Protocol):
    """A model that tells its tokenizer, with which an answer can be seen to have been cut off."""

    tokenizer: Any


class Question(NamedTuple):
    """A prompt in the making.

    Attributes:
        shown: its demonstrations.
        write: demonstrations -> prompt.
    """

    shown: Sequence[Fields]
    write: Callable[[list[Fields]], str]


class Reply(NamedTuple):
    """What came of a question.

    Attributes:
        text: without white space around it.
        fault: why there is no whole text, if so.
        shown: how many demonstrations the prompt had in the end.
    """

    text: str
    fault: str | None
    shown: int


@dataclass(frozen=True)
class Asking:
    """How a model is asked.

    Attributes:
        model: that is asked; one without a ``tokenizer`` does not tell which of its answers were cut off.
        max_new_tokens: most tokens of an answer.
        stop: texts before which it ends.
        temperature: 0 for greedy decoding.
        top_p: share of the probability to draw from.
        batch_size: prompts at once.
        keep_cut: an answer that was cut off is an answer.
    """

    model: AnswersPrompts
    max_new_tokens: int
    stop: Sequence[str]
    temperature: float
    top_p: float
    batch_size: int
    keep_cut: bool

    def ask(self, questions: Sequence[Question], seed: int, what: str) -> list[Reply]:
        """Asks all of them.

        Args:
            questions: of all clients.
            seed: of the draws; they depend on it and on the prompts of a batch.
            what: is done, for the progress bar.
        """
        written = self._fitting(questions)
        prompts = [prompt for prompt, _ in written if prompt is not None]
        answers = iter(self._answers(prompts, seed, what))
        found = []
        for prompt, shown in written:
            text, cut = ("", False) if prompt is None else next(answers)
            fault = PROMPT_TOO_LONG if prompt is None else CUT_OFF if cut and not self.keep_cut else None
            found.append(Reply(text, fault, shown))
        return found

    def _fitting(self, questions: Sequence[Question]) -> list[tuple[str | None, int]]:
        """Each prompt with as many demonstrations as fit; None where not even one does."""
        shown = [list(question.shown) for question in questions]
        found: list[tuple[str | None, int]] = [(None, 0)] * len(questions)
        pending = list(range(len(questions)))
        while pending:
            prompts = [questions[index].write(shown[index]) for index in pending]
            for index, prompt, fit in zip(pending, prompts, self._fit(prompts), strict=True):
                if fit:
                    found[index] = prompt, len(shown[index])
                elif shown[index]:  # the longest makes most room
                    shown[index].remove(max(shown[index], key=lambda row: sum(map(len, row.values()))))
            pending = [index for index in pending if found[index][0] is None and shown[index]]
        return found

    def _fit(self, prompts: list[str]) -> list[bool]:
        if isinstance(self.model, KnowsWhatFits):
            return self.model.fits(prompts, self.max_new_tokens)
        return [True] * len(prompts)

    def _answers(self, prompts: list[str], seed: int, what: str) -> list[tuple[str, bool]]:
        """Text of each answer and whether it was cut off."""
        # Greedy answers to equal prompts are equal. A batch is as wide as its longest, so neighbours are of one length.
        asked = list(dict.fromkeys(prompts)) if self.temperature == 0 else prompts
        order = sorted(range(len(asked)), key=lambda index: -len(asked[index]))
        texts = [""] * len(asked)
        with progress_bar(what, len(order)) as advance:
            for at in range(0, len(order), self.batch_size):
                batch = order[at : at + self.batch_size]
                answers = self.model.generate(
                    [asked[index] for index in batch],
                    n=1,
                    temperature=self.temperature,
                    top_p=self.top_p,
                    max_new_tokens=self.max_new_tokens,
                    seed=derive_seed(seed, at),
                    stop=self.stop,
                    strip=True,
                )
                for index, (text,) in zip(batch, answers, strict=True):
                    texts[index] = text
                advance(len(batch))
        answered = list(zip(texts, self._cut(texts), strict=True))
        if self.temperature > 0:
            return answered
        by_prompt = dict(zip(asked, answered, strict=True))
        return [by_prompt[prompt] for prompt in prompts]

    def _cut(self, texts: list[str]) -> list[bool]:
        """Whether each answer has as many tokens as it may."""
        if not texts or not isinstance(self.model, HasTokenizer):
            return [False] * len(texts)
        ids = self.model.tokenizer(texts, add_special_tokens=False)["input_ids"]
        return [len(row) >= CUT_SHARE * self.max_new_tokens for row in ids]
