"""Stages of recipes that are no Lightning command: labelling by votes, merging, and tables of results."""

from pathlib import Path
from typing import Any

import numpy as np

from fedlight.datamodules.preferences.labelling import (
    Orders,
    agreement,
    form_pairs,
    gather,
    label,
    labelled,
    majority,
)
from fedlight.datamodules.rows.rows import load_rows, write_rows
from fedlight.datamodules.text.encoding import Comparison
from fedlight.evaluation import judge
from fedlight.evaluation.bootstrap import with_interval
from fedlight.evaluation.win_rate import wins
from fedlight.support.files import result_of, write_json
from fedlight.toy import rows as toy_rows
from fedlight.toy.oracle import Oracle


def label_with_selectors(
    completions: str, votes: list[str], output: str, orders: Orders = "both"
) -> dict[str, Any]:
    """Label all pairs of completions by the majority of the selectors.

    Args:
        completions: file that ``completions.yaml`` wrote.
        votes: files that ``votes.yaml`` wrote, each with the votes of one selector or several; an odd number in all.
        output: file of the labelled pairs, JSON lines with ``prompt``, ``response_a``, ``response_b``, ``choice``.
        orders: ``orders`` of the votes.

    Returns:
        ``pairs``, the number of labelled pairs, and a ``report``; with several selectors it has their agreement. The
        ``metrics`` are ``label/pairs`` and ``label/too_long``, the number of pairs that no selector could read whole.

    Raises:
        ValueError: an even number of selectors.
    """
    pairs, skipped = form_pairs(load_rows(completions), completions)
    log_probs = np.concatenate([gather(load_rows(file), len(pairs), orders) for file in votes])
    done = _write_labels(pairs, log_probs, skipped, output)
    if len(log_probs) > 1:
        done["report"] += f"; {agreement(log_probs)}"
    return done


def label_with_oracle(
    completions: str, seed: int, output: str, opposition: float = 0.2, rule: str = "mean", **options: Any
) -> dict[str, Any]:
    """Label all pairs of completions by the clients' true tastes, the upper bound of selectors' labels.

    Args:
        completions: file that ``completions.yaml`` wrote on prompts of the embedded world.
        seed: seed of the embedded world.
        output: file of the labelled pairs, JSON lines.
        opposition: opposition of the embedded world's groups.
        rule: how the tastes are combined (``mean``, ``pooled``, ``people``, ``groups``, see `fedlight.toy.oracle.margins`),
            or the name of a group, whose taste alone decides.
        options: further options of the embedded world.
    """
    pairs, skipped = form_pairs(load_rows(completions), completions)
    oracle = Oracle(seed, opposition=opposition, **options)
    posts = [pair.fields["prompt"] for pair in pairs]
    for_first = oracle.margins(posts, [pair.first for pair in pairs], [pair.second for pair in pairs], rule)
    # As log-probabilities of one selector, [1, pairs, 2]: their difference is the oracle's margin.
    return _write_labels(pairs, np.stack([for_first, np.zeros_like(for_first)], -1)[None], skipped, output)


def _write_labels(
    pairs: list[Comparison], log_probs: np.ndarray, skipped: int, output: str
) -> dict[str, Any]:
    rows, counts = label(pairs, log_probs)
    write_rows(rows, Path(output))
    return {
        "pairs": len(rows),
        "metrics": {"label/pairs": len(rows), "label/too_long": counts.unread},
        "report": f"{counts}; {skipped:,} pairs of equal or empty completions skipped",
    }


def calibrate_letters(votes: str, output: str) -> dict[str, Any]:
    """Write prior and temperature of a selector's letters, for ``letters`` of `SelectorModule`.

    Args:
        votes: file of the selector's votes on both orders of training pairs, JSON lines with ``orders``, ``labels``,
            ``logp_a`` and ``logp_b``.
        output: JSON file with ``prior``, in nats, and ``temperature``; see `fedlight.evaluation.judge.calibrate_letters`.
    """
    rows = load_rows(votes)
    orders, labels, a, b = (
        np.array([row[name] for row in rows]) for name in ("orders", "labels", "logp_a", "logp_b")
    )
    prior, temperature = judge.calibrate_letters(orders, b - a, labels)
    write_json(Path(output), {"prior": prior, "temperature": temperature})
    return {"metrics": {"letters/prior": prior, "letters/temperature": temperature}}


