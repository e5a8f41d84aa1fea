"""Validation of the global model on the clients' own rows: the numbers of a node, and the server's checks and means.

A node runs the module's ``validation_step`` on the validation rows of each client that it serves. It sends shares of right
answers, sums of the means that the step logs, and numbers of rows. The server asks after each round that Lightning would
validate, if ``trainer.callbacks`` has `ClientAccuracy`.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import lightning as L
import numpy as np
import torch
from torch.utils.data import DataLoader, Subset

from fedlight.callbacks.logs.client_accuracy import Sums, Tally, run_steps, stack_outcomes, tally
from fedlight.callbacks.loop.parts.limits import Limits, capped
from fedlight.callbacks.loop.run import ValidatesByClient
from fedlight.federation.algorithm import WeightedSum
from fedlight.federation.client import Update
from fedlight.flower.loops.replies import MOST_STEPS, MOST_VALUE, sums_of
from fedlight.flower.messages import Parcel, Refused, value_of
from fedlight.flower.secure.ring import BYTES, PAYLOAD, Ring, from_bytes

OF_VOTES = {"vote": (1,)}
"""Shapes of the sum that secure aggregation takes of a validation."""
MOST_SELECTORS = 1000
"""Most selectors of a module that a node may report on."""
GRID = 64
"""Votes in a masked sum are multiples of one over this: exact shares would give each client's number of right answers."""
OF_SERVER = ("val/client_", "val/own_")
"""Beginnings of names that the server computes from the shares of right answers."""


@dataclass(frozen=True)
class Validated:
    """Results of a client's validation rows: sums of logged means, and the shares of right answers, None without these."""

    sums: Sums
    tally: Tally | None


def validate_clients(
    trainer: L.Trainer, module: L.LightningModule, clients: Sequence[str]
) -> dict[str, Validated]:
    """Return the results of those of the clients that have validation rows; none where rows are not known by client."""
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    positions = (data.val_client_indices if isinstance(data, ValidatesByClient) else None) or {}
    loader = data.val_dataloader() if positions else None
    loader = loader[0] if isinstance(loader, Sequence) and loader else loader  # whose clients are known
    if not isinstance(loader, DataLoader):
        return {}
    results = {}
    hooks = module.on_validation_epoch_start, module.on_validation_epoch_end
    for name in clients:
        places = positions.get(name, ())
        if len(places):
            rows = Subset(loader.dataset, [int(place) for place in places])
            batches = DataLoader(rows, loader.batch_size, collate_fn=loader.collate_fn)
            context = trainer.precision_plugin.val_step_context
            outputs, sums = run_steps(module, module.validation_step, context, batches, hooks)
            outcomes = stack_outcomes(outputs)
            everything = {name: np.arange(len(places))}
            results[name] = Validated(sums, None if outcomes is None else tally(outcomes, everything)[name])
    return results


def as_sent(sums: Sums, counts: bool) -> dict[str, list[float]]:
    """Return sums and counts; without ``counts`` means of one example each, which do not say how many there are.

    Left out is a sum that is not finite, which would cost all other results of the node.
    """
    finite = {name: (s, n) for name, (s, n) in sums.items() if abs(s) <= MOST_VALUE}
    return {name: [s, n] if counts else [s / n, 1] for name, (s, n) in finite.items()}


def to_send(results: Mapping[str, Validated], counts: bool) -> dict[str, Any]:
    """Return results as plain values; without ``counts`` each client counts as one row."""
    return {
        name: {
            "validation": as_sent(each.sums, counts),
            "tally": None if each.tally is None else asdict(each.tally) | ({} if counts else {"examples": 1}),
        }
        for name, each in results.items()
    }


def read_validated(answer: Parcel, clients: Sequence[str], most_metrics: int) -> dict[str, Validated]:
    """Return the results in a node's answer; raise Refused for anything but finite numbers of these clients."""
    given = value_of(answer.header, "validated", dict)
    results = {}
    for name, entry in given.items():
        if name not in clients or not isinstance(entry, dict):
            raise Refused(f"it has validated {name!r:.60}, which it was not asked for")
        results[name] = Validated(sums_of(entry, "validation", most_metrics), _tally(entry))
    return results


