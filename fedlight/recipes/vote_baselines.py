"""Stages of recipes for the rows of `fedlight.datamodules.preferences.baselines`, which need no training."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jsonargparse import ArgumentParser
from lightning.pytorch.utilities import rank_zero_info

from fedlight.datamodules.clients.partition import by_key
from fedlight.datamodules.preferences.baselines import LENGTHS, longer_wins, majority_of_others
from fedlight.datamodules.preferences.datamodule import PreferenceDataModule
from fedlight.datamodules.rows.rows import RowsError, load_rows
from fedlight.datamodules.rows.votes import Votes, read_votes
from fedlight.evaluation.bootstrap import bootstrap_interval
from fedlight.evaluation.by_client import per_client, spread
from fedlight.recipes.overlay import set_in
from fedlight.recipes.stages import settings_in
from fedlight.support.checks import check_choice


def rule(
    test: str,
    columns: dict[str, str],
    choice_values: dict[str, Any],
    rule: str,
    votes: str | None = None,
) -> dict[str, Any]:
    """Return the accuracy of a rule without training on the votes of a test set, like a ``test`` stage.

    Args:
        test: rows of the test votes.
        columns: see `fedlight.datamodules.rows.columns`; with ``client``, accuracies by voter are among the metrics.
        choice_values: raw values of the choice; see `fedlight.datamodules.rows.votes`.
        rule: ``characters`` or ``words``: the longer answer wins, counted so; ``voters``: the majority of the other voters.
        votes: rows of all votes, for ``voters``; None: those of ``test``.

    Returns:
        ``metrics``: ``test/accuracy``; ``test/accuracy_both_orders``, the same, with the ends of its interval over
        comparisons; those of `ClientAccuracy`; and ``test/votes`` and ``test/votes_unjudged``, the numbers of votes that the
        rule judges and that it does not, for lack of other voters. Without a judged vote the numbers alone.
        And ``votes`` and ``comparisons`` of the test set.

    Raises:
        RowsError: a vote of ``test`` is not among ``votes``; or see `read_votes`.
    """
    check_choice("rule", rule, (*LENGTHS, "voters"))
    tested = read_votes(load_rows(test), columns, choice_values, (), test)
    if rule == "voters":
        known = read_votes(load_rows(votes or test), columns, choice_values, (), votes or test)
        right = _look_up(tested, known, majority_of_others(known))
    else:
        right = longer_wins(tested, LENGTHS[rule])
    return _result(tested, right)


def rule_on_data(data: str, rule: str, settings: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the accuracy of a rule without training on a datamodule's test votes for a selector.

    Votes that do not fit into the selector's input are left out, as in its test.

    Args:
        data: config of a `PreferenceDataModule`, such as ``data/tldr_comparisons.yaml``.
        rule: as in `rule`; where the voters are unknown, each comparison has one label and ``voters`` judges none.
        settings: arguments of the datamodule, such as ``max_tokens``, where the selector's test has others.

    Returns:
        As `rule`.
    """
    check_choice("rule", rule, (*LENGTHS, "voters"))
    votes = _tested_votes(data, settings or {})
    right = np.full(len(votes.winner), np.nan)  # silent without voters
    if rule in LENGTHS:
        right = longer_wins(votes, LENGTHS[rule])
    elif votes.clients:
        right = majority_of_others(votes)
    return _result(votes, right)


def _tested_votes(data: str, changes: Mapping[str, Any]) -> Votes:
    part = settings_in(data)
    for key, value in changes.items():
        part = set_in(part, key, value)
    parser = ArgumentParser(exit_on_error=False, parser_mode="omegaconf+")  # raise, do not end the process
    parser.add_subclass_arguments(PreferenceDataModule, "data")
    module = parser.instantiate_classes(parser.parse_object({"data": part})).data
    module.setup("test")
    votes: Votes = module.test_votes
    return votes


def _result(tested: Votes, right: np.ndarray) -> dict[str, Any]:
    """Return the result of a rule that is right, wrong or, where NaN, silent on each vote, ``(votes,)``."""
    judged = np.flatnonzero(~np.isnan(right))
    sizes = {"votes": len(tested.winner), "comparisons": len(tested.comparisons)}
    numbers = {"test/votes": len(judged), "test/votes_unjudged": len(right) - len(judged)}
    if not len(judged):
        rank_zero_info(
            f"{tested.counts.source}: how far voters agree is unknown, as none of {len(right):,} votes on "
            f"{len(tested.comparisons):,} comparisons has other voters enough beside it"
        )
        return {"metrics": numbers, **sizes}
    low, high = bootstrap_interval(right[judged], np.array(tested.comparison)[judged])  # over comparisons
    metrics: dict[str, float] = {
        "test/accuracy": float(right[judged].mean()),
        "test/accuracy_both_orders": float(right[judged].mean()),  # a rule does not see an order
        "test/accuracy_both_orders_low": low,
        "test/accuracy_both_orders_high": high,
        **numbers,
    }
    if tested.clients:
        indices = by_key([tested.clients[vote] for vote in judged])
        shares = per_client(right[judged, None], indices)  # [votes, 1]: one selector
        of_clients = spread([float(share[0]) for share in shares.values()], 0.1)
        metrics |= {f"test/{name}": value for name, value in of_clients.items()}
    return {"metrics": metrics, **sizes}


def _keys(votes: Votes) -> list[tuple[Any, ...]]:
    """Return what tells a vote apart in any order of rows: voter, comparison and the answer that won."""
    pairs = [
        (tuple(sorted(pair.fields.items())), *sorted((pair.first, pair.second))) for pair in votes.comparisons
    ]
    answers = [(pair.first, pair.second) for pair in votes.comparisons]
    voters: Sequence[str] = votes.clients or [""] * len(votes.winner)  # one for all
    return [
        (voter, pairs[comparison], answers[comparison][winner])
        for voter, comparison, winner in zip(voters, votes.comparison, votes.winner, strict=True)
    ]


def _look_up(tested: Votes, known: Votes, values: np.ndarray) -> np.ndarray:
    by_vote = dict(zip(_keys(known), values.tolist(), strict=True))
    keys = _keys(tested)
    if missing := [key for key in keys if key not in by_vote]:
        raise RowsError(
            f"{tested.counts.source}: {len(missing):,} of its {len(keys):,} votes are not in {known.counts.source}, such as "
            f"one of {missing[0][0]!r}: give the rows that the test votes were taken from"
        )
    return np.array([by_vote[key] for key in keys])
