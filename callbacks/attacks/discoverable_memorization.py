"""Discoverable memorization: the share of true responses that a model returns when given training prompts.

Attack of Nasr et al., "Scalable Extraction of Training Data from (Production) Language Models",
https://arxiv.org/abs/2311.17035, made after each round as in Zhang et al. (FewFedPIT, https://arxiv.org/abs/2403.06131).
The attacker knows the prompts, so this is an upper bound of extractable text. The exposure of canaries is that of
Carlini et al., "The Secret Sharer", USENIX Security 2019, https://arxiv.org/abs/1802.08232.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from fedlight.callbacks.attacks.attack import (
    WRITING,
    Attack,
    Found,
    HoldsClientRows,
    render_prompts,
    without_planted,
    write_answers,
)
from fedlight.evaluation.extraction import (
    are_written,
    exposure,
    identifiers,
    recalls,
    round_robin,
)
from fedlight.evaluation.tasks.model import AnswersPrompts
from fedlight.support.checks import refuse_below
from fedlight.support.seeding import derive_seed
from fedlight.support.types import Fields


class Question(NamedTuple):
    """Prompt for the model and the true response, from a client's row or its canary (``planted``)."""

    client: str
    prompt: str
    response: str
    planted: bool


class DiscoverableMemorization(Attack):
    """Attack that has the model answer training prompts greedily and compares each answer with the true response.

    The examples come from different clients in turn, and are the same in every round; those of an upload are its client's
    own. All canaries are asked for as well, apart from them. Metrics: ``rouge_l`` is the mean ROUGE-L with the true
    responses (FewFedPIT), ``exact`` the share of answers that equal them. ``identifiers`` is the share of the numbers and
    codes of a response, apart from those of its prompt, that the answer has exactly, over the responses with any: an answer
    with a wrong number can have a high ROUGE-L. ``canaries`` is the share of planted secrets in the answers, ``exposure``
    the mean exposure of these in bits, ``left_out`` the number of prompts too long for the model.

    Args:
        examples: largest number of training examples to ask for.
        max_new_tokens: largest number of tokens in an answer.
        batch_size: prompts that are answered at once.
        matching: regular expression; only rows with a match in their prompt are asked for, such as facts that no other row
            tells. Canaries are asked for in any case. None: all rows.
        random_secrets: number of random secrets that each planted one is compared with for its exposure; 0: no exposure.
        kwargs: further arguments of `Attack`: ``every_n_rounds``, ``targets``, ...

    Raises:
        ValueError: a setting is out of range or no regular expression; in ``setup``, the module or data lack a
            needed part, or no client has a row.
    """

    name: ClassVar[str] = "discoverable_memorization"
    needs = WRITING

    def __init__(
        self,
        examples: int = 100,
        max_new_tokens: int = 128,
        batch_size: int = 32,
        random_secrets: int = 0,
        matching: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.check_at_least_one(examples=examples, max_new_tokens=max_new_tokens, batch_size=batch_size)
        refuse_below(0, "DiscoverableMemorization.", random_secrets=random_secrets)
        try:
            re.compile(matching or "")
        except re.error as error:
            raise ValueError(
                f"DiscoverableMemorization.matching={matching!r} is no regular expression: {error}"
            ) from None
        self.examples, self.max_new_tokens, self.matching = examples, max_new_tokens, matching
        self.batch_size, self.random_secrets = batch_size, random_secrets

    def check_settings(self, module: object, data: object) -> None:
        super().check_settings(module, data)
        if self.random_secrets and getattr(data, "canaries", None) is None:
            raise ValueError(
                f"DiscoverableMemorization.random_secrets={self.random_secrets} is for the exposure of canaries, but "
                f"{type(data).__name__} plants none: set data.rows.canaries, or random_secrets to 0"
            )

    def prepare(self, data: HoldsClientRows, module: Any) -> None:
        self._data, self._rows = data, self._keep_matching(data, without_planted(data))  # canaries: apart
        if not any(self._rows.values()):
            those = "" if self.matching is None else f" whose prompt has matching={self.matching!r}"
            raise ValueError(
                f"DiscoverableMemorization: no client has a row{those} besides canaries, so nothing to ask for"
            )
        canaries = getattr(data, "canaries", None)
        self._others = canaries.secrets(self.random_secrets) if canaries else []

    def attack(self, module: Any, client: str | None) -> Found:
        questions = self._questions(client)
        prompts = [question.prompt for question in questions]
        asked = self._keep_fitting(module, questions, prompts, self.max_new_tokens, client)
        answers = write_answers(
            module, [question.prompt for question in asked], self.max_new_tokens, self.batch_size
        )
        recalled = recalls(answers, [question.response for question in asked])
        records = [
            {**question._asdict(), "answer": answer, **recall}
            for question, answer, recall in zip(asked, answers, recalled, strict=True)
        ]
        for record in records:
            # Those of the prompt need no memory.
            if wanted := identifiers(record["response"], record["prompt"]):
                record["identifiers"] = float(np.mean(are_written(wanted, [record["answer"]])))
        planted = [record for record in records if record["planted"]]
        for record in planted:
            record["recovered"] = are_written([record["response"]], [record["answer"]])[0]
        # Without random secrets there are no exposures.
        for record, bits in zip(planted, self._exposures(module, planted), strict=False):
            record["exposure"] = bits
        return Found({"left_out": float(len(questions) - len(asked)), **_means(records)}, records)

    def _questions(self, client: str | None) -> list[Question]:
        """Return the training examples, and all canaries after them."""
        planted = self._data.planted
        by_client = self._rows if client is None else {client: self._rows[client]}
        rows = round_robin(by_client, self.examples, derive_seed(self.seed, self.name))  # alike in all rounds
        canaries = [(who, row) for who in sorted(planted) if client in (None, who) for row in planted[who]]
        prompts = render_prompts(self._data.template, [row for _, row in (*rows, *canaries)])
        return [
            Question(who, prompt, row["response"], at >= len(rows))  # canaries come last
            for at, ((who, row), prompt) in enumerate(zip((*rows, *canaries), prompts, strict=True))
        ]

    def _keep_matching(self, data: HoldsClientRows, rows: dict[str, list[Fields]]) -> dict[str, list[Fields]]:
        if self.matching is None:
            return rows
        pattern = re.compile(self.matching)
        return {
            client: [
                row
                for row, prompt in zip(client_rows, render_prompts(data.template, client_rows), strict=True)
                if pattern.search(prompt)
            ]
            for client, client_rows in rows.items()
        }

    def _exposures(self, module: AnswersPrompts, planted: Sequence[Mapping[str, Any]]) -> list[float]:
        """Return the exposure of each canary in bits; empty without random secrets."""
        if not self._others:
            return []
        prompts = [record["prompt"] for record in planted]
        drawn = [
            # A random secret may equal this one, which is not a rival of itself.
            [row["response"], *(text for text in self._others if text.split() != row["response"].split())]
            for row in planted
        ]
        texts = [[self._data.template.continuation(text) for text in responses] for responses in drawn]
        likelihoods = module.log_likelihoods(prompts, texts)
        return [exposure(secret.log_prob, [text.log_prob for text in rest]) for secret, *rest in likelihoods]


def _means(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the metrics over the answers; a metric without a value is left out."""
    means = {}
    for name, field, planted in (
        ("rouge_l", "rouge_l", False),
        ("exact", "exact", False),
        ("identifiers", "identifiers", False),
        ("canaries", "recovered", True),
        ("exposure", "exposure", True),
    ):
        values = [record[field] for record in records if record["planted"] == planted and field in record]
        if values:
            means[name] = float(np.mean(values))
    return means
