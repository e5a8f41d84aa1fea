"""Which of its candidates a client trains on: a score by a model, and the best of them.

Zhang et al., "FewFedPIT", https://arxiv.org/abs/2403.06131, section 3.3: the model that a client has trained on its own
examples scores what the global model wrote, since the global model's view of its own texts made training collapse.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from fedlight.datamodules.synthesis.synthesis import Candidate
from fedlight.datamodules.text.templates import Template
from fedlight.evaluation.instruction_scores import ifd, ifs, mean_losses, ppl
from fedlight.evaluation.tasks.model import AnswersPrompts

Score = Literal["ifs", "ppl", "ifd", "random"]
SCORES = ("ifs", "ppl", "ifd", "random")
HIGHEST = ("ifd",)
"""Scores of which the highest are the best."""


def score_candidates(
    score: Score, candidates: Sequence[Candidate], template: Template, model: AnswersPrompts, seed: int
) -> np.ndarray:
    """A score for each candidate, all by one call of the model.

    Args:
        score: ``ifs`` and ``ifd`` need the loss of the response behind the prompt and by itself, ``ppl`` that behind the
            prompt, ``random`` no model.
        candidates: of one client.
        template: the prompt; the response follows it as in training. The token that ends a response is not scored.
        model: as it stands.
        seed: of ``random``.

    Returns:
        ``(candidates,)``.
    """
    if score == "random":
        return np.random.default_rng(seed).random(len(candidates))
    blank = "" if template.text[-1:].isspace() else " "
    prompts = [template.render(one.fields).text for one in candidates]
    responses = [blank + one.fields["response"] for one in candidates]
    alone = [] if score == "ppl" else [responses]
    found = model.log_likelihoods([*prompts, *("" for _ in alone)], [*([one] for one in responses), *alone])
    conditional = mean_losses([one for (one,) in found[: len(candidates)]])
    if score == "ppl":
        return ppl(conditional)
    return (ifd if score == "ifd" else ifs)(conditional, mean_losses(found[-1]))
