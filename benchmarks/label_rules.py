"""When the majority of grouped selectors labels better for one shared model than one selector of all votes: no training.

Perfect selectors label pairs of summaries by the rules of `fedlight.toy.oracle.margins`. The shared model is idealized: a
reward that is linear in the traits, fitted to the labels (Bradley and Terry's likelihood), picks the best of ``--best`` new
summaries, and the pick is compared with one more summary under each group's taste. So it shows what labels can bring about
before any error of a selector or of DPO.

* ``agree``: share of (person, pair) whose preference is the label. Majority by people is the best rule by definition.
* ``by_people``: win rate by each person's own taste, mean; ``worst``: of the worst group; ``by_mean``: by the mean utility.
* ``differ``: share of the pairs that ``pooled`` and this rule label differently. ``gain``: of ``by_people`` over ``pooled``.

Of opposite tastes, ``-loud * u`` in a share s of the people and ``u`` in the others, the pooled votes follow the minority
where ``s * tanh(loud * u / 2b) > (1 - s) * tanh(u / 2b)``, with the votes' noise b: never at ``loud <= 1``; for a loud
minority wherever ``tanh(u / 2b) < s / (1 - s)``, that is at s = 1/3 where others prefer it with a probability below 0.75.

Run: OMP_NUM_THREADS=1 python benchmarks/label_rules.py [--prompts 3000] [--seeds 0 1 2 3 4] [--json FILE]
"""

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedlight.evaluation.bootstrap import student_interval
from fedlight.toy.oracle import RULES, margins
from fedlight.toy.votes import LOUD, OPPOSED
from fedlight.toy.world import draw_post, draw_summary, measure

NOISE = 0.8  # of the votes, as in the embedded world
COMPLETIONS = 4  # of a prompt; all pairs of them are labelled


class World(NamedTuple):
    """Tastes, ``(groups, traits)``, and shares of the people."""

    tastes: np.ndarray
    shares: np.ndarray


def worlds() -> dict[str, World]:
    """Equal groups of opposed tastes; groups of unlike size; of unlike certainty; and tastes that are simply opposite."""
    opposed, loud = (np.array([*tastes.values()]) for tastes in (OPPOSED, LOUD))
    equal = np.full(3, 1 / 3)
    certainty = np.array([[0.4], [0.4], [4.0]])
    return {
        "opposed, equal groups": World(opposed, equal),
        "opposed, 3-1-1": World(opposed, np.array([0.6, 0.2, 0.2])),
        "opposed, one group ten times as certain": World(opposed * certainty, equal),
        "loud, but the others three times as certain": World(loud * np.array([[3.0], [3.0], [1.0]]), equal),
        "loud": World(loud, equal),
        "loud, the loud group 20 %": World(loud, np.array([0.4, 0.4, 0.2])),
    }


def pooled_follows_minority(share: float, loud: float, difference: float, noise: float) -> bool:
    """The closed form of the page's head for opposite tastes; ``difference`` is the utility's for the majority, above 0."""
    return bool(
        share * np.tanh(loud * difference / (2 * noise)) > (1 - share) * np.tanh(difference / (2 * noise))
    )


def draw(prompts: int, summaries: int, seed: int) -> np.ndarray:
    """Traits of new summaries of new posts, ``(prompts, summaries, traits)``."""
    rng = random.Random(seed)
    found = []
    for _ in range(prompts):
        post = draw_post(rng)
        found.append([measure(post, draw_summary(rng, post)) for _ in range(summaries)])
    return np.array(found, dtype=float)


def fit_reward(differences: np.ndarray, first_won: np.ndarray, ridge: float = 1e-3) -> np.ndarray:
    """Weights of the traits that make the labels likeliest, by Newton's method, ``(traits,)``."""
    weights = np.zeros(differences.shape[1])
    for _ in range(50):
        probability = 1 / (1 + np.exp(-differences @ weights))
        slope = differences.T @ (probability - first_won) / len(first_won) + ridge * weights
        curvature = (differences.T * (probability * (1 - probability))) @ differences / len(first_won)
        weights -= np.linalg.solve(curvature + ridge * np.eye(len(weights)), slope)
    return weights


def compare(world: World, labelled: np.ndarray, evaluated: np.ndarray) -> list[dict[str, Any]]:
    """One row for each rule; the last of the ``evaluated`` summaries of a post is the one to beat."""
    first, second = np.triu_indices(labelled.shape[1], 1)
    pairs = (labelled[:, first] - labelled[:, second]).reshape(-1, labelled.shape[2])
    utilities = pairs @ world.tastes.T
    labels = {rule: np.sign(margins(utilities, world.shares, rule, NOISE)) for rule in RULES}
    values = evaluated @ world.tastes.T  # (prompts, summaries, groups)
    rows = []
    for rule, label in labels.items():
        decided = label != 0
        reward = evaluated[:, :-1] @ fit_reward(pairs[decided], (label[decided] > 0).astype(float))
        ours, other = values[np.arange(len(values)), reward.argmax(axis=1)], values[:, -1]
        won = (ours > other) + 0.5 * (ours == other)
        mean_ours, mean_other = ours @ world.shares, other @ world.shares
        rows.append(
            {
                "method": rule,
                "differ": float((label != labels["pooled"]).mean()),
                "agree": float(((label[:, None] == np.sign(utilities)) @ world.shares).mean()),
                "by_mean": float(((mean_ours > mean_other) + 0.5 * (mean_ours == mean_other)).mean()),
                "by_people": float(won.mean(axis=0) @ world.shares),
                "worst": float(won.mean(axis=0).min()),
            }
        )
    return rows


def measure_all(prompts: int, seeds: Sequence[int], best: int) -> list[dict[str, Any]]:
    """Rows of all worlds, rules and seeds."""
    rows = []
    for seed in seeds:
        labelled, evaluated = draw(prompts, COMPLETIONS, 2 * seed), draw(prompts, best + 1, 2 * seed + 1)
        for name, world in worlds().items():
            found = compare(world, labelled, evaluated)
            pooled = next(row["by_people"] for row in found if row["method"] == "pooled")
            rows += [{"world": name, **row, "gain": row["by_people"] - pooled, "seed": seed} for row in found]
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints means over seeds, and the paired difference to the pooled votes with its interval."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prompts", type=int, default=3000, help="posts to label, and as many to evaluate")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--best", type=int, default=8, help="summaries that the reward chooses from")
    parser.add_argument("--json", type=Path, help="where the rows go as well")
    options = parser.parse_args(arguments)
    rows = measure_all(options.prompts, options.seeds, options.best)
    for name in worlds():
        print(name)
        of = {rule: [row for row in rows if row["world"] == name and row["method"] == rule] for rule in RULES}
        for rule, own in of.items():
            figures = " ".join(
                f"{column} {np.mean([row[column] for row in own]):.3f} "
                for column in ("differ", "agree", "by_mean", "by_people", "worst")
            )
            gains = [row["gain"] for row in own]
            low, high = student_interval(gains)
            print(
                f"  {rule:8}{figures} by_people minus pooled's {np.mean(gains):+.3f} [{low:+.3f}, {high:+.3f}]"
            )
    if options.json:
        options.json.write_text(json.dumps({"rows": rows}, indent=1))


if __name__ == "__main__":
    main()
