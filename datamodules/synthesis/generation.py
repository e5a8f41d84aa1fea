"""Batched generation of answers to prompts with demonstrations.

A client gets the same answers in any process and beside any other clients.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from fedlight.datamodules.synthesis.filters import CUT_OFF, PROMPT_TOO_LONG
from fedlight.evaluation.tasks.model import AnswersPrompts, HoldsTokenizer, KnowsWhatFits
from fedlight.processes.work import for_each
from fedlight.support.console import progress_bar
from fedlight.support.seeding import derive_seed
from fedlight.support.types import Fields

# An answer with this share of ``max_new_tokens`` counts as cut off; its text may give fewer tokens than were generated.
CUT_SHARE = 0.98


class Prompt(NamedTuple):
    """Prompt of a client, whose demonstrations may be dropped until it fits; ``write`` makes the text from those left."""

    client: str
    demonstrations: Sequence[Fields]
    write: Callable[[list[Fields]], str]


class Reply(NamedTuple):
    """Stripped reply to a prompt, the reason for an empty or cut-off one, and the demonstrations left in the prompt."""

    text: str
    fault: str | None
    num_demonstrations: int


@dataclass(frozen=True)
class BatchGenerator:
    """Generator of answers in batches of one client each, which several processes share.

    Settings are those of `fedlight.modules.language.generation`. With ``keep_cut`` a cut-off answer has no fault; none
    counts as cut off where the model has no ``tokenizer``.
    """

    model: AnswersPrompts
    max_new_tokens: int
    stop: Sequence[str]
    temperature: float
    top_p: float
    batch_size: int
    keep_cut: bool

    def generate(self, prompts: Sequence[Prompt], seed: int, label: str) -> list[Reply]:
        """Return an answer to each prompt; a client's draws depend on the seed, its id and its prompts."""
        fitted = self._fit(prompts)
        asked = [
            (prompt.client, text)
            for prompt, (text, _) in zip(prompts, fitted, strict=True)
            if text is not None
        ]
        texts = iter(self._generate(asked, seed, label))
        answers = []
        for prompt, number in fitted:
            text, cut = ("", False) if prompt is None else next(texts)
            fault = PROMPT_TOO_LONG if prompt is None else CUT_OFF if cut and not self.keep_cut else None
            answers.append(Reply(text, fault, number))
        return answers

    def _fit(self, prompts: Sequence[Prompt]) -> list[tuple[str | None, int]]:
        """Return each prompt's text with as many demonstrations as fit and their number; None if none fits."""
        shown = [list(prompt.demonstrations) for prompt in prompts]
        fitted: list[tuple[str | None, int]] = [(None, 0)] * len(prompts)
        pending = list(range(len(prompts)))
        while pending:
            texts = [prompts[index].write(shown[index]) for index in pending]
            fits = [True] * len(texts)
            if isinstance(self.model, KnowsWhatFits):
                fits = self.model.fits(texts, self.max_new_tokens)
            for index, text, fit in zip(pending, texts, fits, strict=True):
                if fit:
                    fitted[index] = text, len(shown[index])
                elif shown[index]:  # dropping the longest demonstration gains most room
                    shown[index].remove(max(shown[index], key=lambda row: sum(map(len, row.values()))))
            pending = [index for index in pending if fitted[index][0] is None and shown[index]]
        return fitted

    def _generate(self, prompts: list[tuple[str, str]], seed: int, label: str) -> list[tuple[str, bool]]:
        """Return the text of each answer and whether it was cut off, given client and text of each prompt."""
        # Greedy answers of a client to equal prompts are equal. The longest prompt pads its whole batch.
        distinct = list(dict.fromkeys(prompts)) if self.temperature == 0 else prompts
        by_client: dict[str, list[int]] = {}
        for index, (client, _) in enumerate(distinct):
            by_client.setdefault(client, []).append(index)
        batches: list[tuple[str, int, list[int]]] = []
        # One client in a batch: other prompts would change the last bits of the logits, and so the draws.
        for client, places in sorted(by_client.items()):
            places.sort(key=lambda index: -len(distinct[index][1]))  # little padding
            starts = range(0, len(places), self.batch_size)
            batches += [(client, at, places[at : at + self.batch_size]) for at in starts]
        with progress_bar(label, len(distinct)) as advance:

            def answer(client_batch: tuple[str, int, list[int]]) -> list[str]:
                client, at, batch = client_batch
                answers = self.model.generate(
                    [distinct[index][1] for index in batch],
                    n=1,
                    temperature=self.temperature,
                    top_p=self.top_p,
                    max_new_tokens=self.max_new_tokens,
                    seed=derive_seed(seed, client, at),
                    stop=self.stop,
                    strip=False,  # a blank is a token of its own, or a part of one
                )
                advance(len(batch))
                return [text for (text,) in answers]

            answered = chain.from_iterable(for_each(answer, batches))
        order = chain.from_iterable(batch for _, _, batch in batches)  # the order of the answers
        by_place = dict(zip(order, answered, strict=True))
        texts = [by_place[index] for index in range(len(distinct))]
        answers_and_cuts = list(zip(map(str.strip, texts), self._find_cut(texts), strict=True))
        if self.temperature > 0:  # answers to equal prompts differ
            return answers_and_cuts
        by_prompt = dict(zip(distinct, answers_and_cuts, strict=True))
        return [by_prompt[prompt] for prompt in prompts]

    def _find_cut(self, texts: list[str]) -> list[bool]:
        """Return whether each answer reached the token limit."""
        if not texts or not isinstance(self.model, HoldsTokenizer):
            return [False] * len(texts)
        ids = self.model.tokenizer(texts, add_special_tokens=False)["input_ids"]
        return [len(row) >= CUT_SHARE * self.max_new_tokens for row in ids]
