"""How far the estimators of win rates are off where the truth is known: length control, and bootstrap intervals.

* length control: verdicts from the logistic model with four pairs of quality and taste for length, on answers that are
  longer by 80 ± 100 characters, to prompts of somewhat unlike difficulty; as probabilities (soft) and as 0 and 1 (hard).
  ``rmse`` is of the corrected win rate against the true one, ``largest`` the largest error of a run, ``raw_low`` and
  ``raw_high`` the errors of the rate without the correction, means by pair.
* six methods, 800 prompts of unlike difficulty (log odds with a standard deviation of 1.5), hard and soft.
* a judge who takes the longer answer, but for 5 % of the pairs, on 2,000 of them: the corrected rate should be 0.5.
* intervals: how often the 95 % interval holds the true rate of 0.6; then where a prompt has one to eight pairs that mostly
  go the same way, with prompts drawn as it is done, and with pairs drawn instead.

Run: OMP_NUM_THREADS=1 python benchmarks/estimators.py [--runs 60] [--intervals 600] [--json FILE]
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from shown_rows import show

from fedlight.evaluation.bootstrap import bootstrap_interval
from fedlight.evaluation.equal_length import Compared, rates_at_equal_length

PAIRS = ((0.0, 1.0), (0.7, 3.0), (-1.0, 1.5), (0.5, -1.5))  # quality, taste for length
PROMPTS = (30, 100, 805, 3000)  # 805 are AlpacaEval's
FEWER_RUNS_FROM = 3000  # prompts
SHARE = 0.6  # of wins, in the intervals
ALIKE = 0.4  # sum of both parameters of the beta distribution of a prompt's own rate; near 0 its pairs go the same way
PROMPT_SPREAD = 0.5  # standard deviation of the prompts' own log odds, which the correction does not know

Row = dict[str, Any]


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """Probabilities."""
    return 1 / (1 + np.exp(-logits))


def judged(
    stream: np.random.Generator, quality: float, taste: float, hardness: np.ndarray, hard: bool
) -> tuple[Compared, float]:
    """Verdicts of a judge with a taste for length, and the win rate without it."""
    longer = 80 + 100 * stream.standard_normal(len(hardness))
    wins = sigmoid(quality + hardness + taste * np.tanh(longer / longer.std()))
    if hard:
        wins = (stream.random(len(wins)) < wins).astype(float)
    return Compared(wins, longer, range(len(wins))), float(sigmoid(quality + hardness).mean())


def length_control(prompts: int, hard: bool, runs: int) -> Row:
    """Errors over all pairs and runs."""
    errors, raw = [], []
    for pair, (quality, taste) in enumerate(PAIRS):
        own = []
        for run in range(runs):
            stream = np.random.default_rng([pair, run, prompts])
            compared, truth = judged(
                stream, quality, taste, PROMPT_SPREAD * stream.standard_normal(prompts), hard
            )
            found = rates_at_equal_length({"ours": compared})["ours"]
            errors.append(found.corrected - truth)
            own.append(found.raw - truth)
        raw.append(abs(np.mean(own)))
    return {
        "what": "hard" if hard else "soft",
        "prompts": f"{prompts} prompts",
        "rmse": float(np.sqrt(np.mean(np.square(errors)))),
        "largest": float(np.abs(errors).max()),
        "raw_low": float(min(raw)),
        "raw_high": float(max(raw)),
    }


def six_methods(hard: bool, runs: int, prompts: int = 800) -> Row:
    """The largest error where methods tell each other's prompts apart."""
    largest = 0.0
    for run in range(runs):
        stream = np.random.default_rng([run, prompts])
        hardness = 1.5 * stream.standard_normal(prompts)
        worlds = {
            place: judged(stream, quality, 1.5, hardness, hard)
            for place, quality in enumerate(np.linspace(-1, 1, 6))
        }
        found = rates_at_equal_length({place: compared for place, (compared, _) in worlds.items()})
        errors = [abs(found[place].corrected - truth) for place, (_, truth) in worlds.items()]
        largest = max(largest, *errors)
    return {
        "what": f"six methods, {'hard' if hard else 'soft'}",
        "prompts": f"{prompts} prompts",
        "largest": largest,
    }


def length_alone(runs: int, prompts: int = 2000) -> Row:
    """What comes out for a judge who sees nothing but length."""
    found = []
    for run in range(runs):
        stream = np.random.default_rng([run, prompts])
        longer = stream.normal(100, 100, prompts)
        wins = (longer > 0) == (stream.random(prompts) < 0.95)
        found.append(
            rates_at_equal_length({"ours": Compared(wins.astype(float), longer, range(prompts))})[
                "ours"
            ].corrected
        )
    return {
        "what": "length alone",
        "prompts": f"{prompts} prompts",
        "lowest": min(found),
        "highest": max(found),
    }


def intervals(prompts: int, runs: int) -> list[Row]:
    """How often an interval holds the truth: one pair a prompt; several; several, and pairs are drawn."""
    held: dict[str, list[bool]] = {"one pair a prompt": [], "several pairs a prompt": [], "pairs drawn": []}
    for run in range(runs):
        stream = np.random.default_rng([run, prompts])
        one = stream.random(prompts) < SHARE
        pairs = stream.integers(1, 9, prompts)
        own = stream.beta(ALIKE * SHARE, ALIKE * (1 - SHARE), prompts)
        several = np.concatenate([stream.random(n) < rate for n, rate in zip(pairs, own, strict=True)])
        of = np.repeat(np.arange(prompts), pairs)
        for name, values, groups in (
            ("one pair a prompt", one, None),
            ("several pairs a prompt", several, of),
            ("pairs drawn", several, None),
        ):
            low, high = bootstrap_interval(values.astype(float), groups, seed=run)
            held[name].append(bool(low <= SHARE <= high))
    return [
        {"what": name, "prompts": f"{prompts} prompts", "held": float(np.mean(kept))}
        for name, kept in held.items()
    ]


def measure(runs: int, num_intervals: int) -> list[Row]:
    """All rows."""
    rows = [
        length_control(prompts, hard, runs if prompts < FEWER_RUNS_FROM else max(1, runs * 5 // 12))
        for hard in (False, True)
        for prompts in PROMPTS
    ]
    rows += [six_methods(hard, max(1, runs // 6)) for hard in (False, True)]
    rows.append(length_alone(runs))
    for prompts in (20, 60, 200):
        rows += intervals(prompts, num_intervals)
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the rows."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--runs", type=int, default=60, help="of the length control; 5 of 12 at 3,000 prompts"
    )
    parser.add_argument("--intervals", type=int, default=600, help="runs of the intervals")
    parser.add_argument("--json", type=Path, help="where the rows go as well")
    options = parser.parse_args(arguments)
    rows = measure(options.runs, options.intervals)
    show(rows, options.json)


if __name__ == "__main__":
    main()
