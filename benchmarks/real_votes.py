"""FedBis on real votes: 320 crowd workers as clients, tested on debates that nobody trained on.

Data: UKPConvArg1 (Habernal and Gurevych, "Which argument is more convincing?", ACL 2016,
https://aclanthology.org/P16-1150), which of two arguments convinces more; training on the votes of single workers,
test on gold labels. Both stances of a debate are on one side. Compared, on the same pairs: the longer argument
wins; a worker alone; the pooled votes; FedBis with as many optimizer steps as the pooled training, within two in
a hundred (whole rounds). Every model is asked in both orders of a pair, and its verdict is the mean log-odds of the two.

Finished methods are kept in the folder's ``results.json`` and not trained again.

Run: python benchmarks/real_votes.py --votes votes.jsonl.gz --gold gold.jsonl.gz [--fold 0] [--model FOLDER]
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedlight.conf import path as conf_path
from fedlight.datamodules.rows.rows import load_rows
from fedlight.lightning_cli.cli import lightning_cli
from fedlight.support.files import write_json
from fedlight.support.results import summary

Row = dict[str, Any]
DEBATES_PER_FOLD = 3


def debate_of(row: Row) -> str:
    """The debate of a row, whichever the stance.

    Example:
        >>> debate_of({"topic": "tv-is-better-than-books_tv"})
        'tv-is-better-than-books'
    """
    return str(row["topic"].rpartition("_")[0])


def held_out(debates: Sequence[str], fold: int) -> set[str]:
    """The debates of one fold; the folds are drawn once and for all.

    Raises:
        ValueError: there is no such fold.

    Example:
        >>> folds = [held_out("abcdef", fold) for fold in (0, 1)]
        >>> sorted(folds[0] | folds[1]), folds[0] & folds[1]
        (['a', 'b', 'c', 'd', 'e', 'f'], set())
    """
    order = np.random.default_rng(0).permutation(sorted(set(debates))).tolist()
    chosen = order[DEBATES_PER_FOLD * fold : DEBATES_PER_FOLD * (fold + 1)]
    if fold < 0 or not chosen:
        raise ValueError(
            f"--fold {fold}: {len(order)} debates make {len(order) // DEBATES_PER_FOLD} folds, from 0"
        )
    return set(chosen)


def longer_wins(pairs: Sequence[Row], length: Callable[[str], int]) -> float:
    """Share of pairs in which the longer answer is the better one; equally long ones count half.

    Example:
        >>> pairs = [{"response_a": "long", "response_b": "no", "choice": "a"}]
        >>> longer_wins([*pairs, {"response_a": "x", "response_b": "y", "choice": "b"}], len)
        0.75
    """
    signs = [np.sign(length(pair["response_a"]) - length(pair["response_b"])) for pair in pairs]
    return float(
        np.mean([(1 + (s if p["choice"] == "a" else -s)) / 2 for s, p in zip(signs, pairs, strict=True)])
    )


def accuracies(rows: np.ndarray, labels: np.ndarray, log_odds: np.ndarray) -> tuple[float, float]:
    """Accuracy asked in single orders, and with the two orders of a pair averaged.

    Args:
        rows: which text each example is, ``(examples,)``; 2c and 2c + 1 are the two orders of pair c.
        labels: 1 where B is better, ``(examples,)``.
        log_odds: log-probability of B less that of A, ``(examples,)``.

    Example:
        >>> accuracies(np.array([0, 1]), np.array([0, 1]), np.array([0.5, 2.0]))
        (0.5, 1.0)
    """
    of_row = dict(zip(rows.tolist(), log_odds.tolist(), strict=True))
    both = log_odds - np.array([of_row[row ^ 1] for row in rows.tolist()])
    return float(((log_odds > 0) == labels).mean()), float(((both > 0) == labels).mean())


def train_and_test(options: argparse.Namespace, folder: Path, *overrides: str) -> Row:
    """Trains by the config, as the command line would, and tests."""
    start = time.perf_counter()
    cli = lightning_cli(
        [
            "fit",
            f"--config={conf_path(options.config)}",
            f"--seed_everything={options.seed}",
            f"--trainer.default_root_dir={folder}",
            "--data.holdout=null",
            *([f"--model.model={options.model}"] if options.model else []),
            *options.set,
            *overrides,
        ]
    )
    middle = time.perf_counter()
    one_order, both_orders = test(cli.model, cli.datamodule)
    return {
        "accuracy": both_orders,
        "one_order": one_order,
        "steps": cli.trainer.global_step,
        "seconds": middle - start,
        "test_seconds": time.perf_counter() - middle,
    }


@torch.no_grad()
def test(module: Any, data: Any) -> tuple[float, float]:
    """See `accuracies`."""
    data.setup("predict")
    module.eval()
    scores = torch.cat(
        [module.predict_step(batch, index) for index, batch in enumerate(data.predict_dataloader())]
    )
    log_odds = (scores[:, 1] - scores[:, 0]).double().cpu().numpy()
    return accuracies(data.predict_set.rows, data.predict_set.labels, log_odds)


def baselines(pairs: Sequence[Row]) -> list[Row]:
    """Rules without training."""
    first = float(np.mean([pair["choice"] == "a" for pair in pairs]))
    return [
        {"method": "always the more frequent position", "accuracy": max(first, 1 - first)},
        {"method": "longer wins, characters", "accuracy": longer_wins(pairs, len)},
        {"method": "longer wins, words", "accuracy": longer_wins(pairs, lambda text: len(text.split()))},
    ]


def federated(options: argparse.Namespace) -> Row:
    """FedBis, as the config has it."""
    return train_and_test(
        options,
        options.folder / "fedbis",
        f"--data.source={options.folder / 'train.jsonl'}",
        f"--data.test_source={options.folder / 'test.jsonl'}",
        f"--trainer.max_epochs={options.rounds}",
        *options.federated,
    )


def centralised(options: argparse.Namespace) -> Row:
    """The pooled votes; an epoch of 20 steps, so that the learning rate can fall by epochs."""
    return train_and_test(
        options,
        options.folder / "centralised",
        "--federated=null",
        f"--data.source={options.folder / 'train.jsonl'}",
        f"--data.test_source={options.folder / 'test.jsonl'}",
        f"--trainer.max_epochs={-(-options.steps // 20)}",
        f"--trainer.max_steps={options.steps}",
        "--trainer.limit_train_batches=20",
        *options.centralised,
    )


def alone(options: argparse.Namespace, worker: str, votes: Sequence[Row], pairs: Sequence[Row]) -> Row:
    """One worker's own votes: at most 5 batches in each of 6 epochs."""
    folder = options.folder / "alone" / worker
    own = [row for row in votes if row["worker"] == worker]
    write_rows(folder / "train.jsonl", own)
    write_rows(folder / "test.jsonl", sample(pairs, options.pairs_alone))
    result = train_and_test(
        options,
        folder,
        "--federated=null",
        f"--data.source={folder / 'train.jsonl'}",
        f"--data.test_source={folder / 'test.jsonl'}",
        "--trainer.max_epochs=6",
        "--trainer.limit_train_batches=5",
        *options.centralised,
    )
    return {"worker": worker, "votes": sum(row["choice"] != "tie" for row in own), **result}


