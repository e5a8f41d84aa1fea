"""All guesses about unknown rows for one method, put together, for the config and the table."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from statistics import median_high
from typing import Any, Literal

import numpy as np

from fedlight.datamodules.rows.columns import field_at, text_at
from fedlight.datamodules.rows.rows import load_rows
from fedlight.datamodules.text.templates import CHAT, MESSAGES, Template
from fedlight.datamodules.text.tokens import SAMPLED, check_known, draw_rows, encode
from fedlight.devices.hardware import choose_device
from fedlight.devices.measure.number_type import choose_dtype
from fedlight.first_config import settings
from fedlight.first_config.columns import (
    BEFORE,
    FEWEST_ROWS,
    NOBODY,
    REPLY,
    SHARES,
    Column,
    FoundColumns,
    Guess,
    GuessError,
    check_given,
    describe,
    find_client,
    pick,
    score_name,
)
from fedlight.first_config.roles import find_answers, find_instructions, find_votes, is_opinion
from fedlight.first_config.settings import Sizes
from fedlight.pretrained.hub import find_model, load_tokenizer
from fedlight.support.types import Rows
from fedlight.support.words import count_noun

SELECTORS = ("fedbis", "fedbiscuit")  # which compare answers and write none
ON_VOTES = (*SELECTORS, "dpo")
ON_INSTRUCTIONS = ("feddca", "fewfedpit")
METHODS = ("fedbis", "fedbiscuit", "feddca", "fewfedpit", "sft", "dpo")
DEFAULT_MODEL = "Qwen/Qwen2-0.5B"
SHOWN = 3  # most rows that a line of the table names
NARROW = 256  # models of at most this width learn at high rates alone
FEW_ROWS = 100


@dataclass(frozen=True)
class Wishes:
    """Settings that the user has given."""

    source: str  # file, folder or hub name
    method: str | None = None  # one of `METHODS`; None: by the data
    model: str = DEFAULT_MODEL  # folder or hub name
    columns: Mapping[str, str | None] = field(default_factory=dict)  # role -> column, or None
    answers: Sequence[str] | None = None  # columns of both answers
    values: Mapping[str, Sequence[str]] | None = None  # raw values for ``a``, ``b``, ``tie``
    choices: tuple[str, str] | None = None  # two words for the answers in the prompt
    template: str | None = None  # text with slots
    public: str | None = None  # the server's rows, for feddca


@dataclass(frozen=True)
class Draft:
    """Settings of a first config."""

    wishes: Wishes  # settings that the user has given
    method: str  # one of `METHODS`
    is_votes: bool  # whether the rows are votes, else instructions
    rows: int  # number of rows
    columns: dict[str, str]  # column map, with ``client`` where there is one
    choice_values: dict[str, str | list[str]]  # see `fedlight.datamodules.rows.votes`
    template: str  # text or name
    choices: tuple[str, str] | None  # words for both answers; None where no comparison is shown
    max_tokens: int  # most tokens
    fitting: float  # share of the rows that have no more, as far as some of them tell
    sizes: Sizes  # rounds, clients, batch
    lr: float  # learning rate
    positions: int | None  # positions of the model; None: not known
    dtype: str  # number type of the base
    guesses: list[Guess]  # lines of the table
    looks: str = ""  # a prompt of a chat template with its answer


@dataclass(frozen=True)
class ModelFacts:
    """Facts from a model's files."""

    tokenizer: Any
    positions: int | None
    width: int


