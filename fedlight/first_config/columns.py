"""Properties of the columns of unknown rows, and scores of their names and values for a role."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any, cast

import numpy as np

from fedlight.datamodules.rows.columns import ASKERS, is_turn, reply_of, speaker_of, text_of
from fedlight.support.types import Rows
from fedlight.support.words import count_noun, near

FEW = 12  # most values that a column may have for them to be listed
NAMES: dict[str, tuple[str, str]] = {
    "question": (
        "question instruction prompt query ask request claim task_prompt",
        "post problem title text",
    ),
    "response": ("response answer output completion reply target solution", "summary label result"),
    "input": ("input context passage", "background"),
    "choice": ("choice winner vote preference preferred verdict pick picked better", "label labels decision"),
    "client": (
        "client worker user annotator judge participant rater voter labeler labeller patient hospital clinic device phone "
        "owner collection who",
        "source site author person member customer speaker reviewer institution organisation organization school",
    ),
    "category": ("category topic domain subject genre", "type qtype kind task field"),
    "chosen": ("chosen preferred accepted", "better winner good"),
    "rejected": ("rejected dispreferred refused", "worse loser bad"),
    "statement": ("statement comment opinion", "text"),
    "item": ("statement_id comment_id item_id", "item statement comment id nr number"),
    "moderated": ("moderated", "status moderation"),
    "group": ("group", "cluster"),
}
"""Role -> words that a column's name has for it, strong ones and weak ones."""
REPLIES = {"assistant", "gpt", "chatgpt", "model", "bot", "ai"}
"""Speakers of the last turn of a conversation that a model can be tuned on."""
REPLY, BEFORE = ".-1", ".:-1"
"""What follows a conversation's name in the path of its last turn, and of the turns before it."""
NOBODY = "none"  # --client of rows without an owner, which are dealt out at random
SHARES = 10  # most clients among whom such rows are dealt out
FEWEST_ROWS = 4  # of such a client, at least


class GuessError(ValueError):
    """Error of a guess that cannot be made; the message names the candidates and the option that settles it."""


@dataclass(frozen=True)
class Guess:
    """Something that was found in the data."""

    what: str  # setting, in words
    value: Any  # its value
    reason: str  # in one line
    sure: bool = True  # whether nothing else was likely


