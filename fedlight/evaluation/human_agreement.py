"""Agreement of a judge with people who voted on the same pairs of answers.

Zheng et al., "Judging LLM-as-a-Judge with MT-Bench and Chatbot Arena", NeurIPS 2023, https://arxiv.org/abs/2306.05685,
section 4.2 and table 5: agreement is the probability that a judge and a random person say the same of a random pair. It is
counted twice: with ties as a verdict of their own, which is also that of a judge that changes its mind with the order
(chance: a third), and without them, where only those count who have decided (chance: a half). How far two people agree,
counted alike, is what a judge's agreement with one vote is held against.

Here every pair of answers counts the same, however many have voted on it. Besides single votes a judge is held against the
majority; where two verdicts share the first place, there is none. Intervals are bootstrapped over questions, as the pairs of
answers to one question are no independent draws.
"""

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from fedlight.evaluation.bootstrap import bootstrap_interval

TIE = 0.5


class Judged(NamedTuple):
    """One pair of answers.

    Attributes:
        votes: of people, each one's once: 1 for the first answer, 0 for the second, 0.5 for a tie.
        verdict: of the judge, from both orders; NaN where it could not be read.
        question: what is answered.
    """

    votes: Sequence[float]
    verdict: float
    question: Hashable


class Agreement(NamedTuple):
    """Shares in [0, 1]; NaN where nothing is known.

    Attributes:
        pairs: with a majority and a verdict.
        majority: share of them on which both are the same.
        majority_low: lower end of its 95 % interval, by the bootstrap over questions.
        majority_high: upper end.
        vote: probability that the judge agrees with one person.
        people: probability that two people agree with each other, on pairs that several have voted on.
        unread_pairs: pairs that are not among ``pairs`` as the verdict could not be read. Each other pair is counted for the
            first reason below that holds, so that the five counts of pairs are all that were given.
        no_verdict: as the judge says tie and ties are left out.
        no_vote: as no vote is left without ties.
        no_majority: as two verdicts share the first place among the votes.
        votes: that are counted, of all pairs.
        ties: votes that are left out.
        several: pairs with two votes or more, on which ``people`` rests.
    """

    pairs: int
    majority: float
    majority_low: float
    majority_high: float
    vote: float
    people: float
    unread_pairs: int
    no_verdict: int
    no_vote: int
    no_majority: int
    votes: int
    ties: int
    several: int


def agreement(judged: Sequence[Judged], ties: bool, seed: int = 0) -> Agreement:
    """How far a judge says what people say.

    Args:
        judged: pairs of answers.
        ties: count ties as a verdict; else leave them out, those of people and those of the judge.
        seed: of the bootstrap's draws.

    Example:
        >>> pairs = [Judged([1, 1, 0], 1, "q"), Judged([1, 0.5], 1, "q"), Judged([0, 0], 0.5, "r"), Judged([0.5], 0.5, "s")]
        >>> found = agreement(pairs, ties=True)
        >>> found.pairs, round(found.majority, 3), round(found.vote, 3), round(found.people, 3)
        (3, 0.667, 0.542, 0.444)
        >>> found = agreement(pairs, ties=False)
        >>> found.pairs, found.majority, round(found.vote, 3), round(found.people, 3)
        (2, 1.0, 0.833, 0.667)
    """
    votes = [own.votes if ties else [vote for vote in own.votes if vote != TIE] for own in judged]
    said = [own.verdict if ties or own.verdict != TIE else math.nan for own in judged]
    same = [_same(majority(own), verdict) for own, verdict in zip(votes, said, strict=True)]
    why = [_why_not(*one) for one in zip([own.verdict for own in judged], said, votes, strict=True)]
    low, high = bootstrap_interval(same, [own.question for own in judged], seed=seed)
    return Agreement(
        pairs=sum(not math.isnan(one) for one in same),
        majority=_mean(same),
        majority_low=low,
        majority_high=high,
        vote=_mean(
            [_mean([_same(vote, verdict) for vote in own]) for own, verdict in zip(votes, said, strict=True)]
        ),
        people=_mean([people_agree(own) for own in votes]),
        **{reason: why.count(reason) for reason in ("unread_pairs", "no_verdict", "no_vote", "no_majority")},
        votes=sum(len(own) for own in votes),
        ties=sum(len(own.votes) for own in judged) - sum(len(own) for own in votes),
        several=sum(len(own) > 1 for own in votes),
    )


def _why_not(verdict: float, said: float, votes: Sequence[float]) -> str | None:
    """The field of `Agreement` that counts a pair that cannot be compared; None for one that can."""
    if math.isnan(verdict):
        return "unread_pairs"
    if math.isnan(said):
        return "no_verdict"
    if not votes:
        return "no_vote"
    return "no_majority" if math.isnan(majority(votes)) else None


def majority(votes: Sequence[float]) -> float:
    """The verdict that most have given; NaN where two share the first place, or nobody has voted.

    Example:
        >>> majority([1, 1, 0]), majority([0.5, 0, 0.5, 1]), majority([1, 0])
        (1, 0.5, nan)
    """
    ranked = Counter(votes).most_common(2)
    if not ranked or (len(ranked) == 2 and ranked[0][1] == ranked[1][1]):
        return math.nan
    return ranked[0][0]


def people_agree(votes: Sequence[float]) -> float:
    """Probability that two different people say the same; NaN for fewer than two.

    Example:
        >>> people_agree([1, 1, 0]), people_agree([1])  # one of three pairs
        (0.3333333333333333, nan)
    """
    pairs = math.comb(len(votes), 2)
    return sum(math.comb(count, 2) for count in Counter(votes).values()) / pairs if pairs else math.nan


def _same(one: float, other: float) -> float:
    return math.nan if math.isnan(one) or math.isnan(other) else float(one == other)


def _mean(values: Sequence[float]) -> float:
    """Of what is known."""
    known = [value for value in values if not math.isnan(value)]
    return math.fsum(known) / len(known) if known else math.nan