def make_draft(wishes: Wishes) -> Draft:
    """Read the rows and the model's tokenizer, and guess the rest.

    Raises:
        GuessError: something cannot be told; the message names the candidates and the option that settles it.
        RowsError, OSError: the rows or the model cannot be read.
    """
    rows = load_rows(wishes.source)
    if wishes.public is not None:
        load_rows(wishes.public)
    if len(rows) == 1:
        raise GuessError(
            f"{wishes.source} has one row, with {', '.join(map(str, rows[0]))}: give a file with a row for each example"
        )
    columns = describe(rows)
    # --client none is no column.
    check_given(
        columns, {role: name for role, name in wishes.columns.items() if (role, name) != ("client", NOBODY)}
    )
    for name in wishes.answers or ():
        check_given(columns, {"answers": name})
    if (opinions := [column.name for column in columns if is_opinion(column)]) and not wishes.answers:
        raise GuessError(
            f"column {opinions[0]} says agree and disagree, but not with what: --statements FILE has the texts"
        )
    chosen, is_votes = _find_roles(columns, wishes)
    paths, values, guesses = chosen.columns, chosen.choice_values, [*chosen.guesses]
    method = guesses[0].value
    _refuse_unused(wishes, method, is_votes)
    client = find_client(columns, list(paths.values()), wishes.columns.get("client"))
    guesses.append(client)
    needed = [path for name, path in paths.items() if name != "input"]  # an instruction may have no input
    row_counts = _rows_of_clients(rows, columns, client.value, needed)
    numbers = settings.choose_sizes(row_counts)
    model = read_model(wishes.model)
    template, choices, more = _text(method, is_votes, paths, model, wishes)
    if template == CHAT:  # it keeps the turns of a conversation apart
        turns = [name for name in ("instruction", "prompt") if paths.get(name, "").endswith(BEFORE)]
        paths = {MESSAGES if name in turns else name: path for name, path in paths.items()}
    guesses += more + _splits(columns, paths) + _without_reply(columns, paths)
    sample = [rows[place] for place in draw_rows(len(rows))]
    # The values of a choice are not in any text.
    texts = [text_at(row, path) for row in sample for name, path in paths.items() if name != "choice"]
    remedy = "name another model with --model FOLDER_OR_HUB_NAME"
    if warning := check_known(model.tokenizer, wishes.model, texts, wishes.source, remedy):
        guesses.append(Guess("model", wishes.model, warning, sure=False))
    asks: Literal["instruction", "prompt", "choice"] = "prompt" if is_votes else "instruction"
    shape = Template.named(template, paths, "choice" if choices else asks).for_tokenizer(model.tokenizer)
    max_tokens, fitting = _tokens(sample, paths, is_votes, shape, choices, model)
    if not fitting:
        remedy = "the most of a first run: shorten the texts, or write a config by hand, with data.max_tokens"
        if max_tokens == model.positions:
            remedy = f"all that {wishes.model} reads: name a model that reads more with --model"
        raise GuessError(f"no text fits into {max_tokens} tokens, {remedy}")
    looked_at = "the texts" if len(rows) <= SAMPLED else f"{SAMPLED} texts drawn at random"
    reason = f"{fitting:.0%} of {looked_at} fit; what does not is left out"
    guesses.append(Guess("max_tokens", max_tokens, reason, sure=fitting > 0.8))
    guesses += settings.explain(numbers, row_counts)
    lr = 0.003 if model.width <= NARROW else 0.0001
    reason = f"the model is {model.width} wide; usual for LoRA on such models"
    guesses.append(Guess("lr", lr, reason, sure=False))
    # A fixed type: with "auto" in the config, results would depend on the machine.
    kind = choose_dtype("auto", choose_device(), model.width)
    guesses.append(Guess("dtype", kind.name, kind.reason.removesuffix(" (dtype: auto)")))
    if method == "fewfedpit" and median_high(row_counts) > FEW_ROWS:
        reason = f"FewFedPIT is for clients with fewer than {FEW_ROWS} rows"
        guesses.append(Guess("few rows", "no", reason, sure=False))
    talks = (field_at(row, paths[MESSAGES], MESSAGES) for row in rows) if MESSAGES in paths else ()
    looks = settings.show(shape, paths, next(filter(None, talks), "")) if shape.is_chat else ""
    if client.value:
        paths["client"] = client.value
    paths |= _category(columns, [*paths.values()], wishes.columns.get("category"))
    return Draft(
        wishes, method, is_votes, len(rows), paths, values, template, choices, max_tokens, fitting,
        numbers, lr, model.positions, kind.name, guesses, looks,
    )  # fmt: skip