def _tally(entry: Mapping[str, Any]) -> Tally | None:
    given = value_of(entry, "tally", (dict, type(None)))
    if given is None:
        return None
    examples, correct = value_of(given, "examples", int), value_of(given, "correct", list)
    vote = value_of(given, "vote", (float, type(None)))
    if not 0 < examples < MOST_STEPS or not 0 < len(correct) <= MOST_SELECTORS:
        raise Refused(f"its validation has {examples} rows and {len(correct)} selectors")
    for share in [*correct, *([] if vote is None else [vote])]:
        if not 0 <= value_of({"a share of right answers": share}, "a share of right answers", float) <= 1:
            raise Refused(f"its share of right answers is {share:g}")
    return Tally(examples, correct, vote)


def votes_of(results: Mapping[str, Validated]) -> dict[str, float]:
    """Return each client's share of right answers, rounded to the grid of a masked sum.

    Raises:
        Refused: a module gives none; losses are not summed, since one client could report any.
    """
    votes = {name: None if each.tally is None else each.tally.vote for name, each in results.items()}
    if None in votes.values():
        raise Refused(
            "its validation step gives no 'vote', and secure-aggregation sums nothing else of a validation"
        )
    return {name: round(vote * GRID) / GRID for name, vote in votes.items() if vote is not None}


def sum_of_votes(votes: Mapping[str, float]) -> WeightedSum:
    """Return a sum with the same weight for each client."""
    total = WeightedSum("weight")
    for name, vote in votes.items():
        total.add(Update(name, {"vote": torch.tensor([vote], dtype=torch.float64)}, 1.0))
    return total


def read_masked_votes(answer: Parcel, clients: Sequence[str]) -> tuple[list[str], Ring]:
    """Return the validated clients of a node and its masked sum; raise Refused for anything else."""
    names, data = value_of(answer.header, "validated", list), answer.payloads.get(PAYLOAD, b"")
    texts = all(isinstance(name, str) for name in names)
    if not texts or len({*names}) != len(names) or not {*names} <= {*clients}:
        raise Refused("it has validated other clients than it was asked for")
    if len(data) != 2 * BYTES or len(answer.payloads) != 1:
        raise Refused(f"its masked sum is not 2 elements of {BYTES} bytes")
    return names, from_bytes(data)


def mean_vote(partial: Mapping[str, Any]) -> float:
    """Return the mean over clients of an unmasked sum; raise Refused for one that is no share."""
    total = WeightedSum("weight")
    total.merge(partial)
    mean = float(total.result()["vote"])
    if not 0 <= mean <= 1:
        raise Refused(f"the mean share of right answers is {mean:g}: a node has sent another sum")
    return mean


def means_of(
    results: Mapping[str, Validated], limits: Limits, least: int = 1
) -> tuple[dict[str, float], dict[str, Tally]]:
    """Return weighted means over clients, by name, and the shares of right answers of those that agree on the selectors.

    A client counts with its number of rows, at most with the largest share of ``limits``. A name counts if it begins with
    ``val/``, the server computes none like it, and more than half of the clients have it. A number of selectors counts if it
    is at least ``least`` and more than half of the clients with selectors have it, and so do votes of an odd number: a node
    could make others up.

    Examples:
        >>> results = {name: Validated({"val/loss": (loss, n)}, None) for name, loss, n in [("a", 2.0, 2), ("b", 6.0, 2)]}
        >>> means_of(results, Limits())
        ({'val/loss': 2.0}, {})
    """
    sent = {name for each in results.values() for name in each.sums}
    names = {name for name in sent if name.startswith("val/") and not name.startswith(OF_SERVER)}
    means = {}
    for name in sorted(names):
        there = {client: each.sums[name] for client, each in results.items() if name in each.sums}
        if 2 * len(there) > len(results):
            means[name] = _mean(
                {client: s / n for client, (s, n) in there.items()},
                {c: n for c, (_, n) in there.items()},
                limits,
            )
    tallies = {client: each.tally for client, each in results.items() if each.tally is not None}
    numbers, half = Counter(len(each.correct) for each in tallies.values()), len(tallies) / 2
    usual = next((n for n, times in numbers.items() if n >= least and times > half), 0)
    tallies = {client: each for client, each in tallies.items() if len(each.correct) == usual}
    votes = {client: each.vote for client, each in tallies.items() if each.vote is not None}
    if usual % 2 == 0 or 2 * len(votes) <= len(tallies):
        tallies = {client: replace(each, vote=None) for client, each in tallies.items()}
    elif votes:
        means["val/accuracy"] = _mean(votes, {client: tallies[client].examples for client in votes}, limits)
    return means, tallies


def _mean(values: Mapping[str, float], claimed: Mapping[str, int], limits: Limits) -> float:
    weights = capped(claimed, limits.largest_share(len(claimed)))
    return math.fsum(values[name] * weights[name] for name in values) / math.fsum(weights.values())
