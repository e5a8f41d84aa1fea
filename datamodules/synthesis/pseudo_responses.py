"""FewFedWeight's pseudo-labelled data: the global model's answers to a client's own prompts, weighted by their energy.

Dong et al., "FewFedWeight: Few-shot Federated Learning Framework across Multiple NLP Tasks", 2022,
https://arxiv.org/abs/2212.08354. From its abstract: the global model produces pseudo data for each client, an energy-based
weight lets noisy ones count less, and clients train on their own and on the pseudo data together.

**The weights are ours.** The paper's equations were not at hand; these choices stand in their place.

A pseudo example is one of the client's own prompts with the greedy answer of the global model, each distinct prompt once;
answers that are empty or had to be cut off are dropped.
Its energy is the mean over the answer's tokens of the free energy ``-T log sum exp(logits / T)`` (Liu et al., NeurIPS 2020,
https://arxiv.org/abs/2010.03759) by the same model. A density is proportional to ``exp(-energy / T)``, so the weight is
``exp((lowest - energy) / T)`` over the client's pseudo examples, in (0, 1]: the most familiar one counts like an own one,
and two that are equally familiar count alike.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from fedlight.datamodules.synthesis.asking import Asking, Question
from fedlight.datamodules.synthesis.filters import EMPTY
from fedlight.datamodules.synthesis.synthesis import SURVIVED, TRIED, Candidate, Synthesis
from fedlight.datamodules.text.templates import Template
from fedlight.evaluation.tasks.model import AnswersPrompts
from fedlight.support.checks import refuse_below
from fedlight.support.seeding import derive_seed
from fedlight.support.types import Fields


@runtime_checkable
class KnowsEnergies(Protocol):
    """A module that can say how familiar an answer is to it."""

    def free_energies(
        self, prompts: Sequence[str], answers: Sequence[str], temperature: float
    ) -> list[float]:
        """Mean free energy of each answer's tokens behind its prompt."""


class PseudoResponses(Synthesis):
    """A client's own prompts, answered by the model; in YAML ``synthesis: {class_path: PseudoResponses}``.

    Args:
        max_response_tokens: most tokens of an answer, >= 1; longer ones are dropped.
        energy_temperature: T of energies and weights, above 0; the lower, the less an unfamiliar answer counts.
        batch_size: prompts at once.

    Raises:
        ValueError: a setting is out of range.
    """

    chooses = False
    without_effect = ("batch_size",)

    def __init__(
        self, max_response_tokens: int = 256, energy_temperature: float = 1.0, batch_size: int = 16
    ) -> None:
        super().__init__()
        refuse_below(1, max_response_tokens=max_response_tokens, batch_size=batch_size)
        if not 0 < energy_temperature < float("inf"):
            raise ValueError(f"energy_temperature={energy_temperature} must be above 0, for example 1")
        self.max_response_tokens, self.energy_temperature = max_response_tokens, energy_temperature
        self.batch_size = batch_size

    def make(
        self, clients: Mapping[str, Sequence[Fields]], template: Template, model: AnswersPrompts, seed: int
    ) -> dict[str, list[Candidate]]:
        """See `Synthesis.make`.

        Raises:
            TypeError: the model cannot say how familiar an answer is to it.
        """
        if not isinstance(model, KnowsEnergies):
            raise TypeError(
                f"{type(model).__name__} has no free_energies: PseudoResponses weights answers by them; train an SFTModule"
            )
        self.counts, self.notes = Counter(), Counter()
        asked = [(client, fields) for client, rows in clients.items() for fields in _distinct(rows, template)]
        asking = Asking(
            model,
            self.max_response_tokens,
            stop=(),
            temperature=0.0,
            top_p=1.0,
            batch_size=self.batch_size,
            keep_cut=False,
        )
        questions = [_question(template.render(fields).text) for _, fields in asked]
        answers = asking.ask(questions, derive_seed(seed, "pseudo responses"), "Pseudo responses")
        made: dict[str, list[dict[str, str]]] = {client: [] for client in clients}
        for (client, fields), answer in zip(asked, answers, strict=True):
            fault = answer.fault or (None if answer.text else EMPTY)
            self.counts.update([TRIED, fault or SURVIVED])
            if fault is None:
                made[client].append({**fields, "response": answer.text})
        return {client: self._weighted(rows, template, model) for client, rows in made.items()}

    def _weighted(
        self, rows: list[dict[str, str]], template: Template, model: KnowsEnergies
    ) -> list[Candidate]:
        blank = "" if template.text[-1:].isspace() else " "
        prompts = [template.render(row).text for row in rows]
        answers = [blank + row["response"] for row in rows]
        energies = model.free_energies(prompts, answers, self.energy_temperature)
        weights = energy_weights(energies, self.energy_temperature)
        return [Candidate(row, weight) for row, weight in zip(rows, weights, strict=True)]


def energy_weights(energies: Sequence[float], temperature: float) -> list[float]:
    """Weights of one client's pseudo examples in (0, 1]: ``exp((lowest - energy) / T)``.

    Args:
        energies: of all of them.
        temperature: T, above 0.

    Example:
        >>> [round(weight, 3) for weight in energy_weights([-8.0, -6.0, -7.5], temperature=1.0)]
        [1.0, 0.135, 0.607]
        >>> energy_weights([-8.0], temperature=1.0), energy_weights([], temperature=1.0)
        ([1.0], [])
    """
    lowest = min(energies, default=0.0)
    return [math.exp((lowest - energy) / temperature) for energy in energies]


def _distinct(rows: Sequence[Fields], template: Template) -> list[dict[str, str]]:
    """The slots of rows that ask something different, each once."""
    asked = {tuple(row[slot] for slot in template.slots): None for row in rows}
    return [dict(zip(template.slots, texts, strict=True)) for texts in asked]


def _question(prompt: str) -> Question:
    """The prompt as it is, without demonstrations."""
    return Question((), lambda _: prompt)