def _find_roles(columns: Sequence[Column], wishes: Wishes) -> tuple[FoundColumns, bool]:
    """Return the columns, after the method among the guesses, and whether the rows are votes."""
    given, wanted = wishes.columns, wishes.method
    are_votes = wishes.answers or wishes.values or any(map(given.get, ("choice", "chosen", "rejected")))
    refusal: GuessError | None = None
    try:
        if given.get("response"):
            are_votes = False
            raise GuessError("--response is the answer to an instruction; votes have --answers COLUMN COLUMN")
        chosen = find_votes(columns, given, wishes.answers, wishes.values)
    except GuessError as error:
        if are_votes or wanted in ON_VOTES:  # the user has said that they are votes
            raise
        refusal = error
    if refusal is None and wanted in ON_INSTRUCTIONS:
        raise GuessError(
            f"--method {wanted} trains on instructions with responses, but the rows look like votes on two answers: take "
            "fedbis, fedbiscuit, dpo or sft, or name the columns with --question COLUMN --response COLUMN"
        )
    if refusal is not None:
        try:
            chosen = find_instructions(columns, given)
        except GuessError:
            has_answers = False
            with suppress(GuessError):
                has_answers = bool(find_answers(columns))
            if has_answers and wanted is None:  # the rows are rather votes: say why they are not
                raise refusal from None
            raise
    method, others = ("sft", "instructions with responses; --method feddca and fewfedpit can use them too")
    if refusal is None:
        method, others = ("fedbis", "votes on two answers; --method fedbiscuit, dpo and sft can use them too")
    guess = Guess("method", method, f"the rows are {others}", sure=False)
    if wanted is not None:
        guess = Guess("method", wanted, "given with --method")
    return replace(chosen, guesses=[guess, *chosen.guesses]), refusal is None


def _refuse_unused(wishes: Wishes, method: str, is_votes: bool) -> None:
    """Raise GuessError for an option that this method does not read."""
    unused = {
        "--public": wishes.public and method != "feddca",
        "--choices": wishes.choices and method not in SELECTORS,
        "--input": wishes.columns.get("input") and is_votes,
    }
    for option, is_unused in unused.items():
        if is_unused:
            raise GuessError(
                f"{option} is of no use to --method {method}: leave it out, or give another --method"
            )


def read_model(name: str) -> ModelFacts:
    """Return the facts from a model's files, without loading its weights.

    Raises:
        GuessError: it is an encoder, which writes nothing.
        OSError: it cannot be found.
    """
    from transformers import AutoConfig

    try:
        where = find_model(name)
        config = AutoConfig.from_pretrained(where)
        tokenizer = load_tokenizer(name, "model")
    except OSError as error:
        remedy = "another model is named with --model FOLDER_OR_HUB_NAME, or by a name that `fedlight models` lists"
        raise OSError(f"{error}; {remedy}") from None
    kinds = config.architectures or []
    if kinds and not any(kind.endswith(("CausalLM", "LMHeadModel")) for kind in kinds):
        raise GuessError(f"--model {name} is a {kinds[0]}: name a causal language model, which writes text")
    return ModelFacts(tokenizer, getattr(config, "max_position_embeddings", None), config.hidden_size)


