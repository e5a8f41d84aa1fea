"""FedBis on real votes: 320 crowd workers as clients, tested on debates that were not trained on.

Data: UKPConvArg1 (Habernal and Gurevych, "Which argument is more convincing?", ACL 2016,
https://aclanthology.org/P16-1150), which of two arguments convinces more; training on the votes of single workers,
test on gold labels. Both stances of a debate are on one side. Compared, on the same pairs: the longer argument
wins; a worker alone; the pooled votes; FedBis with as many optimizer steps as the pooled training, within a tenth
(passes of whole rounds, with seed 0). Every model is asked in both orders of a pair; its verdict is the mean log-odds.
Two rows say how far people agree on these pairs: how often a worker's vote is that of the majority of the other workers
(a ceiling for single votes), and how often it is the gold label, which counts this vote too.

The second table is over all folds and seeds: a pair counts by its mean over the seeds, an interval of 95 % is drawn over
pairs and one over whole debates (the honest one: a debate's pairs are alike), and differences are those of the same pairs.
Finished methods are kept in the folder's ``results.json`` and not trained again; ``--methods`` without a name trains none.

Run: python benchmarks/real_votes.py --votes votes.jsonl.gz --gold gold.jsonl.gz [--fold 0] [--model FOLDER]
     python benchmarks/real_votes.py --votes ... --gold ... --folds 5 --fold 0 1 2 3 4 --seed 0 1 2 [--json FILE]
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
from fedlight.datamodules.preferences.baselines import LENGTHS, majority_of_others
from fedlight.datamodules.preferences.baselines import longer_wins as by_length
from fedlight.datamodules.rows.rows import load_rows
from fedlight.datamodules.rows.votes import Votes, read_votes
from fedlight.evaluation.bootstrap import bootstrap_interval
from fedlight.evaluation.judge import judge_both_orders
from fedlight.lightning_cli.cli import lightning_cli
from fedlight.support.files import write_json
from fedlight.support.results import summary

Row = dict[str, Any]
Right = dict[str, float]
"""pair_id -> how right a method is on the pair, in [0, 1]."""
COLUMNS = {name: name for name in ("prompt", "response_a", "response_b", "choice")}
CHOICES = {"a": "a", "b": "b", "tie": "tie"}
LONGER = "longer wins, characters"
OTHERS = "majority of the other workers, on votes"


def debate_of(row: Row) -> str:
    """The debate of a row, whichever the stance.

    Example:
        >>> debate_of({"topic": "tv-is-better-than-books_tv"})
        'tv-is-better-than-books'
    """
    return str(row["topic"].rpartition("_")[0])


def held_out(debates: Sequence[str], fold: int, folds: int = 4) -> set[str]:
    """The debates of one fold; the folds are drawn once and for all, and are as large as each other, within one.

    Raises:
        ValueError: there is no such fold.

    Example:
        >>> parts = [held_out("abcdef", fold, 2) for fold in (0, 1)]
        >>> sorted(parts[0] | parts[1]), parts[0] & parts[1]
        (['a', 'b', 'c', 'd', 'e', 'f'], set())
    """
    order = np.random.default_rng(0).permutation(sorted(set(debates)))
    if not 0 <= fold < folds <= len(order):
        raise ValueError(f"--fold {fold}: {len(order)} debates make {folds} folds, from 0")
    return set(np.array_split(order, folds)[fold].tolist())


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
    both, _ = judge_both_orders(rows, log_odds[:, None], labels)
    return float(((log_odds > 0) == labels).mean()), float(both.mean())


def names_of(rows: Sequence[Row], votes: Votes) -> list[str]:
    """The pair_id of each of the comparisons that are read from rows.

    Raises:
        ValueError: two pairs have the same id.
    """
    names = {(row["prompt"], *sorted((row["response_a"], row["response_b"]))): row["pair_id"] for row in rows}
    if len(set(names.values())) < len(names):
        raise ValueError("two pairs have the same pair_id")
    return [names[pair.fields["prompt"], *sorted((pair.first, pair.second))] for pair in votes.comparisons]


def by_pair(names: Sequence[str], comparison: np.ndarray, right: np.ndarray) -> Right:
    """The mean of each pair's examples; those that are NaN are left out.

    Example:
        >>> by_pair(["p", "q"], np.array([0, 0, 1]), np.array([1.0, 0.0, np.nan]))
        {'p': 0.5}
    """
    found: dict[str, list[float]] = {}
    for number, value in zip(comparison.tolist(), right.tolist(), strict=True):
        if not np.isnan(value):
            found.setdefault(names[number], []).append(value)
    return {name: float(np.mean(values)) for name, values in found.items()}


def train_and_test(
    options: argparse.Namespace, folder: Path, pairs: Sequence[Row], *overrides: str
) -> tuple[Row, Right]:
    """Trains by the config, like the command line, and tests on these pairs."""
    start = time.perf_counter()
    cli = lightning_cli(
        [
            "fit",
            f"--config={conf_path(options.config)}",
            f"--seed_everything={options.seed}",
            f"--trainer.default_root_dir={folder}",
            "--data.split.holdout=null",
            f"--data.split.test_source={write_rows(folder / 'test.jsonl', pairs)}",
            *([f"--model.model={options.model}"] if options.model else []),
            *options.set,
            *overrides,
        ]
    )
    middle = time.perf_counter()
    rows, labels, log_odds = test(cli.model, cli.datamodule)
    one_order, both_orders = accuracies(rows, labels, log_odds)
    right, comparison = judge_both_orders(rows, log_odds[:, None], labels)
    row = {
        "accuracy": both_orders,
        "one_order": one_order,
        "steps": cli.trainer.global_step,
        "seconds": middle - start,
        "test_seconds": time.perf_counter() - middle,
    }
    return row, by_pair(names_of(pairs, gold_votes(pairs)), comparison, right)


@torch.no_grad()
def test(module: Any, data: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The arguments of `accuracies` for all test examples."""
    data.setup("predict")
    module.eval()
    scores = torch.cat(
        [module.predict_step(batch, index) for index, batch in enumerate(data.predict_dataloader())]
    )
    log_odds = (scores[:, 1] - scores[:, 0]).double().cpu().numpy()
    return data.predict_set.rows, data.predict_set.labels, log_odds


