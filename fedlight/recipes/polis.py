"""Stages of the recipe polis: preference pairs of people who agree and disagree with statements, and a table of methods.

Polis asks people for statements, and others vote on them (agree, disagree, pass): C. Small et al., "Polis: Scaling
Deliberation by Mapping High Dimensional Opinion Spaces", RECERCA 2021, https://doi.org/10.6035/recerca.5516. A person who
agrees with one statement and disagrees with another prefers the first: that is a pair, and the person is a client.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedlight.datamodules.preferences.baselines import rule_accuracies
from fedlight.datamodules.rows.columns import check_columns, text_at
from fedlight.datamodules.rows.rows import RowsError, load_rows, write_rows
from fedlight.datamodules.vectors.opinion_space import opinion_space
from fedlight.evaluation.agreement import adjusted_rand_index
from fedlight.evaluation.bootstrap import with_interval
from fedlight.evaluation.by_client import worst_share_mean
from fedlight.recipes.method_table import sent_bytes
from fedlight.support.checks import Settings, check_choice, check_range, refuse_below
from fedlight.support.files import csv_text, read_csv, write_whole
from fedlight.support.needs import RowSource
from fedlight.support.seeding import derive_seed
from fedlight.support.types import Rows

VOTES = {"agree": 1, "disagree": -1, "pass": 0}
OF_VOTES, OF_STATEMENTS = (
    ("participant", "group", "statement_id", "vote"),
    ("statement_id", "statement", "moderated"),
)
MODERATED, MODERATED_OUT = ("-1", "0", "1"), "-1"


@dataclass(frozen=True)
class Opinions:
    """Votes of a conversation on the statements that were not moderated out."""

    people: list[str]  # ids
    groups: list[str]  # Polis' own group of each person, empty where Polis gives none
    texts: list[str]  # the statements
    votes: np.ndarray  # 1 for agree, -1 for disagree, 0 for a pass or no vote, ``(people, statements)``
    moderated_out: int  # number of statements that were left out
    repeated: int  # number of votes that a later vote of the same person on the same statement has replaced


@dataclass(frozen=True)
class Jury(Settings):
    """People who say which pairs are contested; in YAML ``jury: {share: 0.5, min_decided: 8}``.

    Args:
        share: share of all people on the jury, in (0, 1).
        min_decided: fewest members that have decided a contested pair.
        min_minority: least share of them in the minority, in [0, 0.5].
    """

    share: float = 0.5
    min_decided: int = 8
    min_minority: float = 0.3

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_share("jury.share", self.share)
        refuse_below(1, "jury.", min_decided=self.min_decided)
        check_range("jury.min_minority", self.min_minority, 0, 0.5)


@dataclass(frozen=True)
class PairBounds(Settings):
    """Numbers of clients and of their pairs; in YAML ``bounds: {num_clients: 120, max_train: 120}``.

    Args:
        num_clients: most clients.
        min_train: fewest training pairs of a client.
        max_train: most training pairs of a client, drawn at random, so that people with many votes do not decide.
        min_test: fewest test pairs of a client.
        max_test: most test pairs of a client.
    """

    num_clients: int = 120
    min_train: int = 5
    max_train: int = 120
    min_test: int = 2
    max_test: int = 60

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_below(2, "bounds.", num_clients=self.num_clients)
        refuse_below(1, "bounds.", min_train=self.min_train, min_test=self.min_test)
        refuse_below(self.min_train, "bounds.", max_train=self.max_train)
        refuse_below(self.min_test, "bounds.", max_test=self.max_test)


def _check_share(name: str, share: float) -> None:
    if not 0 < share < 1:
        raise ValueError(f"{name}={share} must lie between 0 and 1")


def opinion_pairs(
    votes: str,
    statements: str,
    seed: int,
    train: str,
    test: str,
    pairs: str = "contested",
    test_statements: str = "own",
    jury: Jury = Jury(),
    test_share: float = 0.4,
    bounds: PairBounds = PairBounds(),
    columns: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Write pairs of a statement that a person agrees with and one that it disagrees with, in a random order.

    The seed splits people into a jury and the others, and draws clients from the others with enough pairs. A pair
    is contested if enough members of the jury have decided it (agreed with one and disagreed with the other), and the
    minority of them is large enough. So no client has a say in the choice of its test pairs. Each client's statements are
    split into those of its training pairs, which include its validation pairs, and those of its test pairs.

    Args:
        votes: rows with ``participant``, ``group``, ``statement_id`` and ``vote`` (agree, disagree, pass).
        statements: rows with ``statement_id``, ``statement`` and ``moderated``; -1 is moderated out.
        seed: seed of all draws.
        train: file of the training pairs, JSON lines with ``client``, ``group`` (Polis' own), ``response_a``,
            ``response_b`` and ``choice`` (a, b).
        test: file of the test pairs, which also have ``jury_a`` and ``jury_b``: the share of the jury's votes on a statement
            that agree, 0.5 without votes.
        pairs: ``contested`` or ``all``.
        test_statements: ``own``: drawn for each client, so other clients may have trained on them; ``new``: drawn once, no
            client trains on them.
        jury: its size, and when it calls a pair contested.
        test_share: share of statements to test on, in (0, 1).
        bounds: numbers of clients and of their pairs.
        columns: columns of the rows where they have other names: ours -> theirs.

    Beside the training pairs ``people.csv`` gets the place of each person among all by its votes (`opinion_space`), with the
    number of its votes, for the map in the report.

    Returns:
        ``people``, ``jury``, ``eligible`` (people with enough pairs), ``clients``, ``statements``, ``moderated_out`` and
        ``repeated`` (see `Opinions`), ``contested`` (share of the pairs that enough jurors decided), and the number of
        ``train`` and ``test`` pairs.

    Raises:
        RowsError: rows lack a column or have an unknown vote, or fewer than two people have enough pairs.
        ValueError: a setting is misspelt or out of range.
    """
    check_choice("pairs", pairs, ("contested", "all"))
    check_choice("test_statements", test_statements, ("own", "new"))
    _check_share("test_share", test_share)
    opinions = read_opinions(votes, statements, columns)
    order = np.random.default_rng(derive_seed(seed, "jury")).permutation(len(opinions.people))
    jurors, others = np.split(order, [round(jury.share * len(order))])  # so no client chooses its test pairs
    if not len(jurors):
        raise ValueError(f"jury.share={jury.share} of {len(order)} people is nobody: raise it")
    decided, is_contested = contested(opinions.votes[jurors], jury.min_decided, jury.min_minority)
    allowed = is_contested if pairs == "contested" else np.ones_like(is_contested)
    agree, disagree = ((opinions.votes[jurors] == vote).sum(axis=0) for vote in (1, -1))
    # The share of the jury's votes on each statement that agree, 0.5 without votes.
    agreeing = np.where(agree + disagree, agree / np.maximum(agree + disagree, 1), 0.5).tolist()
    shared = _held_out(np.arange(len(opinions.texts)), test_share, seed, "everybody")
    rows_of_train: list[dict[str, Any]] = []
    rows_of_test: list[dict[str, Any]] = []
    eligible = clients = 0
    for person in others.tolist():
        ballot = opinions.votes[person]
        voted, client = np.flatnonzero(ballot), opinions.people[person]
        held = shared if test_statements == "new" else _held_out(voted, test_share, seed, client)
        on_test = np.isin(voted, held)  # [statements with a vote]
        sides = [_pairs(ballot, voted[~on_test], allowed), _pairs(ballot, voted[on_test], allowed)]
        if len(sides[0]) < bounds.min_train or len(sides[1]) < bounds.min_test:
            continue
        eligible += 1
        if clients == bounds.num_clients:  # the others are only counted
            continue
        clients += 1
        rng = np.random.default_rng(derive_seed(seed, "train", client))
        rows_of_train += _drawn(sides[0], bounds.max_train, opinions, person, rng)
        rng = np.random.default_rng(derive_seed(seed, "test", client))
        rows_of_test += _drawn(sides[1], bounds.max_test, opinions, person, rng, agreeing)
    if clients < 2:
        raise RowsError(
            f"{votes}: {eligible} people beside the jury have {bounds.min_train} training and {bounds.min_test} test pairs: "
            f"lower bounds.min_train, bounds.min_test or jury.min_decided={jury.min_decided}, or set pairs=all"
        )
    write_rows(rows_of_train, Path(train))
    write_rows(rows_of_test, Path(test))
    write_whole(Path(train).with_name("people.csv"), csv_text(_people(opinions)))
    return {
        "people": len(order),
        "jury": len(jurors),
        "eligible": eligible,
        "clients": clients,
        "statements": len(opinions.texts),
        "moderated_out": opinions.moderated_out,
        "repeated": opinions.repeated,
        "contested": float(is_contested.sum() / max((decided >= jury.min_decided).sum(), 1)),
        "train": len(rows_of_train),
        "test": len(rows_of_test),
    }


