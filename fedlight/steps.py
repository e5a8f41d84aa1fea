"""The stages of recipes that are no Lightning command: labelling by vote, comparing with the toy world's oracle."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from fedlight.datamodules.labelling import Orders, form_pairs, gather, label
from fedlight.datamodules.rows import load_rows
from fedlight.datamodules.votes import Comparison
from fedlight.evaluation.win_rate import win_rate
from fedlight.toy import rows as toy_rows
from fedlight.toy.oracle import Oracle


def label_with_selectors(
    completions: str, votes: list[str], output: str, orders: Orders = "both"
) -> dict[str, Any]:
    """Labels all pairs of completions by the majority of the selectors.

    Args:
        completions: rows that ``completions.yaml`` wrote.
        votes: rows that ``votes.yaml`` wrote, one file for each selector; an odd number.
        output: the labelled pairs, as JSON lines with ``prompt``, ``response_a``, ``response_b``, ``choice``.
        orders: as in the votes.

    Returns:
        ``pairs``, the number of labelled ones, and a ``report`` in words.

    Raises:
        ValueError: an even number of selectors.
    """
    pairs, skipped = form_pairs(load_rows(completions), completions)
    log_probs = np.stack([gather(load_rows(file), len(pairs), orders) for file in votes])
    return _write_labels(pairs, log_probs, skipped, output)


def label_with_oracle(completions: str, seed: int, output: str) -> dict[str, Any]:
    """Labels all pairs of completions by their true mean utility: the ceiling of what a selector can do.

    Args:
        completions: rows that ``completions.yaml`` wrote on prompts of the toy world.
        seed: of the toy world.
        output: the labelled pairs, as JSON lines.
    """
    pairs, skipped = form_pairs(load_rows(completions), completions)
    oracle = Oracle(seed)
    utilities = [
        [oracle.utility(pair.fields["prompt"], answer) for answer in (pair.first, pair.second)]
        for pair in pairs
    ]
    return _write_labels(pairs, np.array(utilities)[None], skipped, output)


def _write_labels(
    pairs: list[Comparison], log_probs: np.ndarray, skipped: int, output: str
) -> dict[str, Any]:
    rows, counts = label(pairs, log_probs)
    Path(output).parent.mkdir(parents=True, exist_ok=True)
    Path(output).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "pairs": len(rows),
        "report": f"{counts}; {skipped:,} pairs of equal or empty completions skipped",
    }


def compare_with_oracle(seed: int, tests: dict[str, str], answers: dict[str, str]) -> dict[str, Any]:
    """The table of the toy world: accuracy of the selectors, win rate of the tuned models over the raw one.

    Args:
        seed: of the toy world.
        tests: method -> folder of the stage that tested its selector.
        answers: method -> file of its answers to the evaluation prompts; ``raw`` is what the others are compared with.

    Returns:
        ``rows``, one per method: ``selector_accuracy`` on held-out votes, ``win_rate_vs_raw`` and ``utility`` by the
        oracle. The oracle's own accuracy is what the noise of the votes leaves possible for one taste.
    """
    oracle = Oracle(seed)
    utilities = {
        method: [
            oracle.utility(row["fields"]["prompt"], text)
            for row in load_rows(file)
            for text in row["completions"]
        ]
        for method, file in answers.items()
    }
    accuracy = {method: _accuracy(folder) for method, folder in tests.items()}
    accuracy["oracle"] = oracle.accuracy(toy_rows("heldout", seed=seed))
    return {
        "rows": [
            {
                "method": method,
                "selector_accuracy": accuracy.get(method),
                "win_rate_vs_raw": win_rate(scores, utilities["raw"]),
                "utility": float(np.mean(scores)),
            }
            for method, scores in utilities.items()
        ]
    }


def _accuracy(folder: str) -> float:
    metrics: dict[str, float] = json.loads((Path(folder) / "done.json").read_text())["result"]["metrics"]
    return metrics["test/accuracy"]
