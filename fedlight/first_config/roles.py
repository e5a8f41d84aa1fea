"""Which columns of unknown rows are those of votes, or of instructions.

Of votes: question, two answers, which one won, and the meaning of its values. Two columns are the answers if their names
differ in a or b (1 or 2, left or right), or if the same texts occur in both. The choice is a column with few values; two of
them name the answers.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations, zip_longest

import numpy as np

from fedlight.first_config.columns import (
    BEFORE,
    REPLY,
    Column,
    FoundColumns,
    Guess,
    GuessError,
    ambiguous,
    pick,
    score_name,
    split_name,
)

PAIRS = [("a", "b"), ("1", "2"), ("0", "1"), ("left", "right"), ("first", "second"), ("one", "two")]
PAIRS += [("x", "y")]
TIES = {"tie", "tied", "equal", "both", "same", "draw", "neutral", "none", "neither", "pass", "skip"}
TIES |= {"unsure", "similar", "undecided", "bothbad", "nan", "null"}
LONGEST_CHOICE = 20  # most characters of a choice, on average
ENOUGH = 2  # least points of two columns to be taken for the answers


def find_votes(
    columns: Sequence[Column],
    given: Mapping[str, str | None],
    answers: Sequence[str] | None = None,
    values: Mapping[str, Sequence[str]] | None = None,
) -> FoundColumns:
    """Return the columns of votes, those that the user has named among them.

    ``values`` are the user's raw values for ``a``, ``b`` and ``tie``. Raises GuessError, with the candidates and the option
    that settles it, where something cannot be told.
    """
    pair = _find_decided_pair(columns, given)
    if pair is not None and answers is None:
        chosen, rejected = pair
        guesses = [chosen, rejected]
        named, meaning = {"chosen": chosen.value, "rejected": rejected.value}, {}
    else:
        both = Guess("answers", (*answers,), "given with --answers") if answers else find_answers(columns)
        first, second = both.value
        choice = _find_choice(columns, both.value, given.get("choice"), values)
        meaning = read_choice(_column(columns, choice.value).values, both.value, values)
        guesses = [both, choice, _explain(meaning, told=bool(values))]
        named = {"response_a": first, "response_b": second, "choice": choice.value}
    left = [column for column in columns if column.is_text and column.name not in named.values()]
    question = None if given.get("question") else _shared_turns(left, named)
    question = question or pick(left, "question", given.get("question"))
    if question is None:
        guesses.append(Guess("question", None, "no other column has text: none is shown", sure=False))
        return FoundColumns(guesses, named, meaning)
    return FoundColumns([question, *guesses], {"prompt": question.value, **named}, meaning)


def find_answers(columns: Sequence[Column]) -> Guess:
    """Return the names of the two columns with the answers, A first.

    Examples:
        >>> from fedlight.first_config.columns import describe
        >>> rows = [{"q": "why is it", "u": "it is so", "v": "it is not"}, {"q": "is it", "u": "it is not", "v": "it is so"}]
        >>> find_answers(describe(rows)).value
        ('u', 'v')
    """
    texts = _answers(columns)
    stems = Counter(map(_stem, columns))  # of k1, k2, k3 the numbers say nothing
    pairs = {(first.name, second.name): (first, second) for first, second in combinations(texts, 2)}
    ends = {names: _ends(*names) if stems[_stem(first)] <= 2 else None for names, (first, _) in pairs.items()}
    points = {names: _likeness(*pair, ends[names] is not None) for names, pair in pairs.items()}
    best = max(points.values(), default=0)
    leading = [pair for pair, value in points.items() if value == best]
    if best < ENOUGH or len(leading) > 1:
        names = ", ".join(column.name for column in texts) or "none"
        raise GuessError(
            f"which columns are the two answers? The columns with text are {names}: say it with --answers COLUMN COLUMN, or "
            "with --chosen COLUMN --rejected COLUMN"
        )
    both = leading[0]
    named = ends[both]
    if named is not None:  # A first, in whichever order the columns are
        both = both[::-1] if named[::-1] in PAIRS else both
        return Guess("answers", both, f"their names end in {' and '.join(sorted(named))}")
    return Guess("answers", both, "the same texts occur in both", sure=False)


def read_choice(
    raw: Sequence[str], answers: tuple[str, str], given: Mapping[str, Sequence[str]] | None = None
) -> dict[str, str | list[str]]:
    """Return the meaning of a choice's values: ``a``, ``b``, and ``tie`` where there are ties; empty if it is not known.

    Of the ``raw`` values, empty for many, one may be the name of a column of A and B, ``answers``; ``given`` are those that
    the user named, which mean nothing where the rows have others, or one of them twice.

    Examples:
        >>> read_choice(["model_b", "tie", "model_a"], ("answers_a", "answers_b"))
        {'a': 'model_a', 'b': 'model_b', 'tie': 'tie'}
        >>> read_choice(["2", "1"], ("x", "y")), read_choice(["yes", "no"], ("x", "y"))
        ({'a': '1', 'b': '2'}, {})
    """
    if given:
        told = [value for values in given.values() for value in values]
        if len({*told}) < len(told) or (raw and not {*told} <= {*raw}):
            return {}
        named = {name: values for name, values in given.items() if values}
        return {name: values[0] if len(values) == 1 else list(values) for name, values in named.items()}
    ties = [value for value in raw if TIES & {*split_name(value)}]
    decided = [value for value in raw if value not in ties]
    if set(decided) == {"-1", "0", "1"}:  # else three values that are no ties are no choice
        ties, decided = ["0"], ["-1", "1"]
    if len(decided) != 2:
        return {}
    a, b = decided
    if set(decided) == {"-1", "1"}:
        a, b = "-1", "1"
    elif set(decided) == set(answers):
        a, b = answers
    elif (ends := _ends(a, b)) is None:
        return {}
    elif ends[::-1] in PAIRS:
        a, b = b, a
    tie: dict[str, str | list[str]] = {"tie": ties[0] if len(ties) == 1 else ties} if ties else {}
    return {"a": a, "b": b, **tie}


def is_opinion(column: Column) -> bool:
    """Return whether a column has opinions on one thing.

    Examples:
        >>> [is_opinion(Column.of("v", values)) for values in (("agree", "pass", "disagree"), ("a", "b", "tie"))]
        [True, False]
    """
    return {"agree", "disagree"} <= set(column.values) <= {"agree", "disagree", "pass"}


def _find_decided_pair(
    columns: Sequence[Column], given: Mapping[str, str | None]
) -> tuple[Guess, Guess] | None:
    """Return the columns of the chosen and the rejected answer, where the rows have such instead of a choice."""
    texts = _answers(columns)
    named = given.get("chosen"), given.get("rejected")
    if any(named) and not all(named):
        raise GuessError("--chosen and --rejected belong together: give both, or none")
    # Strong names alone: better, good and bad are in names of many columns.
    both = all(any(score_name(column.name, role) >= 3 for column in texts) for role in ("chosen", "rejected"))
    if not all(named) and (given.get("choice") or not both):
        return None
    chosen, rejected = (pick(texts, role, given.get(role)) for role in ("chosen", "rejected"))
    return (chosen, rejected) if chosen and rejected else None


def _answers(columns: Sequence[Column]) -> list[Column]:
    return [column for column in columns if column.is_text and not column.name.endswith(BEFORE)]


def _stem(column: Column) -> tuple[str, ...]:
    return tuple(word for word in split_name(column.name) if not word.isdigit())


def _shared_turns(left: Sequence[Column], named: Mapping[str, str]) -> Guess | None:
    """Return the turns before both answers, where these are the last turns of two conversations that begin alike."""
    names = [path.removesuffix(REPLY) + BEFORE for path in named.values() if path.endswith(REPLY)]
    before = [column for column in left if column.name in names]
    if len(before) != 2 or before[0].different != before[1].different:
        return None
    if not np.array_equal(before[0].codes, before[1].codes):
        return None
    return Guess("question", before[0].name, "the turns before both answers, which are the same")


def _find_choice(
    columns: Sequence[Column],
    answers: tuple[str, str],
    given: str | None,
    values: Mapping[str, Sequence[str]] | None,
) -> Guess:
    if given is not None:
        column = _column(columns, given)
        if not read_choice(column.values, answers, values):
            raise GuessError(_unread(column))
        return Guess("choice", given, "given with --choice")
    few = [
        column
        for column in columns
        if len(column.values) >= 2 and column.mean_length <= LONGEST_CHOICE and column.name not in answers
    ]
    meanings = {column.name: read_choice(column.values, answers, values) for column in few}
    readable = [column for column in few if meanings[column.name]]
    named = [column for column in few if score_name(column.name, "choice") >= 3]
    # A column of such a name is the choice, so another one that can be read would be a wrong guess.
    if named and not any(column in readable for column in named):
        raise GuessError(_unread(named[0]))
    if not readable:
        raise GuessError(
            f"no column says which answer won; the columns with few values are {', '.join(meanings) or 'none'}. Say it with "
            "--choice COLUMN --a VALUE --b VALUE, or name the columns with --chosen COLUMN --rejected COLUMN"
        )
    if len(readable) == 1:
        return Guess("choice", readable[0].name, "two of its few values name the answers", sure=bool(named))
    if not named:
        # Of several such columns the choice is likely the one with ties.
        with_ties = [name for name, meaning in meanings.items() if "tie" in meaning]
        if len(with_ties) == 1:
            reason = "two of its values name the answers, and one a tie"
            return Guess("choice", with_ties[0], reason, sure=False)
        raise GuessError(ambiguous("choice", [column.name for column in readable]))
    picked = pick(readable, "choice", None)
    assert picked is not None
    return picked


def _unread(column: Column) -> str:
    values = ", ".join(column.values) or f"{column.distinct:,} different ones"
    return (
        f"column {column.name}: which of its values says that A won? They are {values}. Say it with --a VALUE --b VALUE, "
        "and --tie VALUE where there are ties"
    )


def _explain(meaning: Mapping[str, str | list[str]], told: bool) -> Guess:
    words = ", ".join(f"{value} is {name}" for name, value in meaning.items())
    if told:
        return Guess("choice values", words, "given with --a and --b")
    # 0 and 1, also as 0.0 and 1.0, may be read either way: the table asks the user to look.
    if {str(meaning[name]).removesuffix(".0") for name in "ab"} not in ({"0", "1"}, {"-1", "1"}):
        return Guess("choice values", words, "the values name the answers")
    turned = f"--a {meaning['b']} --b {meaning['a']} turns it"
    reason = f"the smaller number is read as the first answer; {turned}"
    return Guess("choice values", words, reason, sure=False)


def _likeness(first: Column, second: Column, by_name: bool) -> float:
    """Return how much two columns look like the two answers to a question, from 0 to 6."""
    texts, others = set(first.different) - {""}, set(second.different) - {""}
    # Answers of one pool meet several others, so the same texts are in both columns.
    shared = len(texts & others) / max(min(len(texts), len(others)), 1)
    lengths = sorted((first.mean_length, second.mean_length))
    alike = lengths[0] / lengths[1] if shared or by_name else 0  # texts of one length are no answers yet
    return 3 * by_name + 2 * (shared > 0.1) + alike


def _ends(first: str, second: str) -> tuple[str, str] | None:
    """Return the words that differ in two names, if these are a pair such as a and b.

    Examples:
        >>> _ends("answer_a", "answer_b"), _ends("text2", "text1"), _ends("model_a", "answer_b"), _ends("yes", "no")
        (('a', 'b'), ('2', '1'), None, None)
    """
    words, others = split_name(first), split_name(second)
    differing = [pair for pair in zip_longest(words, others) if pair[0] != pair[1]]
    is_pair = len(differing) == 1 and {differing[0], differing[0][::-1]} & {*PAIRS}
    return differing[0] if is_pair else None


def _column(columns: Sequence[Column], name: str) -> Column:
    return next(column for column in columns if column.name == name)


def find_instructions(columns: Sequence[Column], given: Mapping[str, str | None]) -> FoundColumns:
    """Return the columns of instructions: a conversation's, else by name, else the question stands before the response.

    Raises GuessError where several columns could have a role, or no two columns have text.

    Examples:
        >>> from fedlight.first_config.columns import describe
        >>> rows = [{"ask": "who is it", "reply": "a cat"}, {"ask": "what", "reply": "b"}]
        >>> find_instructions(describe(rows), {}).columns
        {'instruction': 'ask', 'response': 'reply'}
    """
    texts = [column for column in columns if column.is_text]
    talks = [column.name.removesuffix(BEFORE) for column in texts if column.name.endswith(BEFORE)]
    if len(talks) == 1 and not any(given.get(role) for role in ("question", "response")):
        named = {"instruction": talks[0] + BEFORE, "response": talks[0] + REPLY}
        before = Guess("question", named["instruction"], "the turns before the last one")
        reply = Guess("response", named["response"], "the last turn, which is the model's")
        return FoundColumns([before, reply], named)
    # The answers of a classification are single words, so a response may be no text.
    answers = [column for column in columns if column.is_text or score_name(column.name, "response") >= 3]
    question = pick(texts, "question", given.get("question"), required=False)
    answers = [column for column in answers if question is None or column.name != question.value]
    response = pick(answers, "response", given.get("response"), required=False)
    taken = {guess.value for guess in (question, response) if guess}
    left = [column for column in texts if column.name not in taken]
    if question is None and response is None and len(left) == 2:
        question, response = (
            Guess(role, column.name, f"the {place} of the two columns with text", sure=False)
            for role, column, place in zip(("question", "response"), left, ("first", "second"), strict=True)
        )
    question = question or _only(left, "question")
    response = response or _only([column for column in left if column.name != question.value], "response")
    rest = [column for column in texts if column.name not in (question.value, response.value)]
    extra = pick(rest, "input", given.get("input"), required=False)
    # In the order of the table.
    roles = {"instruction": question, "input": extra, "response": response}
    guesses = {name: guess for name, guess in roles.items() if guess}
    return FoundColumns([*guesses.values()], {name: guess.value for name, guess in guesses.items()})


def _only(columns: Sequence[Column], role: str) -> Guess:
    if len(columns) == 1:
        return Guess(role, columns[0].name, "the only column with text that is left", sure=False)
    if columns:
        raise GuessError(ambiguous(role, [column.name for column in columns]))
    ends = ", or end conversations with an answer of the assistant" * (role == "response")
    raise GuessError(f"no column with text is left for the {role}: say it with --{role} COLUMN{ends}")