def _requires(settings: Mapping[str, Any]) -> Iterator[RowSource]:
    """Yield both files with their columns, for the preflight check."""
    for name, columns in (("votes", OF_VOTES), ("statements", OF_STATEMENTS)):
        theirs = _theirs(columns, settings.get("columns"))
        yield RowSource(str(settings[name]), columns=tuple(sorted(theirs.items())))


opinion_pairs.requires = _requires  # type: ignore[attr-defined]


def read_opinions(votes: str, statements: str, columns: Mapping[str, str] | None = None) -> Opinions:
    """Return the votes of a conversation; arguments as `opinion_pairs`.

    Raises:
        RowsError: rows lack a column, a vote, a statement or a participant is unknown, a person has two groups, or a
            statement appears twice.
    """
    rows = _read(votes, _theirs(OF_VOTES, columns))
    of_statements = _read(statements, _theirs(OF_STATEMENTS, columns))
    kept, known = _kept(of_statements, statements)
    texts = sorted(set(kept.values()) - {""})  # equal texts are one statement
    place_of_text = {text: number for number, text in enumerate(texts)}
    people = sorted({text_at(row, "participant") for row in rows})
    place = {person: number for number, person in enumerate(people)}
    ballots = np.zeros((len(people), len(texts)), dtype=np.int8)  # [people, statements]
    groups, seen = [""] * len(people), Counter[tuple[int, int]]()
    for number, row in enumerate(rows, 1):
        where = f"{votes}, row {number}"
        participant, group, statement_id, vote = (text_at(row, name) for name in OF_VOTES)
        if not participant:
            raise RowsError(f"{where}: no participant: take the row out")
        if vote not in VOTES:
            raise RowsError(f"{where}: the vote {vote!r} is none of {', '.join(VOTES)}")
        if statement_id not in known:
            raise RowsError(
                f"{where}: {statements} has no statement_id {statement_id!r}: give the statements of this conversation"
            )
        person = place[participant]
        if group and groups[person] not in ("", group):
            raise RowsError(f"{where}: a participant has two groups, {groups[person]!r} and {group!r}")
        groups[person] = group or groups[person]
        if text := kept.get(statement_id):
            ballots[person, place_of_text[text]] = VOTES[vote]  # a later vote replaces an earlier one
            seen[person, place_of_text[text]] += 1
    left_out = len(known) - len(kept)
    return Opinions(people, groups, texts, ballots, left_out, seen.total() - len(seen))


