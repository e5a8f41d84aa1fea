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