def gold_votes(pairs: Sequence[Row]) -> Votes:
    """The gold labels as votes without a client, with the datamodule's numbers of the comparisons."""
    return read_votes(list(pairs), COLUMNS, CHOICES, (), "gold")


def baselines(pairs: Sequence[Row], votes: Sequence[Row]) -> dict[str, Right]:
    """Rules without training on the gold pairs, and how far the workers' votes on them agree."""
    gold = gold_votes(pairs)
    names, comparison = names_of(pairs, gold), np.array(gold.comparison)
    found = {
        f"longer wins, {measure}": by_pair(names, comparison, by_length(gold, length))
        for measure, length in LENGTHS.items()
    }
    tested = [row for row in votes if row["pair_id"] in set(names)]
    own = read_votes(tested, {**COLUMNS, "client": "worker"}, CHOICES, (), "votes")
    own_names, of = names_of(tested, own), np.array(own.comparison)
    best = {pair["pair_id"]: pair[f"response_{pair['choice']}"] for pair in pairs}
    answers = [
        (pair.first, pair.second)[winner]
        for pair, winner in ((own.comparisons[c], w) for c, w in zip(own.comparison, own.winner, strict=True))
    ]
    agrees = np.array(
        [float(text == best[own_names[c]]) for text, c in zip(answers, own.comparison, strict=True)]
    )
    found[OTHERS] = by_pair(own_names, of, majority_of_others(own))
    found["a worker's vote, which gold contains"] = by_pair(own_names, of, agrees)
    return found


def federated(options: argparse.Namespace, pairs: Sequence[Row]) -> tuple[Row, Right]:
    """FedBis with the config's settings."""
    return train_and_test(
        options,
        options.folder / "fedbis",
        pairs,
        f"--data.source={options.folder / 'train.jsonl'}",
        f"--trainer.max_epochs={options.rounds}",
        *options.federated,
    )


def centralised(options: argparse.Namespace, pairs: Sequence[Row]) -> tuple[Row, Right]:
    """The pooled votes; an epoch of 20 steps, so that the learning rate can fall by epochs."""
    return train_and_test(
        options,
        options.folder / "centralised",
        pairs,
        "--federated=null",
        f"--data.source={options.folder / 'train.jsonl'}",
        f"--trainer.max_epochs={-(-options.steps // 20)}",
        f"--trainer.max_steps={options.steps}",
        "--trainer.limit_train_batches=20",
        *options.centralised,
    )