def _rows_of_clients(
    rows: Rows, columns: Sequence[Column], client: str | None, needed: Sequence[str]
) -> list[int]:
    """Return the number of complete rows of each client."""
    whole = np.ones(len(rows), dtype=bool)
    for column in columns:
        if column.name in needed:
            whole &= column.filled
    if client is None:
        count = int(whole.sum())
        shares = min(SHARES, max(count // FEWEST_ROWS, 1))
        return [count // shares] * shares
    known = [column for column in columns if column.name == client]
    # A path into lists, which the user may give, is no column.
    owners = known[0] if known else Column.of(client, [text_at(row, client) for row in rows])
    counts = np.bincount(owners.codes[whole & owners.filled])
    return counts[counts > 0].tolist() or [len(rows)]


def _text(
    method: str, is_votes: bool, paths: Mapping[str, str], model: ModelFacts, wishes: Wishes
) -> tuple[str, tuple[str, str] | None, list[Guess]]:
    """Return template, choice words, and their lines of the table."""
    chat, tokens = settings.has_chat(model.tokenizer), None
    if method in SELECTORS:
        tokens = settings.find_choices(model.tokenizer, "prompt" in paths, wishes.choices, wishes.template)
        template = settings.choice_template("prompt" in paths, tokens.value, chat)
        reason = "shows both answers and ends with a colon, before the choice token"
    elif is_votes and "prompt" not in paths:
        raise GuessError(f"--method {method} answers a question: say which column with --question COLUMN")
    else:
        slot = "prompt" if is_votes else "instruction"
        template, reason = settings.response_template("input" in paths, model.positions, slot, chat)
    if wishes.template:
        template, reason = wishes.template, "given with --template"
    line = Guess("template", template, reason)
    return (template, tokens.value, [tokens, line]) if tokens else (template, None, [line])


def _tokens(
    rows: Sequence[Any],
    paths: Mapping[str, str],
    is_votes: bool,
    shape: Template,
    choices: tuple[str, str] | None,
    model: ModelFacts,
) -> tuple[int, float]:
    """Return ``max_tokens`` and the share of rows that fit."""
    texts = []
    for row in rows:
        fields = {name: field_at(row, path, name) for name, path in paths.items()}
        if not fields.get(MESSAGES, "-"):  # a row without turns is left out of training as well
            continue
        fields |= {slot: "" for slot in shape.slots if slot not in fields}
        if "chosen" in fields:
            fields |= {"response_a": fields["chosen"], "response_b": fields["rejected"]}
        answers = [fields["response_a"], fields["response_b"]] if is_votes else [fields["response"]]
        # The longer answer has to fit as well.
        ending = f" {choices[0]}" if choices else shape.continuation(max(answers, key=len)) + shape.closing
        texts.append(shape.render(fields, ending).text)
    if not texts:
        raise GuessError(
            "each conversation has a turn without text, as calls of tools are, and would be left out"
        )
    # Some tokenizers add a first and a last token.
    lengths = [len(encoding.ids) + 2 for encoding in encode(model.tokenizer, texts)]
    return settings.choose_tokens(lengths, model.positions)


def _splits(columns: Sequence[Column], paths: Mapping[str, str]) -> list[Guess]:
    """Return a line for a column that says which rows are for tests: a run would train on them too."""
    reason = "tells them apart, a run does not: give those for tests a file of their own (val_source)"
    return [
        Guess(f"rows of {', '.join(column.values)}", "all", f"column {column.name} {reason}", sure=False)
        for column in columns
        if column.name not in paths.values()
        and {"train", "training"} & {value.lower() for value in column.values}
        and len(column.values) > 1
    ]


def _without_reply(columns: Sequence[Column], paths: Mapping[str, str]) -> list[Guess]:
    """Return a line for conversations without a reply at their end."""
    left_out = []
    for column in columns:
        if column.name in paths.values() and column.name.endswith(REPLY) and not column.filled.all():
            places = (np.flatnonzero(~column.filled) + 1).tolist()
            named = ", ".join(map(str, places[:SHOWN])) + (", ..." if len(places) > SHOWN else "")
            reason = f"{column.name.removesuffix(REPLY)} does not end with a reply in row {named}"
            left_out.append(Guess("left out", count_noun(len(places), "row"), reason, sure=False))
    return left_out


def _category(columns: Sequence[Column], taken: Sequence[str], given: str | None) -> dict[str, str]:
    """Return the column of the categories, if a name speaks for one: the data of clients are counted by it."""
    free = [
        column
        for column in columns
        if column.name not in taken
        and 1 < column.distinct <= len(column.codes) / 2
        and score_name(column.name, "category") >= 3
    ]
    with suppress(GuessError):  # of two such columns, none is needed
        if guess := pick(free, "category", given, required=False):
            return {"category": guess.value}
    return {}
