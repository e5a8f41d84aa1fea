"""Rows without training that belong into every table of real votes: the longer answer wins, and how far voters agree.

People prefer longer answers, so a selector that does no better than "the longer answer wins" has learned nothing else.
Voters also contradict each other: the majority of the *other* voters on the same comparison is the best answer of a model
that knows everybody but the voter. It estimates a ceiling for models without tastes and is no bound: the majority of few
voters errs itself, and a model of the voter's own taste may exceed it.

A selector of people's opinions has to do better than rules that read no text.

R. Bradley and M. Terry, "Rank Analysis of Incomplete Block Designs", Biometrika 1952, https://doi.org/10.2307/2334029: a
strength ``u`` for each statement, and ``P(A before B) = sigmoid(u(A) - u(B))``. In a federation each client sends its
counts, one for each ordered pair of statements. The sums over clients are exact, and the server needs nothing else.

S. Rendle et al., "BPR: Bayesian Personalized Ranking from Implicit Feedback", UAI 2009, https://arxiv.org/abs/1205.2618:
``P(A before B) = sigmoid(u(A) - u(B) + p . (v(A) - v(B)))`` with factors ``p`` of the person and ``v`` of statements. In a
federation ``p`` stays with the person, and the gradients of ``u`` and ``v`` are summed. Here all three are fitted together
by L-BFGS. Penalties and the number of factors were chosen on pairs of the jury's half of people, which no table reports.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import softplus

from fedlight.datamodules.clients.partition import by_key
from fedlight.datamodules.rows.votes import Votes
from fedlight.support.seeding import derive_seed
from fedlight.support.types import Rows

LEAST_VOTERS = 3
LENGTHS: Mapping[str, Callable[[str], int]] = {"characters": len, "words": lambda text: len(text.split())}
NOTHING, LONGER, JURY = "nothing learned", "the longer statement", "what the jury likes more"
STRENGTHS, FACTORS = "Bradley-Terry", "Bradley-Terry, a factor by person"
STRENGTH_PENALTY, FACTOR_PENALTY, FACTORS_EACH = 1e-5, 3e-4, 2
STEPS = 200


def longer_wins(votes: Votes, length: Callable[[str], int]) -> np.ndarray:
    """Return how right "the longer answer wins" is on each vote, ``(votes,)``: 1, 0, or 0.5 for equal lengths.

    Examples:
        >>> from fedlight.datamodules.text.encoding import Comparison
        >>> votes = Votes([Comparison({}, "long", "no"), Comparison({}, "x", "y")], comparison=[0, 0, 1], winner=[0, 1, 0])
        >>> longer_wins(votes, len).tolist()
        [1.0, 0.0, 0.5]
    """
    differences = [length(pair.second) - length(pair.first) for pair in votes.comparisons]
    verdicts = np.sign(np.array(differences))[votes.comparison]  # [votes], 1: the second is longer
    return (1 + verdicts * (2 * np.array(votes.winner) - 1)) / 2


def majority_of_others(votes: Votes, least_voters: int = LEAST_VOTERS) -> np.ndarray:
    """Return whether each vote is that of the majority of the other voters on its comparison, ``(votes,)``.

    1 where it is, 0 where it is not, 0.5 where the others are tied, and NaN on comparisons with fewer voters than
    ``least_voters``, the voter included. A voter with both choices on a comparison has no say in it.

    Raises:
        ValueError: the votes have no voters.

    Examples:
        >>> votes = Votes(comparison=[0, 0, 0, 1, 1], winner=[1, 1, 0, 1, 1], clients=["u", "v", "w", "u", "v"])
        >>> majority_of_others(votes).tolist()
        [0.5, 0.5, 0.0, nan, nan]
    """
    if not votes.clients:
        raise ValueError("the majority of the other voters needs a column of voters: set columns.client")
    sums: Counter[tuple[int, str]] = Counter()
    for comparison, winner, voter in zip(votes.comparison, votes.winner, votes.clients, strict=True):
        sums[comparison, voter] += 2 * winner - 1  # both choices of a voter cancel
    totals: Counter[int] = Counter()
    voters: Counter[int] = Counter()
    for (comparison, _), votes_of_voter in sums.items():
        totals[comparison] += votes_of_voter
        voters[comparison] += 1
    # The total less the voter's own votes has the sign of the others' majority.
    accuracies = [
        (1 + np.sign(totals[comparison] - sums[comparison, voter]) * (2 * winner - 1)) / 2
        if voters[comparison] >= least_voters
        else np.nan
        for comparison, winner, voter in zip(votes.comparison, votes.winner, votes.clients, strict=True)
    ]
    return np.array(accuracies)


def describe(votes: Votes) -> str:
    """Return in one line how the rows without training do on votes, beside which a selector's accuracy is to be read.

    Examples:
        >>> from fedlight.datamodules.text.encoding import Comparison
        >>> pairs = [Comparison({}, "long", "no"), Comparison({}, "x", "y z")]
        >>> print(describe(Votes(pairs, comparison=[0, 0, 0, 1], winner=[0, 0, 1, 1], clients=["u", "v", "w", "u"])))
        without training: the longer answer wins 0.750 (by words 0.625); majority of the other voters 0.333, on 3 of 4 votes
        >>> describe(Votes(pairs, comparison=[0], winner=[1])).endswith("the other voters unknown, on 0 of 1 votes")
        True
    """
    longer, words = (float(longer_wins(votes, length).mean()) for length in LENGTHS.values())
    agree = majority_of_others(votes) if votes.clients else np.full(len(votes.winner), np.nan)
    judged = agree[~np.isnan(agree)]  # NaN: too few voters
    share = f"{judged.mean():.3f}" if len(judged) else "unknown"
    return (
        f"without training: the longer answer wins {longer:.3f} (by words {words:.3f}); majority of the other voters "
        f"{share}, on {len(judged):,} of {len(agree):,} votes"
    )


def rule_accuracies(train: Rows, test: Rows) -> dict[str, dict[str, float]]:
    """Return accuracies of the rules on each client's test pairs: rule -> client -> share of right pairs, in [0, 1].

    A tie counts half. Without training pairs a statement has strength 0, and statements and clients have factors near 0.
    Pairs have ``client``, ``response_a``, ``response_b`` and ``choice`` (a, b), which two rules learn from; those of the
    test also ``jury_a`` and ``jury_b``, how far a jury likes each statement.
    """
    numbers = {text: number for number, text in enumerate(sorted({*_texts(train), *_texts(test)}))}
    trained, tested = by_key([row["client"] for row in train]), by_key([row["client"] for row in test])
    clients = sorted({*trained, *tested})
    ordered = _ordered(train, numbers)
    by_client = {client: ordered[pairs] for client, pairs in trained.items()}
    wins = sum(count_wins(pairs, len(numbers)) for pairs in by_client.values())
    strengths = bradley_terry(np.asarray(wins))
    utilities = person_factors(by_client, [*numbers], clients)
    sides = np.array([[numbers[row[f"response_{side}"]] for side in "ab"] for row in test])
    client_of_pair = np.array([clients.index(row["client"]) for row in test])  # [pairs]
    liked = {
        NOTHING: np.zeros(sides.shape),
        LONGER: np.array([[len(row[f"response_{side}"]) for side in "ab"] for row in test]),
        JURY: np.array([[row[f"jury_{side}"] for side in "ab"] for row in test]),
        STRENGTHS: strengths[sides],
        FACTORS: utilities[client_of_pair[:, None], sides],
    }
    a_won = np.array([row["choice"] == "a" for row in test])
    right = {
        name: (1 + np.sign(both[:, 0] - both[:, 1]) * (2 * a_won - 1)) / 2 for name, both in liked.items()
    }
    return {
        name: {client: float(of_pairs[pairs].mean()) for client, pairs in tested.items()}
        for name, of_pairs in right.items()
    }


def count_wins(pairs: np.ndarray, statements: int) -> np.ndarray:
    """Return how often each statement was preferred to each other one, ``(statements, statements)``.

    ``pairs`` are numbers of statements, the preferred one first, ``(pairs, 2)``.

    Examples:
        >>> count_wins(np.array([[0, 1], [0, 1], [1, 0]]), 2).tolist()
        [[0, 2], [1, 0]]
    """
    wins = np.zeros((statements, statements), dtype=np.int64)
    np.add.at(wins, (pairs[:, 0], pairs[:, 1]), 1)  # wins[...] += 1 would count equal pairs once
    return wins


def bradley_terry(wins: np.ndarray, penalty: float = STRENGTH_PENALTY) -> np.ndarray:
    """Return the strengths that make the wins of `count_wins`, of all clients, likeliest, ``(statements,)``.

    ``penalty`` is that of the sum of squared strengths, beside the mean loss of a pair.

    Examples:
        >>> strong, weak = bradley_terry(np.array([[0, 3], [1, 0]]), penalty=0)  # log(3 / 1)
        >>> round(float(np.exp(strong - weak)), 4)
        3.0
    """
    first, second = (torch.from_numpy(side) for side in np.nonzero(wins))  # [different pairs]
    shares = torch.from_numpy(wins[wins > 0] / max(wins.sum(), 1))  # [different pairs]

    def loss(strengths: Tensor) -> Tensor:
        surprise = softplus(strengths[second] - strengths[first])  # -log P(A before B)
        return (shares * surprise).sum() + penalty * strengths.square().sum()

    (strengths,) = _minimum(loss, torch.zeros(len(wins), dtype=torch.double))
    return strengths


def person_factors(
    pairs: Mapping[str, np.ndarray], statements: Sequence[str], clients: Sequence[str]
) -> np.ndarray:
    """Return the utility of each statement to each client, ``(clients, statements)``: strength and product of factors."""
    place = {client: number for number, client in enumerate(clients)}
    person = torch.tensor([place[client] for client, client_pairs in pairs.items() for _ in client_pairs])
    first, second = torch.from_numpy(np.concatenate([*pairs.values()])).T  # [pairs] each

    def loss(strengths: Tensor, of_people: Tensor, of_statements: Tensor) -> Tensor:
        taste = (of_people[person] * (of_statements[first] - of_statements[second])).sum(dim=1)
        surprise = softplus(strengths[second] - strengths[first] - taste).mean()
        factors = of_people.square().sum() + of_statements.square().sum()
        return surprise + STRENGTH_PENALTY * strengths.square().sum() + FACTOR_PENALTY * factors

    # Double precision: the tolerances of L-BFGS lie below the rounding errors of fp32.
    starts = torch.zeros(len(statements), dtype=torch.double), _draws(clients), _draws(statements)
    strengths, of_people, of_statements = _minimum(loss, *starts)
    return strengths + of_people @ of_statements.T  # [clients, statements]


def _minimum(loss: Callable[..., Tensor], *starts: Tensor) -> list[np.ndarray]:
    values = [start.requires_grad_() for start in starts]
    optimizer = torch.optim.LBFGS(
        values, max_iter=STEPS, tolerance_grad=1e-9, tolerance_change=1e-12, line_search_fn="strong_wolfe"
    )

    def step() -> Tensor:
        optimizer.zero_grad()
        value = loss(*values)
        value.backward()
        return value

    optimizer.step(step)
    return [value.detach().numpy() for value in values]


def _draws(names: Sequence[str]) -> Tensor:
    # The loss of factors has more than one minimum, and at 0 their gradient vanishes: small draws begin,
    # by name, so that the order of clients and statements does not matter.
    rngs = (np.random.default_rng(derive_seed(0, "factor", name)) for name in names)
    return torch.from_numpy(np.array([rng.normal(scale=0.1, size=FACTORS_EACH) for rng in rngs]))


def _texts(rows: Rows) -> list[str]:
    return [row[f"response_{side}"] for row in rows for side in "ab"]


def _ordered(rows: Rows, numbers: Mapping[str, int]) -> np.ndarray:
    """Return pairs of numbers of statements, the preferred one first, ``(pairs, 2)``."""
    sides = [("response_a", "response_b")[:: 1 if row["choice"] == "a" else -1] for row in rows]
    pairs = [[numbers[row[name]] for name in names] for row, names in zip(rows, sides, strict=True)]
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)
