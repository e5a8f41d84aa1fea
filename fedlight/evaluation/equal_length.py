r"""Win rate at equal length: the estimated win rate if both answers were equally long.

After Dubois, Galambosi, Liang and Hashimoto, "Length-Controlled AlpacaEval: A Simple Way to Debias Automatic Evaluators",
COLM 2024, https://arxiv.org/abs/2404.04475, section 3: verdicts of a judge on a method's answers and a baseline's follow

    P(win on prompt x) = sigmoid(theta + phi * tanh(d_x / std(d)) + psi * gamma_x)

``d_x`` is the number of characters of our answer minus that of the other; ``gamma_x`` says how easy the prompt is for all
methods. The corrected win rate is the mean over prompts without the second term.

This is not the length-controlled win rate of AlpacaEval 2.0, and must not be compared with published ones:

* ``gamma_x``: AlpacaEval has fixed values, from one fit over all models of its leaderboard. Here it comes from the other
  methods of the table, since verdicts on a method would explain themselves; a single method has none.
* Penalty: AlpacaEval has an L1 penalty on all three weights, ``theta`` included, its strength from cross-validation in five
  parts, and adds verdicts on answers of its baseline that were made longer and shorter. Here ``phi`` and ``psi`` have a
  weak L2 penalty.
* Standard error: AlpacaEval's is that of the mean of the corrected probabilities over prompts. These differ by ``gamma_x``
  alone, so it would be 0 for a single method; none is given.

Ties count as half a win in both. The model cannot separate a judge that likes length from long answers that are better.
Where length goes with quality, the correction removes that gain as well; several methods help if all of them write more on
easy prompts.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

FEWEST_PROMPTS = 10
"""Fewest prompts from which three coefficients can be estimated."""

PENALTY_C = 10.0
DIFFICULTY_C = 1.0
"""Inverse strengths of the L2 penalties: of ``phi`` and ``psi``; of the fit that gives the prompts' difficulties."""


class Compared(NamedTuple):
    """Verdicts on one method's answers."""

    # 1 for our answer, 0 for the other, a value between for an undecided judge, NaN for no verdict, ``(pairs,)``
    wins: Sequence[float]
    longer: Sequence[float]  # characters of our answer less those of the other, ``(pairs,)``
    prompts: Sequence[Hashable]  # prompt of each pair, ``(pairs,)``; the same names in all methods


class EqualLength(NamedTuple):
    """Win rate with and without the effect of length."""

    raw: float  # mean of the wins; NaN without a verdict
    corrected: float  # win rate at equal length, in [0, 1]; NaN with fewer than ``FEWEST_PROMPTS`` prompts
    # ``phi``, above 0 where the judge prefers longer answers; in log odds, for a much longer answer relative to
    # one of equal length
    length_effect: float


def rates_at_equal_length(methods: Mapping[str, Compared]) -> dict[str, EqualLength]:
    """Correct the win rates of methods against the same baseline.

    Where all verdicts are wins, or all are losses, or all pairs are equally long, there is nothing to correct, and the raw
    rate is returned.

    Raises:
        ValueError: a method's numbers of verdicts, lengths and prompts differ, or a verdict is out of range.

    Examples:
        >>> wins = [1, 1, 1, 1, 0] * 8 + [0, 0, 0, 0, 1] * 4  # the longer answer, four times out of five
        >>> judged = Compared(wins, [70] * 40 + [-70] * 20, range(60))  # and ours are longer twice as often
        >>> rates = rates_at_equal_length({"ours": judged})["ours"]
        >>> round(rates.raw, 3), round(rates.corrected, 2)
        (0.6, 0.5)
    """
    pairs = {name: _Pairs(name, compared) for name, compared in methods.items()}
    return {name: _corrected(name, pairs) for name in pairs}