@dataclass(frozen=True)
class FoundColumns:
    """Columns of votes or instructions."""

    guesses: list[Guess]  # findings, for the table
    columns: dict[str, str]  # column map, without the client
    # ``a``, ``b`` and maybe ``tie`` -> raw value, or a list of them; empty where the rows have no choice
    choice_values: dict[str, str | list[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Column:
    """Texts of one column in all rows, each different text once."""

    name: str  # dotted path, as in a column map
    different: list[str]  # its texts in order of first appearance, "" where there is none
    codes: np.ndarray  # index into ``different`` for each row, ``(rows,)``

    @classmethod
    def of(cls, name: str, texts: Sequence[str]) -> "Column":
        """Return the column with these texts, one for each row.

        Examples:
            >>> column = Column.of("site", ["north", "", "south", "north"])
            >>> column.values, column.counts, column.filled.tolist()
            (('north', 'south'), [2, 1], [True, False, True, True])
        """
        index = {text: place for place, text in enumerate(dict.fromkeys(texts))}
        return cls(name, list(index), np.fromiter(map(index.__getitem__, texts), np.int64, len(texts)))

    @cached_property
    def filled(self) -> np.ndarray:
        """Whether each row has a text, ``(rows,)``."""
        return np.array([bool(text) for text in self.different])[self.codes]

    @property
    def counts(self) -> list[int]:
        """Number of rows with each different text, without ""."""
        rows = np.bincount(self.codes, minlength=len(self.different)).tolist()
        return [count for text, count in zip(self.different, rows, strict=True) if text]

    @property
    def distinct(self) -> int:
        """Number of different texts, without ""."""
        return len(self.different) - ("" in self.different)

    @property
    def values(self) -> tuple[str, ...]:
        """Its texts, without "", where they are few; else empty."""
        return tuple(text for text in self.different if text) if self.distinct <= FEW else ()

    @cached_property
    def words(self) -> float:
        """Share of the texts that have a blank between words."""
        with_blanks = np.array([len(text.split(None, 1)) > 1 for text in self.different])
        return float(with_blanks[self.codes].sum() / max(self.filled.sum(), 1))  # [self.codes]: by row

    @property
    def is_text(self) -> bool:
        """Whether people would read it: several words in a good part of the rows, and not always the same."""
        return self.words > 0.3 and self.distinct > 1

    @cached_property
    def mean_length(self) -> float:
        """Mean number of characters."""
        return float(np.array([len(text) for text in self.different])[self.codes].mean())


def describe(rows: Rows) -> list[Column]:
    """Return the columns of one or more rows, those of nested values by dotted paths.

    A conversation that ends with a reply is two: the turns before the reply, and the reply, "" where another speaks last.

    Examples:
        >>> [(c.name, c.distinct, c.is_text) for c in describe([{"q": "a b", "who": 1}, {"q": "c d", "who": 1}])]
        [('q', 2, True), ('who', 1, False)]
        >>> turns = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c d"}]
        >>> [c.name for c in describe([{"messages": turns}])]
        ['messages.:-1', 'messages.-1']
    """
    if isinstance(rows, list):
        table = {name: [row.get(name) for row in rows] for name in dict.fromkeys(chain.from_iterable(rows))}
    else:  # of the package datasets, which makes a dictionary of each row slowly
        table = cast(Any, rows).to_dict()
    flat = [column for name, values in table.items() for column in _flatten(str(name), values)]
    return [Column.of(path, texts) for name, values in flat for path, texts in _texts(name, values)]


def _flatten(name: str, values: list[Any]) -> Iterator[tuple[str, list[Any]]]:
    """Yield the name and values of a column, or of each entry of its objects."""
    objects = [value if isinstance(value, dict) else {} for value in values]  # None has no entries
    if not any(objects) or not all(isinstance(value, dict) for value in values if value is not None):
        yield name, values  # in part plain values, which no dotted path has
    for inner in dict.fromkeys(chain.from_iterable(objects)):
        yield from _flatten(f"{name}.{inner}", [value.get(inner) for value in objects])


def _texts(name: str, values: list[Any]) -> Iterator[tuple[str, list[str]]]:
    if _is_conversation([value for value in values if value]):
        yield name + BEFORE, [text_of((value or [])[:-1]) for value in values]
        yield name + REPLY, [reply_of(value[-1]) if value else "" for value in values]
    else:
        yield name, [text_of(value) for value in values]


def _is_conversation(values: list[Any]) -> bool:
    """Return whether the last turns are replies of a model, apart from those of people."""
    if not values or not all(isinstance(value, list) and is_turn(value[-1]) for value in values):
        return False
    speakers = {speaker_of(value[-1]) for value in values}
    return bool(speakers & REPLIES) and speakers <= REPLIES | ASKERS  # without a reply last a row is left out


def split_name(name: str) -> list[str]:
    """Return the words of a column's name, in lower case.

    Examples:
        >>> split_name("answerText_B"), split_name("text2"), split_name("info.post")
        (['answer', 'text', 'b'], ['text', '2'], ['info', 'post'])
    """
    apart = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name)  # of camelCase
    return [word.lower() for word in re.findall(r"[^\W\d_]+|\d+", apart)]


def score_name(name: str, role: str) -> int:
    """Return how much a column's name speaks for a role, from 0 to 4.

    Examples:
        >>> [score_name(name, "client") for name in ("worker", "worker_id", "source", "sources_seen", "turn")]
        [4, 3, 2, 0, 0]
    """
    words, (strong, weak) = split_name(name), map(str.split, NAMES[role])
    forms = {*words, *(word.removesuffix("s") for word in words)}
    is_one, is_strong = len(words) == 1, not forms.isdisjoint(strong)
    if name.lower() in strong or is_strong:
        return 4 if is_one or name.lower() in strong else 3
    # Weak words count alone: task_title is no question.
    return 2 * (name.lower() in weak or (is_one and not forms.isdisjoint(weak)))


def pick(columns: Sequence[Column], role: str, given: str | None, required: bool = True) -> Guess | None:
    """Return the column of a role: the given one, or the one whose name speaks for it most, or the only one.

    Where nothing speaks for any of them, GuessError is raised if a column is ``required``.
    """
    if given is not None:
        return Guess(role, given, f"given with --{role}")
    if not columns:
        return None
    scores = {column.name: score_name(column.name, role) for column in columns}
    best = max(scores.values())
    leading = [name for name, score in scores.items() if score == best]
    if best and len(leading) == 1:  # 3 and 4 are scores of strong words
        return Guess(role, leading[0], f"its name speaks for the {role}", sure=best > 2 or len(scores) == 1)
    if len(columns) == 1 and required:
        return Guess(role, leading[0], "the only column left that could be it", sure=False)
    if required or best:  # names that speak for several columns are a question even where none is needed
        raise GuessError(ambiguous(role, leading))
    return None


def ambiguous(role: str, candidates: Sequence[str]) -> str:
    """Return the message for several columns that could have a role.

    Examples:
        >>> ambiguous("client", ["site", "source"])
        'which column is the client? site or source could be: say it with --client COLUMN'
    """
    return f"which column is the {role}? {' or '.join(candidates)} could be: say it with --{role} COLUMN"


def check_given(columns: Sequence[Column], given: Mapping[str, str | None]) -> None:
    """Raise GuessError where a given column does not exist; paths into lists, such as ``a.0.text``, may."""
    known = [column.name for column in columns]
    for role, name in given.items():
        if name is not None and name not in known and "." not in name:
            hint = near(name, known) or f"; the columns are {', '.join(known)}"
            raise GuessError(f"--{role} {name}: there is no such column{hint}")


def find_client(columns: Sequence[Column], taken: Sequence[str], given: str | None) -> Guess:
    """Return the column of the clients; its value is None where there is none, and rows are dealt out.

    Its name speaks for it; else it has several values, each in several rows, and does not merely follow from the question.

    Columns in ``taken`` have another role; ``given`` is the one that the user named, or ``"none"``. Raises GuessError where
    several columns could be it, and no name speaks for one.

    Examples:
        >>> from fedlight.first_config.columns import describe
        >>> rows = [{"q": q, "worker": w, "id": q} for q in "abc" for w in "uv"]
        >>> find_client(describe(rows), ["q"], None).value
        'worker'
    """
    if given == NOBODY:
        return Guess("client", None, "--client none: rows are dealt out at random")
    if given is not None:
        return Guess("client", given, "given with --client")
    asked = [column for column in columns if column.name in taken]
    # Neither an id of each row nor a text.
    likely = [
        column
        for column in columns
        if column.name not in taken and 2 <= column.distinct <= column.filled.sum() / 2 and column.words < 0.9
    ]
    scores = [score_name(column.name, "client") for column in likely]
    best = max(scores, default=0)
    if best:
        could_be = [column for column, score in zip(likely, scores, strict=True) if score == best]
    else:  # an id of a question has one value wherever the question is; a voter has not
        could_be = [column for column in likely if not follows(column, asked)]
    if len(could_be) > 1:
        names = ambiguous("client", [column.name for column in could_be])
        raise GuessError(f"{names}, or --client none where rows are nobody's")
    if not could_be:
        reason = "no column says whose row it is: rows are dealt out at random; --client COLUMN names one"
        return Guess("client", None, reason, sure=False)
    (column,) = could_be
    low, high = min(column.counts), max(column.counts)
    rows = f"{f'{low:,} to ' if low < high else ''}{count_noun(high, 'row')} each"
    has = f"{column.distinct:,} values with {rows}"
    reason = f"its name, and {has}" if best else f"it has {has}, and does not follow from the text"
    # A score of 2 is that of a weak word, such as source.
    return Guess("client", column.name, reason, sure=best > 2)


def follows(column: Column, asked: Sequence[Column]) -> bool:
    """Return whether a column has one value wherever the asked columns are the same; False if these hardly repeat.

    Examples:
        >>> q, u = Column.of("q", list("aabb")), Column.of("u", list("1212"))
        >>> follows(q, [q]), follows(u, [q])
        (True, False)
    """
    rows = len(column.codes)
    index = {text: place for place, text in enumerate({text for other in asked for text in other.different})}
    # The same text has the same number in all columns; [asked columns][rows].
    codes = [np.array([index[text] for text in other.different])[other.codes] for other in asked]
    keys = np.zeros(rows, dtype=np.int64)
    # Sorted in each row, since the same two answers in the other order are the same comparison.
    for codes_in_order in np.sort(np.array(codes, dtype=np.int64).reshape(len(asked), rows), axis=0):
        # Numbered anew after each column, so that the product does not overflow.
        keys = np.unique(keys * len(index) + codes_in_order, return_inverse=True)[1]
    different = int(keys.max()) + 1
    with_values = np.unique(keys * len(column.different) + column.codes)
    # Where hardly any question is asked twice, every column follows from it, and that says nothing.
    return len(with_values) == different and (rows - different) * 10 >= rows