def merge_adapter(model: str, adapter: str, output: str) -> None:
    """Write base and adapter (a PEFT folder) as one model, for stages that train a new adapter on it."""
    from fedlight.modules.sft import SFTModule

    module = SFTModule(model, adapter=adapter, dtype="fp32")
    module.configure_model()
    module.save_merged(output)


def pair_answers(ours: str, theirs: str, output: str) -> dict[str, Any]:
    """Write two models' answers to the same prompts as pairs, for a selector to compare.

    Args:
        ours: file that ``completions.yaml`` wrote, with one completion each; the first of the pair.
        theirs: file of the other model.
        output: file of the same form with two completions each.

    Raises:
        ValueError: both models give the same answer to every prompt.
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
    tests: dict[str, str],
    duel: str,
    votes: str,
    labels: str,
    orders: Orders = "both",
    rules: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Return the table of results if only the selector can judge.

    A model tuned on a selector's labels may please that selector without being better: ``win_rate_by_selector`` measures the
    tuning; the answers need another judge.

    Args:
        tests: method -> folder of the stage that tested its selector; ``raw`` first, the tuned method second.
        duel: file of the tuned and the raw model's answers, from ``pair_answers``.
        votes: file of the selector's votes on them; of several adapters the majority decides.
        labels: folder of the stage that labelled the tuned method's pairs.
        orders: ``orders`` of the votes.
        rules: method -> folder of a stage of `fedlight.recipes.vote_baselines`, such as the longer answer, for further rows.

    Returns:
        ``rows``, one per method: ``selector_accuracy`` on held-out votes, in single orders; ``both_orders``, with the two
        orders averaged, with its interval in ``_low`` and ``_high``; ``win_rate_by_selector`` against raw, and the
        ends of its 95 % interval over prompts, ``win_rate_by_selector_low`` and ``_high``. Pairs too long for the selector
        are no part of it and counted by ``unread``; ``labelled`` and ``too_long`` count the pairs of the tuning. A table
        marks what rests on a selector at chance, see `fedlight.support.results`.
    """
    rows = load_rows(duel)
    pairs, _ = form_pairs(rows, duel)
    log_probs = gather(load_rows(votes), len(pairs), orders)
    unread = np.isnan(log_probs).any(axis=(0, 2))  # [pairs], of [selectors, pairs, 2]
    winners = majority(log_probs)[~unread]
    alike = [0.0] * (len(rows) - len(pairs))  # equal answers tie
    won = wins([*(winners == 0).tolist(), *alike], [*(winners == 1).tolist(), *alike])
    raw, tuned = tests  # in the order of the config
    return {
        "rows": [
            {"method": raw, **_accuracy(tests[raw]), "win_rate_by_selector": 0.5},
            {
                "method": tuned,
                **_accuracy(tests[tuned]),
                **with_interval("win_rate_by_selector", won),
                "unread": int(unread.sum()),
                **labelled(labels),
            },
            *({"method": rule, **_accuracy(folder)} for rule, folder in (rules or {}).items()),
        ]
    }


