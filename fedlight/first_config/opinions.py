"""A recipe for opinions: people who agree or disagree with single statements, whose texts are in a second file.

As in Polis. Of two statements a person prefers the one that it agrees with; `fedlight.recipes.polis` makes such pairs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from fedlight.datamodules.rows.rows import load_rows
from fedlight.first_config.columns import Column, Guess, GuessError, describe, pick, score_name
from fedlight.first_config.roles import is_opinion
from fedlight.recipes.polis import MODERATED, VOTES


@dataclass(frozen=True)
class OpinionDraft:
    """Columns of votes and statements."""

    votes: str  # source of the votes
    statements: str  # source of the statements
    encoder: str  # sentence encoder, or ``hashed``
    rows: int  # number of votes
    columns: dict[str, str]  # names of `fedlight.recipes.polis.opinion_pairs` -> columns of the rows
    guesses: list[Guess]  # lines of the table


def make_opinions(
    votes: str, statements: str, given: Mapping[str, str | None], encoder: str = "hashed"
) -> OpinionDraft:
    """Read both files and guess their columns.

    Raises:
        GuessError: a column cannot be told; the message names the candidates and the option that settles it.
    """
    rows = load_rows(votes)
    vote_columns, statement_columns = describe(rows), describe(load_rows(statements))
    opinions = [column for column in vote_columns if is_opinion(column)]
    if not opinions:
        raise GuessError(f"{votes}: no column has the votes {', '.join(VOTES)}, as --statements needs")
    vote = pick(opinions, "choice", given.get("choice"))
    statement = pick([column for column in statement_columns if column.is_text], "statement", None)
    few = [column for column in statement_columns if column.values and {*column.values} <= {*MODERATED}]
    moderation = pick(few, "moderated", None)
    item, theirs = _shared_ids(vote_columns, statement_columns)
    used = [item, *(column.name for column in opinions)]
    left = [column for column in vote_columns if column.name not in used and column.distinct > 1]
    # A group has fewer values than there are people, but could be taken for them as well.
    people = [column for column in left if not score_name(column.name, "group")]
    client = pick(people, "client", given.get("client"))
    groups = [column for column in left if client is not None and column.name != client.value]
    group = pick(groups, "group", None)
    if vote is None or statement is None or moderation is None or client is None or group is None:
        raise GuessError(
            f"{votes} needs columns of person, group, statement id and vote, {statements} of statement id, text and "
            "moderation (-1, 0, 1), as Polis exports them"
        )
    if item != theirs:
        raise GuessError(
            f"the statements' ids are {item} in one file, {theirs} in the other: name both alike"
        )
    ids = Guess("statement id", item, "the same ids are in both files")
    names = {"participant": client, "group": group, "statement_id": ids, "vote": vote}
    names |= {"statement": statement, "moderated": moderation}
    columns = {name: str(guess.value) for name, guess in names.items()}
    return OpinionDraft(votes, statements, encoder, len(rows), columns, list(names.values()))


def _shared_ids(votes: Sequence[Column], statements: Sequence[Column]) -> tuple[str, str]:
    """Return the columns that name the same statements."""
    # In the file of the statements each id is there once.
    ids = [column for column in statements if column.distinct == len(column.codes) and not column.is_text]
    pairs = [
        (column.name, other.name)
        for column, other in product(votes, ids)
        if column.distinct > 1 and set(column.different) <= set(other.different)
    ]
    # Small numbers, such as counts, are ids as well by their values: names decide.
    named = [pair for pair in pairs if score_name(pair[0], "item")]
    pairs = named or [pair for pair in pairs if pair[0] == pair[1]] or pairs
    if len(pairs) != 1:
        raise GuessError("no single column holds the statements' ids in both files: name it alike in both")
    return pairs[0]