def write_rows(file: Path, rows: Sequence[Row]) -> None:
    """Writes JSON lines."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def split(options: argparse.Namespace) -> tuple[list[Row], list[Row]]:
    """Training votes, and decided gold pairs on the held-out debates; both are written to the folder as well."""
    votes, gold = list(load_rows(options.votes)), list(load_rows(options.gold))
    test_debates = held_out([debate_of(row) for row in gold], options.fold)
    train = [row for row in votes if debate_of(row) not in test_debates]
    pairs = [row for row in gold if debate_of(row) in test_debates and row["choice"] != "tie"]
    pairs = sample(pairs, options.pairs)
    write_rows(options.folder / "train.jsonl", train)
    write_rows(options.folder / "test.jsonl", pairs)
    return train, pairs


def sample(pairs: Sequence[Row], count: int) -> list[Row]:
    """So many pairs, always the same; all for 0."""
    chosen = np.random.default_rng(0).permutation(len(pairs))[: count or None]
    return [pairs[index] for index in sorted(chosen.tolist())]


def show(rows: Sequence[Row]) -> None:
    """One line for each method."""
    plain = [{key: value for key, value in row.items() if key not in ("worker", "fold")} for row in rows]
    columns = ("accuracy", "one_order", "steps", "seconds", "votes")
    print(f"{'method':36}" + "".join(f"{column:>18}" for column in columns))
    for method, values in summary(plain).items():
        print(f"{method:36}" + "".join(f"{values.get(column, '-'):>18}" for column in columns))


def parse() -> argparse.Namespace:
    """The options; what is not known here goes to the config."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--votes", default="data/ukpconvarg/votes.jsonl.gz")
    parser.add_argument("--gold", default="data/ukpconvarg/gold.jsonl.gz")
    parser.add_argument("--config", default="ukpconvarg.yaml")
    parser.add_argument("--model", help="hub name or folder; the config's if not given")
    parser.add_argument("--methods", nargs="+", default=["fedbis", "centralised", "alone"])
    parser.add_argument("--rounds", type=int, default=8, help="of FedBis")
    parser.add_argument(
        "--steps", type=int, default=300, help="of the pooled training; as many as FedBis takes"
    )
    parser.add_argument("--workers", type=int, default=8, help="how many train alone, drawn from all")
    parser.add_argument(
        "--pairs", type=int, default=0, help="tested on; drawn from the held-out gold pairs; 0: all"
    )
    parser.add_argument("--pairs_alone", type=int, default=0, help="of these, for workers alone; 0: all")
    parser.add_argument("--fold", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("runs/real_votes"))
    parser.add_argument("--set", nargs="+", default=[], help="overrides of the config for all, as KEY=VALUE")
    parser.add_argument("--federated", nargs="+", default=[], help="for FedBis")
    parser.add_argument(
        "--centralised",
        nargs="+",
        default=["model.lr_schedule=cosine"],  # what averaging over clients does for FedBis
        help="for pooled training and for workers alone",
    )
    options = parser.parse_args()
    for name in ("set", "federated", "centralised"):
        setattr(options, name, [f"--{setting}" for setting in getattr(options, name)])
    return options