def add_forgetting(
    results: str,
    model: str,
    trained: dict[str, str],
    dtype: str = "fp32",
    raw: str = "raw",
    if_run: list[str] | None = None,
) -> dict[str, Any]:
    """Return a table of results with what tuned models have lost, see `fedlight.callbacks.scores.forgetting`.

    Args:
        results: folder of the stage whose rows are extended.
        model: base of all methods.
        trained: method -> its adapter, or the folder of its run with the checkpoint of its last round.
        dtype: number type of the base.
        raw: method of the table that is the base without an adapter.
        if_run: methods that are left out where their folder does not exist.

    Returns:
        ``rows`` of ``results`` with ``perplexity_elsewhere`` on everyday text and ``knowledge``, the share of questions of
        common knowledge that are answered rightly, for ``raw`` and the methods of ``trained``.

    Raises:
        FileNotFoundError: a folder has neither an adapter nor a checkpoint.
    """
    from fedlight.callbacks.scores.forgetting import measure

    names = {"perplexity_elsewhere": "forgetting/perplexity", "knowledge": "forgetting/knowledge"}
    lost: dict[str, dict[str, float]] = {}
    for method, folder in trained.items():
        if method in (if_run or []) and not Path(folder).is_dir():
            continue
        metrics = measure(_tuned(Path(folder), model, dtype))
        lost[method] = {column: metrics[name] for column, name in names.items()}
        lost[raw] = {column: metrics[f"{name}_raw"] for column, name in names.items()}
    return {"rows": [{**row, **lost.get(row["method"], {})} for row in result_of(results)["rows"]]}


def _tuned(folder: Path, model: str, dtype: str) -> Any:
    from fedlight.devices import hardware
    from fedlight.modules.sft import SFTModule

    checkpoints = sorted(folder.glob("checkpoints/*.ckpt"), key=lambda file: file.stat().st_mtime)
    with hardware.choose_device("auto") as device:
        if checkpoints and not (folder / "adapter_config.json").is_file():
            load = SFTModule.load_from_checkpoint
            return load(checkpoints[-1], map_location=device, model=model, dtype=dtype).eval()
        module = SFTModule(model, adapter=str(folder), dtype=dtype)
        module.configure_model()
    return module.eval()


def compare_with_oracle(
    seed: int, results: str, answers: dict[str, str], opposition: float = 0.2
) -> dict[str, Any]:
    """Return the table of the embedded world, with scores by its oracle, which knows every client's taste.

    Args:
        seed: seed of the embedded world.
        results: folder of the stage that called ``compare_by_selector``, whose rows are extended.
        answers: method -> file of its answers to the evaluation prompts; the others are compared with ``raw``.
        opposition: opposition of the embedded world's groups.

    Returns:
        ``rows``, those of ``results`` and one per method, with ``win_rate_vs_raw``, the ends of its 95 % interval over
        prompts and mean ``utility``; and one for the oracle. Its accuracy is the highest possible for one taste, given the
        noise of the votes, and its labels are the upper bound of the tuning.
    """
    oracle = Oracle(seed, opposition=opposition)
    utilities: dict[str, list[float]] = {}
    prompts: list[str] = []
    for method, file in answers.items():
        told = [(row["fields"]["prompt"], text) for row in load_rows(file) for text in row["completions"]]
        utilities[method] = [oracle.utility(prompt, text) for prompt, text in told]
        prompts = [prompt for prompt, _ in told]
    known = {row["method"]: row for row in result_of(results)["rows"]}
    known["oracle"] = {
        "method": "oracle",
        "selector_accuracy": oracle.accuracy(toy_rows("heldout", seed=seed, opposition=opposition)),
    }
    rows = []
    for method, scores in utilities.items():
        won = {"win_rate_vs_raw": 0.5}
        if method != "raw":
            won = with_interval("win_rate_vs_raw", wins(scores, utilities["raw"]), prompts)
        rows.append({**known.pop(method), **won, "utility": float(np.mean(scores))})
    return {"rows": [*rows, *known.values()]}


def _accuracy(folder: str) -> dict[str, float]:
    """Return the accuracy of a stage in single orders and, where it is known, in both, with the ends of its interval."""
    metrics = result_of(folder)["metrics"]
    names = {f"both_orders{end}": f"test/accuracy_both_orders{end}" for end in ("", "_low", "_high")}
    names = {"selector_accuracy": "test/accuracy", **names}
    return {column: metrics[name] for column, name in names.items() if name in metrics}