def _theirs(names: Sequence[str], columns: Mapping[str, str] | None) -> dict[str, str]:
    """Return our names of columns with those of the rows."""
    return {name: (columns or {}).get(name, name) for name in names}


def _read(source: str, columns: Mapping[str, str]) -> Rows:
    """Return rows under our names."""
    rows = load_rows(source)
    check_columns(rows, columns, source)
    return [{name: text_at(row, path) for name, path in columns.items()} for row in rows]


def _kept(rows: Rows, source: str) -> tuple[dict[str, str], set[str]]:
    """Return the texts of the statements that were not moderated out, by id, and all ids; ids may be numbers or text."""
    kept, known = {}, set[str]()
    for number, row in enumerate(rows, 1):
        statement_id, moderated = text_at(row, "statement_id"), text_at(row, "moderated")
        if statement_id in known:
            raise RowsError(f"{source}, row {number}: the statement_id {statement_id!r} appears twice")
        if moderated not in MODERATED:
            raise RowsError(
                f"{source}, row {number}: moderated={moderated!r} is none of {', '.join(MODERATED)}; -1 is moderated out"
            )
        known.add(statement_id)
        if moderated != MODERATED_OUT:
            kept[statement_id] = text_at(row, "statement")
    return kept, known


def contested(votes: np.ndarray, min_decided: int, min_minority: float) -> tuple[np.ndarray, np.ndarray]:
    """Return how many people have decided each pair, and which pairs are contested, ``(statements, statements)`` each.

    Args:
        votes: 1 for agree, -1 for disagree, 0 for neither, ``(people, statements)``.
        min_decided: fewest people that agree with one and disagree with the other.
        min_minority: least share of them that prefer the same statement, in [0, 0.5].

    Examples:
        >>> votes = np.array([[1, -1, 1], [1, -1, -1], [-1, 1, -1]])
        >>> decided, is_contested = contested(votes, min_decided=2, min_minority=0.3)
        >>> decided.tolist()
        [[0, 3, 1], [3, 0, 2], [1, 2, 0]]
        >>> is_contested.tolist()
        [[False, True, False], [True, False, True], [False, True, False]]
    """
    # [i, j]: number of people who agree with i and disagree with j.
    preferred = (votes == 1).T.astype(np.int64) @ (votes == -1).astype(np.int64)  # bool @ bool: any
    decided = preferred + preferred.T  # in either direction
    minority = np.minimum(preferred, preferred.T)  # [statements, statements]
    return decided, (decided >= max(min_decided, 1)) & (minority >= min_minority * decided)