def alone(
    options: argparse.Namespace, worker: str, votes: Sequence[Row], pairs: Sequence[Row]
) -> tuple[Row, Right]:
    """One worker's own votes: at most 5 batches in each of 6 epochs."""
    folder = options.folder / "alone" / worker
    own = [row for row in votes if row["worker"] == worker]
    result, right = train_and_test(
        options,
        folder,
        sample(pairs, options.pairs_alone),
        "--federated=null",
        f"--data.source={write_rows(folder / 'train.jsonl', own)}",
        "--trainer.max_epochs=6",
        "--trainer.limit_train_batches=5",
        *options.centralised,
    )
    return {"votes": sum(row["choice"] != "tie" for row in own), **result}, right


def write_rows(file: Path, rows: Sequence[Row]) -> Path:
    """Writes JSON lines; gives the file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def split(
    options: argparse.Namespace, votes: Sequence[Row], gold: Sequence[Row], fold: int
) -> tuple[list[Row], list[Row]]:
    """Training votes, written to the folder as well, and decided gold pairs on the held-out debates."""
    test_debates = held_out([debate_of(row) for row in gold], fold, options.folds)
    train = [row for row in votes if debate_of(row) not in test_debates]
    pairs = [row for row in gold if debate_of(row) in test_debates and row["choice"] != "tie"]
    pairs = sample(pairs, options.pairs)
    write_rows(options.folder / "train.jsonl", train)
    return train, pairs


def sample(pairs: Sequence[Row], count: int) -> list[Row]:
    """So many pairs, always the same; all for 0."""
    chosen = np.random.default_rng(0).permutation(len(pairs))[: count or None]
    return [pairs[index] for index in sorted(chosen.tolist())]


def show(rows: Sequence[Row]) -> None:
    """One line for each method of a fold and a seed, with the spread over workers."""
    plain = [{key: value for key, value in row.items() if key not in ("worker", "fold")} for row in rows]
    columns = ("accuracy", "one_order", "steps", "seconds", "votes")
    print(f"{'method':42}" + "".join(f"{column:>18}" for column in columns))
    for method, values in summary(plain).items():
        print(f"{method:42}" + "".join(f"{values.get(column, '-'):>18}" for column in columns))


def parse() -> argparse.Namespace:
    """The options; unknown ones go to the config."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--votes", default="data/ukpconvarg/votes.jsonl.gz")
    parser.add_argument("--gold", default="data/ukpconvarg/gold.jsonl.gz")
    parser.add_argument("--config", default="ukpconvarg.yaml")
    parser.add_argument("--model", help="hub name or folder; the config's if not given")
    parser.add_argument(
        "--methods",
        nargs="*",
        default=["fedbis", "centralised", "alone"],
        help="to train where they are not finished; none: what is finished is put together",
    )
    parser.add_argument("--rounds", type=int, default=8, help="of FedBis")
    parser.add_argument(
        "--steps", type=int, default=340, help="of the pooled training; as many as FedBis takes"
    )
    parser.add_argument("--workers", type=int, default=8, help="how many train alone, drawn from all")
    parser.add_argument(
        "--pairs", type=int, default=0, help="tested on; drawn from the held-out gold pairs; 0: all"
    )
    parser.add_argument("--pairs_alone", type=int, default=0, help="of these, for workers alone; 0: all")
    parser.add_argument("--folds", type=int, default=4, help="into which the debates are divided")
    parser.add_argument("--fold", type=int, nargs="+", default=[0])
    parser.add_argument("--seed", type=int, nargs="+", default=[0])
    parser.add_argument("--json", type=Path, help="where the rows over all folds and seeds go as well")
    parser.add_argument("--folder", type=Path, default=Path("runs/real_votes"))
    parser.add_argument("--set", nargs="+", default=[], help="overrides of the config for all, as KEY=VALUE")
    parser.add_argument("--federated", nargs="+", default=[], help="for FedBis")
    parser.add_argument(
        "--centralised",
        nargs="+",
        default=["model.optimizer.schedule=cosine"],  # what averaging over clients does for FedBis
        help="for pooled training and for workers alone",
    )
    options = parser.parse_args()
    for name in ("set", "federated", "centralised"):
        setattr(options, name, [f"--{setting}" for setting in getattr(options, name)])
    return options


