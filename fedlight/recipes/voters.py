"""Stages of recipes on real votes: voters with votes enough to be clients and to be tested, and an exercise in comparing.

A large language model comes able to read two answers; a small pretrained encoder does not, and would spend hundreds of
steps at chance. The exercise, which of two snippets is longer, teaches it to compare; no vote is used.
"""

from pathlib import Path
from typing import Any

import numpy as np

from fedlight.datamodules.rows.columns import text_at
from fedlight.datamodules.rows.exclusion import Holdout
from fedlight.datamodules.rows.rows import RowsError, load_rows, write_rows
from fedlight.support.seeding import derive_seed

SNIPPET_WORDS = (4, 30)


def sample_voters(
    source: str,
    client: str,
    choice: str,
    ties: list[str],
    column: str,
    held_out: list[str],
    num_clients: int,
    min_train: int,
    num_test: int,
    seed: int,
    train: str,
    test: str,
) -> dict[str, Any]:
    """Draws voters and writes their decided votes: all on what is not held out, and as many of each on what is.

    Args:
        source: rows of votes.
        client: column of the voter.
        choice: column of the choice.
        ties: its values that are no decision.
        column: of the holdout; see `fedlight.datamodules.rows.exclusion`.
        held_out: its values.
        num_clients: voters to draw.
        min_train: fewest votes of a drawn voter to train on.
        num_test: held-out votes of each drawn voter, drawn as well.
        seed: of the draws.
        train: file of the votes to train on, JSON lines.
        test: file of the held-out votes.

    Returns:
        ``eligible`` voters, and the numbers of ``train`` and ``test`` votes.

    Raises:
        RowsError: fewer voters are eligible than wanted.
    """
    holdout = Holdout(column, held_out)
    rows = [row for row in load_rows(source) if text_at(row, choice) not in ties]
    sides: list[dict[str, list[Any]]] = [{}, {}]
    for row, held in zip(rows, holdout.mask(rows, source).tolist(), strict=True):
        sides[held].setdefault(text_at(row, client), []).append(row)
    eligible = sorted(
        name
        for name in sides[0]
        if len(sides[0][name]) >= min_train and len(sides[1].get(name, ())) >= num_test
    )
    if len(eligible) < num_clients:
        raise RowsError(
            f"{source}: {len(eligible)} voters have {min_train} votes to train on and {num_test} held-out ones, fewer "
            f"than num_clients={num_clients}. Lower one of the three."
        )
    chosen = sorted(
        np.random.default_rng(derive_seed(seed, "voters")).permutation(eligible)[:num_clients].tolist()
    )
    tested = []
    for name in chosen:
        order = np.random.default_rng(derive_seed(seed, "test votes", name)).permutation(len(sides[1][name]))
        tested += [sides[1][name][index] for index in sorted(order[:num_test].tolist())]
    trained = [row for name in chosen for row in sides[0][name]]
    for file, votes in ((train, trained), (test, tested)):
        write_rows(votes, Path(file))
    return {"eligible": len(eligible), "train": len(trained), "test": len(tested)}


def snippet_pairs(
    source: str, texts: list[str], column: str, held_out: list[str], num_pairs: int, seed: int, output: str
) -> None:
    """Pairs of snippets of what is not held out, of which the one with more words is to be chosen.

    Args:
        source: rows of votes, whose choices are not looked at.
        texts: columns of the two answers.
        column: of the holdout; see `fedlight.datamodules.rows.exclusion`.
        held_out: its values.
        num_pairs: pairs to draw, of snippets with 4 to 30 words that differ by 3 words at least.
        seed: of the draws.
        output: JSON lines with ``response_a``, ``response_b`` and ``choice`` (a, b).

    Raises:
        RowsError: no text has so many words.
    """
    rows = Holdout(column, held_out).side(load_rows(source), source, held_out=False)
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