def opinion_table(
    methods: dict[str, dict[str, str]], train: str, test: str, against: str = "FedBis"
) -> dict[str, Any]:
    """Return a row for each rule that needs no text (see `rule_accuracies`), and for each method.

    Intervals are those of 95 % of bootstrap samples of people. A difference is taken person by person.

    Args:
        methods: method -> folders of its stages: ``train``, and ``test`` if the model of a client is tested in another
            stage. ``clients.csv`` in the one or the other has the accuracies.
        train: file of the training pairs.
        test: file of the test pairs.
        against: method that the others are compared with.

    Returns:
        ``rows`` with ``method``; ``own``, the accuracy of a client's own model, mean over clients, in [0, 1], with both
        orders of a pair averaged where all methods were tested so, else of single orders; its ends ``own_low`` and
        ``own_high``; ``worst_tenth``; ``gain``, its difference to ``against``, with ``gain_low`` and ``gain_high``;
        ``over_rule``, its difference to the rule with the highest ``own`` on these pairs, with its ends; ``groups_ari``,
        the adjusted Rand index with Polis' own groups, which saw all votes; ``sent_mib``, MiB sent down and up in training,
        including groupings.

    Raises:
        ValueError: a method has other clients than the test pairs, or ``against`` is no method.
    """
    if against not in methods:
        raise ValueError(f"against={against!r} is no method: {', '.join(methods)}")
    pairs = load_rows(test)
    clients = [*dict.fromkeys(row["client"] for row in pairs)]
    rules = rule_accuracies(load_rows(train), pairs)
    tested = {method: _own_rows(folders, clients) for method, folders in methods.items()}
    # Accuracies of one order and of both are not compared with each other.
    has_both = all(
        row.get("own_both_orders") for of_clients in tested.values() for row in of_clients.values()
    )
    column = "own_both_orders" if has_both else "own_accuracy"
    scores = rules | {
        method: {client: float(row[column]) for client, row in of_clients.items()}
        for method, of_clients in tested.items()
    }
    values = {method: np.array([shares[client] for client in clients]) for method, shares in scores.items()}
    best = max(rules, key=lambda rule: values[rule].mean())
    known = {row["client"]: row["group"] for row in pairs if row["group"]}
    rows = []
    for method, accuracies in values.items():
        folders = methods.get(method, {})
        row: dict[str, Any] = {"method": method, **with_interval("own", accuracies)}
        row["worst_tenth"] = worst_share_mean(accuracies.tolist(), 0.1)
        if method != against:
            row |= with_interval("gain", accuracies - values[against])
        row |= with_interval("over_rule", accuracies - values[best])
        if known and (groups := _groups(folders)):
            row["groups_ari"] = adjusted_rand_index(groups, known)
        if "train" in folders:
            row["sent_mib"] = sent_bytes(Path(folders["train"])) / 2**20
        rows.append(row)
    return {"rows": rows}


