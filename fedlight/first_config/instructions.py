"""Which columns of unknown rows are the instruction, its input and the response."""

from collections.abc import Mapping, Sequence

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
)


def find_instructions(columns: Sequence[Column], given: Mapping[str, str | None]) -> FoundColumns:
    """Return the columns of instructions: a conversation's, else by name, else the question stands before the response.

    Args:
        columns: all columns of the rows.
        given: role -> column that the user named, or None.

    Raises:
        GuessError: several columns could have a role, or there are no two columns with text.

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
    question = _named(texts, "question", given)
    response = _named(answers, "response", given)
    taken = {guess.value for guess in (question, response) if guess}
    left = [column for column in texts if column.name not in taken]
    if question is None and response is None and len(left) == 2:
        question = Guess("question", left[0].name, "the first of the two columns with text", sure=False)
        response = Guess("response", left[1].name, "the second of the two columns with text", sure=False)
    question = question or _only(left, "question")
    response = response or _only([column for column in left if column.name != question.value], "response")
    rest = [column for column in texts if column.name not in (question.value, response.value)]
    extra = _named(rest, "input", given)
    guesses = {"instruction": question}
    guesses |= ({"input": extra} if extra else {}) | {"response": response}  # in the order of the table
    return FoundColumns([*guesses.values()], {name: guess.value for name, guess in guesses.items()})


def _named(columns: Sequence[Column], role: str, given: Mapping[str, str | None]) -> Guess | None:
    return pick(columns, role, given.get(role), required=False)


def _only(columns: Sequence[Column], role: str) -> Guess:
    if len(columns) == 1:
        return Guess(role, columns[0].name, "the only column with text that is left", sure=False)
    if columns:
        raise GuessError(ambiguous(role, [column.name for column in columns]))
    ends = ", or end conversations with an answer of the assistant" * (role == "response")
    raise GuessError(f"no column with text is left for the {role}: say it with --{role} COLUMN{ends}")