def over_all(runs: Sequence[Row]) -> list[Row]:
    """A row for each method, over all folds and seeds.

    Of a method that is not trained in all of them, ``runs`` says how many folds each seed has, and a pair counts by the mean
    over the seeds that it has. Differences are those of the same pairs in the same folds and seeds.

    Args:
        runs: one for each fold and seed: ``seed``, ``rows`` of `run`, ``debates`` (pair_id -> debate) and ``right``
            (method -> `Right`).
    """
    debates = {name: debate for run in runs for name, debate in run["debates"].items()}
    rows = []
    for method in dict.fromkeys(method for run in runs for method in run["right"]):
        own = [run for run in runs if run["right"].get(method)]
        right = mean_by_pair([run["right"][method] for run in own])
        row: Row = {"method": method, "accuracy": float(np.mean([*right.values()]))}
        row |= {"pairs": len(right), "debates": len({debates[name] for name in right})}
        row |= interval("pairs", [*right.values()], [*right])
        row |= interval("debates", [*right.values()], [debates[name] for name in right])
        trained = [of for run in own for of in run["rows"] if of["method"] == method and "seed" in of]
        if trained:
            row["one_order"] = float(np.mean([of["one_order"] for of in trained]))
            row["runs"] = ", ".join(
                str(sum(run["seed"] == seed for run in own)) for seed in sorted({r["seed"] for r in runs})
            )
            row |= spread_of_seeds(method, own)
        for other, label in ((LONGER, "over_longer"), ("pooled votes", "over_pooled")):
            differences = mean_by_pair(
                [
                    {  # a repeated comparison is left out where all are judged, and may be in a sample
                        name: value - rival[name]
                        for name, value in run["right"][method].items()
                        if name in rival
                    }
                    for run in own
                    if (rival := run["right"].get(other))
                ]
            )
            if differences and method not in (other, OTHERS):  # which is no accuracy on gold labels
                row[label] = float(np.mean([*differences.values()]))
                row[f"{label}_pairs"] = len(differences)
                row |= interval(label, [*differences.values()], [debates[name] for name in differences])
        rows.append(row)
    return rows


def mean_by_pair(rights: Sequence[Right]) -> Right:
    """The mean of each pair over the runs that have it.

    Example:
        >>> mean_by_pair([{"p": 1.0, "q": 0.0}, {"p": 0.5}])
        {'p': 0.75, 'q': 0.0}
    """
    found: dict[str, list[float]] = {}
    for right in rights:
        for name, value in right.items():
            found.setdefault(name, []).append(value)
    return {name: float(np.mean(values)) for name, values in found.items()}


def spread_of_seeds(method: str, runs: Sequence[Row]) -> Row:
    """The standard deviation over the seeds that have all pairs; nothing where fewer than two have them."""
    of_seed: dict[int, Right] = {}
    for run in runs:
        of_seed.setdefault(run["seed"], {}).update(run["right"][method])
    most = max(map(len, of_seed.values()))
    means = [float(np.mean([*right.values()])) for right in of_seed.values() if len(right) == most]
    return {"sd_over_seeds": float(np.std(means, ddof=1))} if len(means) > 1 else {}


def interval(name: str, values: Sequence[float], of: Sequence[str]) -> Row:
    """The ends of the 95 % interval of a mean, drawn over pairs or debates.

    Example:
        >>> interval("debates", [0.5, 0.5, 0.5], ["a", "a", "b"])
        {'debates_low': 0.5, 'debates_high': 0.5}
    """
    low, high = bootstrap_interval(values, of)
    return {f"{name}_low": low, f"{name}_high": high}