class _Pairs:
    """Pairs with a verdict: wins, the length term and prompts, ``(pairs,)`` each."""

    def __init__(self, name: str, compared: Compared) -> None:
        if not len(compared.wins) == len(compared.longer) == len(compared.prompts):
            raise ValueError(
                f"{name} has {len(compared.wins)} verdicts, {len(compared.longer)} lengths and {len(compared.prompts)} "
                "prompts: give one of each for every pair"
            )
        wins, longer = np.asarray(compared.wins, dtype=float), np.asarray(compared.longer, dtype=float)
        if ((wins < 0) | (wins > 1)).any():
            raise ValueError(
                f"{name} has verdicts from {np.nanmin(wins)} to {np.nanmax(wins)}: they lie in [0, 1]"
            )
        read = ~np.isnan(wins)
        self.wins = wins[read]
        spread = longer[read].std() if read.any() else 0.0
        # tanh(d / std(d)); equally long pairs have no deviation and no effect.
        self.length = np.tanh(longer[read] / spread) if spread else np.zeros(read.sum())
        self.prompts = [prompt for prompt, known in zip(compared.prompts, read, strict=True) if known]


def _corrected(name: str, methods: Mapping[str, _Pairs]) -> EqualLength:
    ours = methods[name]
    raw = float(ours.wins.mean()) if len(ours.wins) else math.nan
    if len(set(ours.prompts)) < FEWEST_PROMPTS:
        return EqualLength(raw, math.nan, math.nan)
    if raw in (0.0, 1.0) or not ours.length.any():  # nothing to estimate an effect from
        return EqualLength(raw, raw, 0.0)
    hard = _difficulties([other for key, other in methods.items() if key != name])
    gamma = np.array([hard.get(prompt, 0.0) for prompt in ours.prompts])
    intercept, (phi, psi) = _fit(np.stack([ours.length, gamma], axis=1), ours.wins, PENALTY_C, intercept=True)
    # The sigmoid, without the term of length.
    wins = 0.5 * (1 + np.tanh((intercept + psi * gamma) / 2))
    return EqualLength(raw, float(wins.mean()), float(phi))


def _difficulties(others: Sequence[_Pairs]) -> dict[Hashable, float]:
    """Return prompt -> ``gamma``: how far the other methods win there, beyond their quality and their answers' lengths."""
    from scipy.sparse import csr_array, hstack

    others = [other for other in others if len(other.wins)]
    if not others:
        return {}
    prompts = {
        prompt: index for index, prompt in enumerate(dict.fromkeys(p for o in others for p in o.prompts))
    }
    method = np.concatenate([np.full(len(other.wins), index) for index, other in enumerate(others)])
    lengths = np.concatenate([other.length for other in others])
    prompt = np.array([prompts[p] for other in others for p in other.prompts])
    rows = np.arange(len(prompt))
    # Columns: gamma of each prompt, theta of each method, phi of each method; [pairs, prompts + 2 methods].
    blocks = [
        csr_array((weights, (rows, columns)), shape=(len(rows), width))
        for weights, columns, width in (
            (np.ones(len(rows)), prompt, len(prompts)),
            (np.ones(len(rows)), method, len(others)),
            (lengths, method, len(others)),
        )
    ]
    wins = np.concatenate([other.wins for other in others])
    _, weights = _fit(hstack(blocks, format="csr"), wins, DIFFICULTY_C, intercept=False, tol=1e-4)
    return dict(zip(prompts, weights[: len(prompts)].tolist(), strict=True))


def _fit(
    features: Any, wins: np.ndarray, penalty_c: float, intercept: bool, tol: float = 1e-6
) -> tuple[float, np.ndarray]:
    from scipy.sparse import issparse, vstack
    from sklearn.linear_model import LogisticRegression

    # scikit-learn takes classes, no shares: each row is a win and a loss, weighted.
    twice = (
        vstack([features, features], format="csr") if issparse(features) else np.concatenate([features] * 2)
    )
    labels = np.repeat([1, 0], len(wins))
    model = LogisticRegression(C=penalty_c, fit_intercept=intercept, max_iter=10_000, tol=tol)
    model.fit(twice, labels, sample_weight=np.concatenate([wins, 1 - wins]))
    return float(np.atleast_1d(model.intercept_)[0]), model.coef_[0]