def main() -> None:
    """Trains what is not done yet and prints the table."""
    options = parse()
    if missing := [file for file in (options.votes, options.gold) if not Path(file).exists()]:
        print(f"nothing to measure: no file {' and no file '.join(missing)}; give --votes and --gold")
        return
    options.folder = options.folder / f"{Path(options.config).stem}_fold{options.fold}_seed{options.seed}"
    votes, pairs = split(options)
    workers = (
        np.random.default_rng(0)
        .permutation(sorted({row["worker"] for row in votes}))[: options.workers]
        .tolist()
    )
    jobs: list[tuple[Row, Callable[[], Row]]] = []
    if "fedbis" in options.methods:
        jobs.append(({"method": "FedBis"}, lambda: federated(options)))
    if "centralised" in options.methods:
        jobs.append(({"method": "pooled votes"}, lambda: centralised(options)))
    if "alone" in options.methods:
        jobs += [
            ({"method": "a worker alone", "worker": w}, lambda w=w: alone(options, w, votes, pairs))
            for w in workers
        ]
    file = options.folder / "results.json"
    results = (
        json.loads(file.read_text()) if file.is_file() else {"rows": baselines(pairs), "pairs": len(pairs)}
    )
    for key, job in jobs:
        if not any(key.items() <= row.items() for row in results["rows"]):
            results["rows"].append({**key, "seed": options.seed, "fold": options.fold, **job()})
            write_json(file, results)
            print(json.dumps(results["rows"][-1]), flush=True)
    write_json(file, results)
    print(f"{results['pairs']} gold pairs on {', '.join(sorted({debate_of(pair) for pair in pairs}))}")
    show(results["rows"])


if __name__ == "__main__":
    main()
