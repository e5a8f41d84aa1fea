"""FewFedWeight's pseudo-labelled data: the global model's answers to a client's own prompts, weighted by their energy.

Dong et al., "FewFedWeight: Few-shot Federated Learning Framework across Multiple NLP Tasks", 2022,
https://arxiv.org/abs/2212.08354. From its abstract: the global model produces pseudo data for each client, an energy-based
weight reduces the effect of noisy ones, and clients train on their own and on the pseudo data together.

**The weights are ours**: the paper's equations were not available.

A pseudo example is one of the client's own prompts with the greedy answer of the global model, each distinct prompt once;
empty and cut-off answers are dropped. Its energy is the mean over the answer's tokens of the free energy
``-T log sum exp(logits / T)`` (Liu et al., NeurIPS 2020, https://arxiv.org/abs/2010.03759) by the same model. A density is
proportional to ``exp(-energy / T)``, so the weight is ``exp((lowest - energy) / T)`` over the client's pseudo examples, in
(0, 1]: the pseudo example of the lowest energy counts like an own one, and equal energies count alike.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from fedlight.datamodules.synthesis.filters import EMPTY
from fedlight.datamodules.synthesis.generation import BatchGenerator, Prompt
from fedlight.datamodules.synthesis.synthesis import SURVIVED, TRIED, Candidate, Dropped, Synthesis
from fedlight.datamodules.text.templates import Template
from fedlight.evaluation.tasks.model import AnswersPrompts
from fedlight.processes.work import for_each
from fedlight.support.checks import refuse_below
from fedlight.support.seeding import derive_seed
from fedlight.support.types import Fields


@runtime_checkable
class KnowsEnergies(Protocol):
    """Module that computes free energies of answers."""

    def free_energies(
        self, prompts: Sequence[str], answers: Sequence[str], temperature: float
    ) -> list[float]:
        """Return the mean free energy of each answer's tokens after its prompt."""


class PseudoResponses(Synthesis):
    """Candidates with a client's own prompts and the model's answers.

    Args:
        max_response_tokens: most tokens of an answer, >= 1; longer answers are dropped.
        energy_temperature: T of energies and weights, above 0; the lower, the less an answer of high energy counts.
        batch_size: prompts of one client per batch, >= 1.

    Raises:
        ValueError: a setting is out of range.
        TypeError: in `make`, the model has no ``free_energies``.
    """

    chooses = False  # all count, by their weights
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
        if not isinstance(model, KnowsEnergies):
            raise TypeError(
                f"{type(model).__name__} has no free_energies: PseudoResponses weights answers by them; train an SFTModule"
            )
        self.counts, self.notes, self.dropped = Counter(), Counter(), []
        distinct = {  # prompts, each once
            (client, tuple(row[slot] for slot in template.slots)): None
            for client, rows in clients.items()
            for row in rows
        }
        asked = [(client, dict(zip(template.slots, texts, strict=True))) for client, texts in distinct]
        generator = BatchGenerator(
            model,
            self.max_response_tokens,
            stop=(),
            temperature=0.0,  # greedy
            top_p=1.0,
            batch_size=self.batch_size,
            keep_cut=False,
        )
        prompts = [_fix_prompt(client, template.render(fields).text) for client, fields in asked]
        answers = generator.generate(prompts, derive_seed(seed, "pseudo responses"), "Pseudo responses")
        made: dict[str, list[dict[str, str]]] = {client: [] for client in clients}
        for (client, fields), answer in zip(asked, answers, strict=True):
            fault = answer.fault or (None if answer.text else EMPTY)
            self.counts.update([TRIED, fault or SURVIVED])
            row = {**fields, "response": answer.text}
            if fault is None:
                made[client].append(row)
            else:
                self.dropped.append(Dropped(client, row, fault))
        weights = for_each(lambda rows: self._weigh(rows, template, model), made.values())
        return {
            client: [Candidate(row, weight) for row, weight in zip(rows, client_weights, strict=True)]
            for (client, rows), client_weights in zip(made.items(), weights, strict=True)
        }

    def _weigh(self, rows: list[dict[str, str]], template: Template, model: KnowsEnergies) -> list[float]:
        prompts = [template.render(row).text for row in rows]
        answers = [template.continuation(row["response"]) for row in rows]
        energies = model.free_energies(prompts, answers, self.energy_temperature)
        return energy_weights(energies, self.energy_temperature)


def energy_weights(energies: Sequence[float], temperature: float) -> list[float]:
    """Return weights ``exp((lowest - energy) / T)`` of one client's pseudo examples, in (0, 1].

    Examples:
        >>> [round(weight, 3) for weight in energy_weights([-8.0, -6.0, -7.5], temperature=1.0)]
        [1.0, 0.135, 0.607]
        >>> energy_weights([-8.0], temperature=1.0), energy_weights([], temperature=1.0)
        ([1.0], [])
    """
    lowest = min(energies, default=0.0)  # its weight is 1, so no exponent is above 0
    return [math.exp((lowest - energy) / temperature) for energy in energies]


def _fix_prompt(client: str, text: str) -> Prompt:
    return Prompt(client, (), lambda _: text)