def _people(opinions: Opinions) -> Rows:
    """Return a row for each person: ``person``, ``group``, ``votes``, ``x`` and ``y``."""
    places = opinion_space(opinions.votes).round(4).tolist()
    counts = (opinions.votes != 0).sum(axis=1).tolist()
    return [
        {"person": person, "group": group, "votes": count, "x": x, "y": y}
        for person, group, count, (x, y) in zip(opinions.people, opinions.groups, counts, places, strict=True)
    ]


def _held_out(numbers: np.ndarray, share: float, seed: int, whose: str) -> np.ndarray:
    rng = np.random.default_rng(derive_seed(seed, "test statements", whose))
    return rng.permutation(numbers)[: round(share * len(numbers))]


def _pairs(ballot: np.ndarray, voted: np.ndarray, allowed: np.ndarray) -> np.ndarray:
    """Return the allowed pairs among some statements, the preferred one first, ``(pairs, 2)``."""
    liked, disliked = voted[ballot[voted] == 1], voted[ballot[voted] == -1]
    first, second = np.nonzero(allowed[np.ix_(liked, disliked)])  # places in liked and in disliked
    return np.stack([liked[first], disliked[second]], axis=1)


def _drawn(
    pairs: np.ndarray,
    at_most: int,
    opinions: Opinions,
    person: int,
    rng: np.random.Generator,
    agreeing: list[float] | None = None,
) -> list[dict[str, Any]]:
    """Return rows of pairs, at most so many, in a random order of the two statements, with the jury's view where given."""
    pairs = pairs[np.sort(rng.permutation(len(pairs))[:at_most])]
    swapped = rng.random(len(pairs)) < 0.5  # else the first statement would always win
    rows = []
    for pair, is_swapped in zip(pairs.tolist(), swapped.tolist(), strict=True):
        a, b = reversed(pair) if is_swapped else pair
        row = {"client": opinions.people[person], "group": opinions.groups[person]}
        row |= {"response_a": opinions.texts[a], "response_b": opinions.texts[b], "choice": "ab"[is_swapped]}
        rows.append(row if agreeing is None else row | {"jury_a": agreeing[a], "jury_b": agreeing[b]})
    return rows


def _own_rows(folders: Mapping[str, str], clients: list[str]) -> dict[str, dict[str, str]]:
    """Return client -> row of ``clients.csv`` of its own model."""
    file = Path(folders.get("test", folders["train"])) / "clients.csv"
    rows = {row["client"]: row for row in read_csv(file) if row["stage"] in ("own", "test")}
    if rows.keys() != set(clients):
        raise ValueError(
            f"{file} has accuracies of {len(rows)} clients, not of the {len(clients)} with test pairs"
        )
    return rows


def _groups(folders: Mapping[str, str]) -> dict[str, str]:
    """Return client -> selector in the end; empty for a method without groups."""
    file = Path(folders.get("train", "")) / "clients.csv"
    if not file.is_file():
        return {}
    return {row["client"]: row["selector"] for row in read_csv(file) if row["selector"]}
