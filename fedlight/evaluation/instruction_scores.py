"""Scores of synthetic examples, from the losses on a response with and without its instruction.

Zhang et al., "FewFedPIT: Towards Privacy-preserving and Few-shot Federated Instruction Tuning",
https://arxiv.org/abs/2403.06131, section 3.3, keeps the examples with the lowest Instruction Following Score

    IFS(x, y) = L(y | x) / L(y)

where L is the mean loss over the tokens of the response y. Li et al., "From Quantity to Quality: Boosting LLM Performance
with Self-Guided Data Selection for Instruction Tuning", NAACL 2024, https://arxiv.org/abs/2308.12032, call the same ratio
instruction-following difficulty (IFD) and keep the highest.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from fedlight.evaluation.tasks.model import Likelihood


def mean_losses(likelihoods: Sequence[Likelihood]) -> np.ndarray:
    """Return the mean loss per token in nats, ``(examples,)``."""
    return np.array([-text.log_prob / text.tokens for text in likelihoods], dtype=np.float64)


def ifs(conditional: ArrayLike, unconditional: ArrayLike) -> np.ndarray:
    """Return the Instruction Following Score, ``(examples,)``, at least 0; not finite where L(y) is 0.

    The lower it is, the more the instruction tells about the response.

    Args:
        conditional: L(y | x), mean token losses behind the prompt, ``(examples,)``.
        unconditional: L(y), mean token losses of the response alone, ``(examples,)``.
    """
    with np.errstate(divide="ignore", invalid="ignore"):  # L(y) of 0: `best` leaves the example out
        return np.asarray(conditional, np.float64) / np.asarray(unconditional, np.float64)


def ppl(conditional: ArrayLike) -> np.ndarray:
    """Return the perplexity of the response after its prompt, at least 1, from the losses L(y | x)."""
    with np.errstate(over="ignore"):  # a loss above 709 nats gives infinity
        return np.exp(np.asarray(conditional, np.float64))


def best(scores: ArrayLike, keep: int, highest: bool = False) -> np.ndarray:
    """Return the indices of at most ``keep`` examples with the lowest, or ``highest``, scores, best first.

    Of equal scores the earlier comes first. Scores that are not finite are left out, so there may be fewer.

    Examples:
        >>> best([0.5, float("nan"), 0.1, 0.5], keep=2).tolist()
        [2, 0]
    """
    values = np.asarray(scores, np.float64)
    finite = np.flatnonzero(np.isfinite(values))
    order = np.argsort(-values[finite] if highest else values[finite], kind="stable")
    return np.asarray(finite[order][:keep])
