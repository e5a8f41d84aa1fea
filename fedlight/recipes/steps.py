"""The stages of recipes that are no Lightning command: labelling by vote, merging, and the tables of results."""

from pathlib import Path
from typing import Any

import numpy as np

from fedlight.datamodules.preferences.labelling import Orders, agreement, form_pairs, gather, label, majority
from fedlight.datamodules.rows.rows import load_rows, write_rows
from fedlight.datamodules.rows.votes import Comparison
from fedlight.evaluation.win_rate import win_rate
from fedlight.support.files import result_of
from fedlight.toy import rows as toy_rows
from fedlight.toy.oracle import Oracle


def label_with_selectors(
    completions: str, votes: list[str], output: str, orders: Orders = "both"
) -> dict[str, Any]:
    """Labels all pairs of completions by the majority of the selectors.

    Args:
        completions: rows that ``completions.yaml`` wrote.
        votes: files that ``votes.yaml`` wrote, each with what one selector says, or several; an odd number in all.
        output: the labelled pairs, as JSON lines with ``prompt``, ``response_a``, ``response_b``, ``choice``.
        orders: as in the votes.

    Returns:
        ``pairs``, the number of labelled ones, and a ``report`` in words; of several selectors it says how far they
        agree.

    Raises:
        ValueError: an even number of selectors.
    """
    pairs, skipped = form_pairs(load_rows(completions), completions)
    log_probs = np.concatenate([gather(load_rows(file), len(pairs), orders) for file in votes])
    done = _write_labels(pairs, log_probs, skipped, output)
    if len(log_probs) > 1:
        done["report"] += f"; {agreement(log_probs)}"
    return done


def label_with_oracle(completions: str, seed: int, output: str, opposition: float = 0.2) -> dict[str, Any]:
    """Labels all pairs of completions by their true mean utility: the ceiling of what a selector can do.

    Args:
        completions: rows that ``completions.yaml`` wrote on prompts of the toy world.
        seed: of the toy world.
        output: the labelled pairs, as JSON lines.
        opposition: of the toy world.
    """
    pairs, skipped = form_pairs(load_rows(completions), completions)
    oracle = Oracle(seed, opposition=opposition)
    utilities = [
        [oracle.utility(pair.fields["prompt"], answer) for answer in (pair.first, pair.second)]
        for pair in pairs
    ]
    return _write_labels(pairs, np.array(utilities)[None], skipped, output)


def _write_labels(
    pairs: list[Comparison], log_probs: np.ndarray, skipped: int, output: str
) -> dict[str, Any]:
    rows, counts = label(pairs, log_probs)
    write_rows(rows, Path(output))
    return {
        "pairs": len(rows),
        "report": f"{counts}; {skipped:,} pairs of equal or empty completions skipped",
    }


def merge_adapter(model: str, adapter: str, output: str) -> None:
    """Writes base and adapter as one model folder, for stages that put an adapter of their own on top.

    Args:
        model: hub name or folder of the base.
        adapter: its PEFT folder.
        output: the new model's folder.
    """
    from fedlight.modules.sft import SFTModule

    module = SFTModule(model, adapter=adapter)
    module.configure_model()
    module.save_merged(output)


def pair_answers(ours: str, theirs: str, output: str) -> dict[str, Any]:
    """Puts two models' answers to the same prompts side by side, for a selector to compare.

    Args:
        ours: rows that ``completions.yaml`` wrote, one completion each; the first of the pair.
        theirs: the other model's.
        output: rows of the same form with two completions each.

    Raises:
        ValueError: the two answer every prompt alike.
    """
    rows = [
        {"fields": a["fields"], "completions": [a["completions"][0], b["completions"][0]]}
        for a, b in zip(load_rows(ours), load_rows(theirs), strict=True)
    ]
    different = sum(a != b for a, b in (row["completions"] for row in rows))
    if not different:
        raise ValueError(
            f"{ours}: the tuned model answers all {len(rows)} prompts as the raw one does; raise dpo_lr or dpo_epochs"
        )
    write_rows(rows, Path(output))
    return {"prompts": len(rows), "different": different}


def compare_by_selector(
    tests: dict[str, str], duel: str, votes: str, orders: Orders = "both"
) -> dict[str, Any]:
    """The table where nobody but the selector can judge.

    A model tuned on a selector's labels may please that selector without being better: read ``win_rate_by_selector`` as
    how well the tuning worked, and let somebody else judge the answers.

    Args:
        tests: method -> folder of the stage that tested its selector; ``raw`` first, the tuned method second.
        duel: the tuned model's and the raw model's answers, from ``pair_answers``.
        votes: what the selector says of them; where it is several adapters, the majority decides.
        orders: as in the votes.

    Returns:
        ``rows``, one per method: ``selector_accuracy`` on held-out votes and ``win_rate_by_selector`` against raw.
    """
    rows = load_rows(duel)
    pairs, _ = form_pairs(rows, duel)
    log_probs = gather(load_rows(votes), len(pairs), orders)
    winners = majority(log_probs)[~np.isnan(log_probs).any(axis=(0, 2))]
    alike = [0.0] * (len(rows) - len(pairs))
    won = win_rate([*(winners == 0).tolist(), *alike], [*(winners == 1).tolist(), *alike])
    raw, tuned = tests
    return {
        "rows": [
            {"method": raw, "selector_accuracy": _accuracy(tests[raw]), "win_rate_by_selector": 0.5},
            {"method": tuned, "selector_accuracy": _accuracy(tests[tuned]), "win_rate_by_selector": won},
        ]
    }


def compare_with_oracle(
    seed: int, results: str, answers: dict[str, str], opposition: float = 0.2
) -> dict[str, Any]:
    """The table of the toy world: what the oracle, who knows every client's taste, says of the answers.

    Args:
        seed: of the toy world.
        results: folder of the stage that called ``compare_by_selector``; its rows are taken over.
        answers: method -> file of its answers to the evaluation prompts; ``raw`` is what the others are compared with.
        opposition: of the toy world.

    Returns:
        ``rows``, one per method, with ``win_rate_vs_raw`` and mean ``utility``; and one for the oracle, whose accuracy is
        what the noise of the votes leaves possible for one taste, and whose labels are the ceiling of the tuning.
    """
    oracle = Oracle(seed, opposition=opposition)
    utilities = {
        method: [
            oracle.utility(row["fields"]["prompt"], text)
            for row in load_rows(file)
            for text in row["completions"]
        ]
        for method, file in answers.items()
    }
    known = {row["method"]: row for row in result_of(results)["rows"]}
    known["oracle"] = {
        "method": "oracle",
        "selector_accuracy": oracle.accuracy(toy_rows("heldout", seed=seed, opposition=opposition)),
    }
    return {
        "rows": [
            {
                **known[method],
                "win_rate_vs_raw": win_rate(scores, utilities["raw"]),
                "utility": float(np.mean(scores)),
            }
            for method, scores in utilities.items()
        ]
    }


def _accuracy(folder: str) -> float:
    accuracy: float = result_of(folder)["metrics"]["test/accuracy"]
    return accuracy