def show_all(rows: Sequence[Row]) -> None:
    """One line for each method, in Markdown."""
    names = "method | accuracy | 95 % over pairs | over debates | over longer wins | over pooled votes | sd over seeds"
    print(f"| {names} | pairs | folds of each seed |")
    print("|---" * 9 + "|")
    for row in rows:
        ends = {
            name: f"[{row[f'{name}_low']:.3f}, {row[f'{name}_high']:.3f}]" for name in ("pairs", "debates")
        }
        more = [
            f"{row[name]:+.3f} [{row[f'{name}_low']:+.3f}, {row[f'{name}_high']:+.3f}]"
            if name in row
            else "-"
            for name in ("over_longer", "over_pooled")
        ]
        cells = [row["method"], f"{row['accuracy']:.3f}", ends["pairs"], ends["debates"], *more]
        spread = f"{row['sd_over_seeds']:.3f}" if "sd_over_seeds" in row else "-"
        print("| " + " | ".join([*cells, spread, f"{row['pairs']:,}", row.get("runs", "-")]) + " |")


def settings_of(options: argparse.Namespace) -> Row:
    """Settings that determine the rows of a fold and a seed."""
    names = (
        "model",
        "rounds",
        "steps",
        "workers",
        "pairs",
        "pairs_alone",
        "folds",
        "set",
        "federated",
        "centralised",
    )
    return {name: getattr(options, name) for name in names}


def run(options: argparse.Namespace, votes: Sequence[Row], gold: Sequence[Row], fold: int, seed: int) -> Row:
    """Trains the rest of one fold and one seed; gives its results.

    Raises:
        ValueError: the folder has results of other settings.
    """
    folder = options.folder / f"{Path(options.config).stem}_fold{fold}_seed{seed}"
    options = argparse.Namespace(**{**vars(options), "folder": folder, "seed": seed})
    file = folder / "results.json"
    results: Row = json.loads(file.read_text()) if file.is_file() else {}
    if results and results.get("settings") != settings_of(options):
        raise ValueError(f"{file} was made with other settings: give another --folder, or remove it")
    train, pairs = split(options, votes, gold, fold)
    workers = np.random.default_rng(0).permutation(sorted({row["worker"] for row in train}))
    if not results:
        right = baselines(pairs, votes)
        rows = [{"method": name, "accuracy": float(np.mean([*own.values()]))} for name, own in right.items()]
        first = float(np.mean([pair["choice"] == "a" for pair in pairs]))
        rows.insert(0, {"method": "always the more frequent position", "accuracy": max(first, 1 - first)})
        debates = {pair["pair_id"]: debate_of(pair) for pair in pairs}
        results = {"settings": settings_of(options), "fold": fold, "seed": seed, "pairs": len(pairs)}
        results |= {"debates": debates, "rows": rows, "right": right}
    jobs: list[tuple[Row, Callable[[], tuple[Row, Right]]]] = []
    if "fedbis" in options.methods:
        jobs.append(({"method": "FedBis"}, lambda: federated(options, pairs)))
    if "centralised" in options.methods:
        jobs.append(({"method": "pooled votes"}, lambda: centralised(options, pairs)))
    if "alone" in options.methods:
        jobs += [
            ({"method": "a worker alone", "worker": w}, lambda w=w: alone(options, w, train, pairs))
            for w in workers[: options.workers].tolist()
        ]
    for key, job in jobs:
        if not any(key.items() <= row.items() for row in results["rows"]):
            row, right = job()
            results["rows"].append({**key, "seed": seed, "fold": fold, **row})
            # Of several workers alone a pair counts by their mean.
            done = [own for own in results["rows"] if own["method"] == key["method"]]
            known = results["right"].get(key["method"], {})
            results["right"][key["method"]] = {
                name: known.get(name, 0.0) * (1 - 1 / len(done)) + value / len(done)
                for name, value in right.items()
            }
            write_json(file, results)
            print(json.dumps(results["rows"][-1]), flush=True)
    write_json(file, results)
    print(
        f"fold {fold}, seed {seed}: {len(pairs)} gold pairs on {', '.join(sorted({*results['debates'].values()}))}"
    )
    show(results["rows"])
    return results


def main() -> None:
    """Trains the rest and prints the tables."""
    options = parse()
    if missing := [file for file in (options.votes, options.gold) if not Path(file).exists()]:
        print(f"nothing to measure: no file {' and no file '.join(missing)}; give --votes and --gold")
        return
    votes, gold = list(load_rows(options.votes)), list(load_rows(options.gold))
    runs = [run(options, votes, gold, fold, seed) for seed in options.seed for fold in options.fold]
    rows = over_all(runs)
    show_all(rows)
    if options.json:
        write_json(options.json, rows)


if __name__ == "__main__":
    main()
