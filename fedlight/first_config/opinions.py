"""A recipe for opinions: people who agree or disagree with single statements, whose texts are in a second file.

As in Polis. Of two statements a person prefers the one that it agrees with; `fedlight.recipes.polis` makes such pairs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from fedlight.datamodules.rows.rows import load_rows
from fedlight.first_config.columns import Column, Guess, GuessError, describe, pick, score_name
from fedlight.first_config.text import scalar
from fedlight.first_config.votes import is_opinion
from fedlight.recipes.polis import MODERATED, VOTES

ROUNDS = 12
CLIENTS_PER_ROUND = 10


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


def write_opinions(draft: OpinionDraft, file: str) -> str:
    """Return the YAML of a recipe, which will be called ``file``."""
    folder = f"runs/{Path(file).stem}"
    named = {name: path for name, path in draft.columns.items() if name != path}
    columns = ["      columns:                         # ours: yours"] * bool(named)
    columns += [f"        {name}: {scalar(path)}" for name, path in named.items()]
    return f"""# FedBis on opinions: of two statements, which one does this person agree with? A person is a client.
#
# Data:     {draft.votes}, {draft.rows:,} votes; {draft.statements}
# Paper:    Wu et al., https://arxiv.org/abs/2407.03038
# Run:      fedlight run {file}
# Look:     fedlight report {folder}
# Change:   the encoder, for one that knows words: init again with --model FOLDER_OF_A_SENTENCE_ENCODER

seeds: [0]

stages:
  opinions:                            # pairs of a statement that a person agrees with and one that it does not
    call: fedlight.recipes.polis.opinion_pairs
    with:
      votes: {scalar(draft.votes)}
      statements: {scalar(draft.statements)}
{chr(10).join(columns)}{chr(10) * bool(columns)}      seed: ${{seed}}
      pairs: all                       # contested: those on which a jury of half of the people is divided
      train: ${{run}}/opinions/train.jsonl
      test: ${{run}}/opinions/test.jsonl
  fedbis:
    fit: polis.yaml                    # a small head on frozen vectors of the statements
    with:
      seed_everything: ${{seed}}
      trainer.max_epochs: {ROUNDS}           # rounds
      trainer.callbacks:
        - class_path: RoundProgress
        - class_path: VisitLog
        - class_path: ClientData
        - class_path: ClientAccuracy
          init_args: {{own_models: true}}
      trainer.enable_checkpointing: false
      data.init_args.source: ${{run}}/opinions/train.jsonl
      data.init_args.split.test_source: ${{run}}/opinions/test.jsonl
      data.init_args.format.encoder: {scalar(draft.encoder)}
      federated.clients_per_round: {CLIENTS_PER_ROUND}
      federated.clients_at_once: {CLIENTS_PER_ROUND}
  table:
    call: fedlight.recipes.polis.opinion_table
    with:
      train: ${{run}}/opinions/train.jsonl
      test: ${{run}}/opinions/test.jsonl
      methods:
        FedBis: {{train: "${{run}}/fedbis"}}
"""


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
