"""Agreement of two groupings of clients, and of a judge with people who voted on the same pairs of answers.

Groupings are compared as partitions: the groups' names have no meaning.

Zheng et al., "Judging LLM-as-a-Judge with MT-Bench and Chatbot Arena", NeurIPS 2023, https://arxiv.org/abs/2306.05685,
section 4.2 and table 5: agreement is the probability that a judge and a random person give the same verdict on a random
pair. It is counted in two ways. With ties, a tie is a third verdict, also for a judge whose verdict changes with the
order (chance: one third). Without ties, only decided verdicts count (chance: one half). The agreement of two people,
counted in the same way, is the reference for a judge's agreement with one vote.

A judge is also compared with the majority; where two verdicts share the first place, there is none. Intervals are
bootstrapped over questions.
"""

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

from fedlight.evaluation.bootstrap import bootstrap_interval

TIE = 0.5


def adjusted_rand_index(grouping: Mapping[str, Hashable], known: Mapping[str, Hashable]) -> float:
    """Return the agreement of two groupings on the pairs of clients that belong together, corrected for chance.

    Hubert and Arabie, "Comparing Partitions", Journal of Classification 2, 1985, eq. 5. It is 1 for equal partitions, about
    0 for chance, below 0 for less; 1 where both have one group, or one per client. Clients missing from one are left out.

    Raises:
        ValueError: no client is in both.
    """
    from sklearn.metrics import adjusted_rand_score

    clients = [client for client in grouping if client in known]
    if not clients:
        raise ValueError("no client has both a found and a known group")
    labels = ([str(groups[client]) for client in clients] for groups in (known, grouping))
    return float(adjusted_rand_score(*labels))


def group_metrics(
    groups: Mapping[str, int], before: Mapping[str, int], known: Mapping[str, str]
) -> dict[str, float]:
    """Return the metrics of a grouping (client -> selector) by name; ``before`` is the last one, empty at the first.

    ``known`` groups may lack clients.

    Examples:
        >>> group_metrics({"a": 0, "b": 1, "c": 1, "d": 0}, {"a": 0, "b": 1, "c": 0, "d": 0}, {})
        {'fed/groups_moved': 0.25}
    """
    metrics = {}
    if before:
        metrics["fed/groups_moved"] = sum(before.get(c) != group for c, group in groups.items()) / len(groups)
    if set(groups) & set(known):
        metrics["fed/group_ari"] = adjusted_rand_index(groups, known)
    return metrics


class Judged(NamedTuple):
    """Pair of answers with its verdicts."""

    votes: Sequence[float]  # one vote of each person: 1 for the first answer, 0 for the second, 0.5 for a tie
    verdict: float  # of the judge, from both orders; NaN where it could not be read
    question: Hashable  # question that is answered


class Agreement(NamedTuple):
    """Agreement as shares in [0, 1]; NaN where it is not defined."""

    pairs: int  # number of pairs with a majority and a verdict
    majority: float  # share of them where both are the same
    majority_low: float  # lower end of its 95 % interval, by the bootstrap over questions
    majority_high: float  # upper end
    vote: float  # probability that the judge agrees with one person
    people: float  # probability that two people agree, on pairs with several votes
    # pairs left out of ``pairs`` as the verdict could not be read. Every other pair is counted under the first
    # reason below that holds, so the five counts of pairs add up to all pairs
    unread_pairs: int
    no_verdict: int  # pairs left out as the judge says tie and ties do not count
    no_vote: int  # pairs left out as no vote remains without ties
    no_majority: int  # pairs left out as two verdicts share the first place among the votes
    votes: int  # number of votes that count, over all pairs
    ties: int  # number of votes that do not count
    several: int  # number of pairs with two votes or more, the basis of ``people``


def agreement(judged: Sequence[Judged], ties: bool, seed: int = 0) -> Agreement:
    """Return the agreement of a judge with people on pairs of answers, with intervals drawn by ``seed``.

    Without ``ties``, ties of people and of the judge are left out; else a tie is a verdict.

    Examples:
        >>> pairs = [Judged([1, 1, 0], 1, "q"), Judged([1, 0.5], 1, "q"), Judged([0, 0], 0.5, "r"), Judged([0.5], 0.5, "s")]
        >>> result = agreement(pairs, ties=True)
        >>> result.pairs, round(result.majority, 3), round(result.vote, 3), round(result.people, 3)
        (3, 0.667, 0.542, 0.444)
    """
    votes = [pair.votes if ties else [vote for vote in pair.votes if vote != TIE] for pair in judged]
    verdicts = [pair.verdict if ties or pair.verdict != TIE else math.nan for pair in judged]
    same = [_same(majority(pair_votes), verdict) for pair_votes, verdict in zip(votes, verdicts, strict=True)]
    reasons = Counter(
        _reason_left_out(pair.verdict, verdict, pair_votes)
        for pair, verdict, pair_votes in zip(judged, verdicts, votes, strict=True)
    )
    # Over questions, since the pairs of answers to one question are not independent.
    low, high = bootstrap_interval(same, [pair.question for pair in judged], seed=seed)
    return Agreement(
        pairs=sum(not math.isnan(agrees) for agrees in same),
        majority=_mean(same),
        majority_low=low,
        majority_high=high,
        vote=_mean(
            [
                # A mean of means: every pair has the same weight, however many people voted on it.
                _mean([_same(vote, verdict) for vote in pair_votes])
                for pair_votes, verdict in zip(votes, verdicts, strict=True)
            ]
        ),
        people=_mean([people_agree(pair_votes) for pair_votes in votes]),
        **{reason: reasons[reason] for reason in ("unread_pairs", "no_verdict", "no_vote", "no_majority")},
        votes=sum(len(pair_votes) for pair_votes in votes),
        ties=sum(len(pair.votes) for pair in judged) - sum(len(pair_votes) for pair_votes in votes),
        several=sum(len(pair_votes) > 1 for pair_votes in votes),
    )


def _reason_left_out(verdict: float, counted: float, votes: Sequence[float]) -> str | None:
    """Return the field of `Agreement` that counts a pair left out; None for a pair that counts."""
    if math.isnan(verdict):
        return "unread_pairs"
    if math.isnan(counted):
        return "no_verdict"
    if not votes:
        return "no_vote"
    return "no_majority" if math.isnan(majority(votes)) else None


def majority(votes: Sequence[float]) -> float:
    """Return the most frequent verdict; NaN where two share the first place, or without votes."""
    ranked = Counter(votes).most_common(2)
    if not ranked or (len(ranked) == 2 and ranked[0][1] == ranked[1][1]):
        return math.nan
    return ranked[0][0]


def people_agree(votes: Sequence[float]) -> float:
    """Return the probability that two different people agree; NaN for fewer than two."""
    pairs = math.comb(len(votes), 2)
    return sum(math.comb(count, 2) for count in Counter(votes).values()) / pairs if pairs else math.nan


def _same(verdict: float, of_people: float) -> float:
    return math.nan if math.isnan(verdict) or math.isnan(of_people) else float(verdict == of_people)


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return math.fsum(known) / len(known) if known else math.nan
