"""Stages of recipes on real votes: a draw of voters with enough votes, and an exercise in comparing.

A large language model can compare two answers; a small pretrained encoder cannot, and would spend hundreds of steps at
chance. The exercise, to choose the longer of two snippets, teaches it to compare; it uses no vote.
"""

from pathlib import Path
from typing import Any

import numpy as np

from fedlight.datamodules.rows.columns import text_at
from fedlight.datamodules.rows.exclusion import Holdout
from fedlight.datamodules.rows.rows import RowsError, load_rows, write_rows
from fedlight.support.checks import refuse_below
from fedlight.support.seeding import derive_seed

SNIPPET_WORDS = (4, 30)


def sample_voters(
    source: str,
    client: str,
    choice: str,
    ties: list[str],
    holdout: Holdout,
    num_clients: int,
    min_train: int,
    num_test: int,
    seed: int,
    train: str,
    test: str,
    others: str | None = None,
) -> dict[str, Any]:
    """Draw voters and write their decided votes: all votes to train on, and the same number of held-out votes of each.

    Args:
        source: rows of votes.
        client: column of the voter.
        choice: column of the choice.
        ties: values of the choice that are no decision.
        holdout: column and values of held-out rows.
        num_clients: number of voters to draw, at least 1.
        min_train: fewest votes of a drawn voter to train on.
        num_test: held-out votes of each drawn voter, at least 0, drawn as well.
        seed: seed of the draws.
        train: file of the votes to train on, JSON lines.
        test: file of the held-out votes.
        others: file of the votes to train on of as many further voters; None: no further ones are drawn.

    Returns:
        ``eligible`` voters, and the numbers of ``train`` and ``test`` votes.

    Raises:
        RowsError: fewer voters are eligible than wanted.
        ValueError: a number is out of range.
    """
    refuse_below(1, num_clients=num_clients)
    refuse_below(0, num_test=num_test)
    rows = [row for row in load_rows(source) if text_at(row, choice) not in ties]
    sides: list[dict[str, list[Any]]] = [{}, {}]  # to train on, held out
    for row, held in zip(rows, holdout.mask(rows, source).tolist(), strict=True):
        sides[held].setdefault(text_at(row, client), []).append(row)
    eligible = sorted(
        name
        for name in sides[0]
        if len(sides[0][name]) >= min_train and len(sides[1].get(name, ())) >= num_test
    )
    wanted = num_clients if others is None else 2 * num_clients  # as many further ones
    if len(eligible) < wanted:
        raise RowsError(
            f"{source}: {len(eligible)} voters have {min_train} votes to train on and {num_test} held-out ones, fewer "
            f"than {f'num_clients={num_clients}' if others is None else f'2 num_clients={wanted}'}. Lower one of the three."
        )
    drawn = np.random.default_rng(derive_seed(seed, "voters")).permutation(eligible).tolist()
    chosen = sorted(drawn[:num_clients])
    tested = []
    for name in chosen:
        held_votes = sides[1].get(name, [])
        order = np.random.default_rng(derive_seed(seed, "test votes", name)).permutation(len(held_votes))
        tested += [held_votes[index] for index in sorted(order[:num_test].tolist())]
    trained = [row for name in chosen for row in sides[0][name]]
    for file, votes in ((train, trained), (test, tested)):
        write_rows(votes, Path(file))
    if others is not None:
        write_rows(
            [row for name in sorted(drawn[num_clients:wanted]) for row in sides[0][name]], Path(others)
        )
    return {"eligible": len(eligible), "train": len(trained), "test": len(tested)}


def sample_pairs(
    source: str,
    choice: str,
    ties: list[str],
    holdout: Holdout,
    held_out: bool,
    number: int,
    seed: int,
    output: str,
    client: str = "client",
    voters: str | None = None,
) -> dict[str, Any]:
    """Draw decided rows, such as pairs with gold labels, from the held-out side or from the other one.

    Args:
        source: rows with a choice.
        choice: column of the choice.
        ties: values of the choice that are no decision.
        holdout: column and values of held-out rows.
        held_out: draw among the held-out rows, or among all others.
        number: most rows to draw, at least 1.
        seed: seed of the draw.
        output: file of the rows, JSON lines.
        client: column of the voter.
        voters: rows of votes; each of their voters gets an equal share of the pairs, to test its own model on.

    Returns:
        ``pairs``, the number of rows.

    Raises:
        ValueError: ``number`` is below 1.
    """
    refuse_below(1, number=number)
    rows = [row for row in load_rows(source) if text_at(row, choice) not in ties]
    rows = list(holdout.side(rows, source, held_out))
    order = np.random.default_rng(derive_seed(seed, "pairs", held_out)).permutation(len(rows))[:number]
    drawn = [rows[index] for index in order.tolist()]
    if voters is not None:
        names = sorted({text_at(row, client) for row in load_rows(voters)})
        drawn = [{**row, client: names[place % len(names)]} for place, row in enumerate(drawn)]
    write_rows(drawn, Path(output))
    return {"pairs": len(drawn)}


def snippet_pairs(
    source: str, texts: list[str], holdout: Holdout, num_pairs: int, seed: int, output: str
) -> None:
    """Write pairs of snippets of texts that are not held out; the choice is the snippet with more words.

    Args:
        source: rows of votes, whose choices are not read.
        texts: columns of the two answers.
        holdout: column and values of held-out rows.
        num_pairs: number of pairs to draw, of snippets with 4 to 30 words that differ by at least 3 words.
        seed: seed of the draws.
        output: file of JSON lines with ``response_a``, ``response_b`` and ``choice`` (a, b).

    Raises:
        RowsError: no text has so many words.
        ValueError: ``num_pairs`` is below 1.
    """
    refuse_below(1, num_pairs=num_pairs)
    rows = holdout.side(load_rows(source), source, held_out=False)
    # Sorted: the order of a set of texts differs between processes.
    words = [text.split() for text in sorted({text_at(row, name) for row in rows for name in texts})]
    words = [of_text for of_text in words if len(of_text) >= SNIPPET_WORDS[1]]
    if not words:
        raise RowsError(f"{source}: no text of {', '.join(texts)} has {SNIPPET_WORDS[1]} words")
    rng = np.random.default_rng(derive_seed(seed, "snippets"))
    pairs: list[dict[str, str]] = []
    while len(pairs) < num_pairs:
        lengths = rng.integers(SNIPPET_WORDS[0], SNIPPET_WORDS[1] + 1, 2).tolist()
        if abs(lengths[0] - lengths[1]) < 3:
            continue
        first, second = (
            " ".join(words[index][:length])
            for index, length in zip(rng.integers(len(words), size=2).tolist(), lengths, strict=True)
        )
        pairs.append({"response_a": first, "response_b": second, "choice": "ab"[lengths[1] > lengths[0]]})
    write_rows(pairs, Path(output))
