"""Instruction rows: read from a source by a column map, and gathered from several sources as a server's public rows.

Rows are equal where slots and response are equal; an instruction answered in several ways stays in once for each answer.

Leaving out the clients' own rows from the public ones keeps an experiment clean; a server that does not see the clients'
rows could not do it. In a real federation each client drops its own rows from those it is sent. A row that no client ever
gets would tell a reader of the public sources that some client may have it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from lightning.pytorch.utilities import rank_zero_info

from fedlight.datamodules.rows.columns import Columns, check_columns, complete_columns, field_at, text_at
from fedlight.datamodules.rows.fields import NO_SLOTS, OWNERS, make_question_key, make_row_key
from fedlight.datamodules.rows.given import GivenRows, RowsError
from fedlight.datamodules.text.chat import read_turns, write_turns
from fedlight.datamodules.text.templates import MESSAGES, Template, check_prompt
from fedlight.support.types import Fields, Rows

RESPONSE_COLUMNS = ("output", "response")
"""Columns of the response where the column map has none; the first is Alpaca's."""


def read_instructions(
    raw: Rows,
    columns: Columns,
    template: Template,
    source: str | GivenRows,
    setting: str = "columns",
    by_client: bool = False,
) -> list[dict[str, str]]:
    """Return the fields of each row; rows with a missing value and exact repetitions are left out and counted.

    A response that is a turn of a conversation, but the user's, is missing. With the template of a whole conversation and no
    column for the response, the response is the last answer of the conversation, and later turns are left out.

    The column map (setting ``setting`` in messages) is completed with the columns of the same names, and of the response
    with Alpaca's ``output`` first; "" is an absent column. With ``by_client`` a column ``client`` is read, too.

    Raises:
        RowsError: a column does not exist, or no row is complete.
    """
    named = [*template.slots, *["client"][:by_client]]
    defaults = {"response": RESPONSE_COLUMNS, **{name: [name] for name in named}}
    optional = {"input", *OWNERS} & {*named} - {*template.required}
    if whole := MESSAGES in named and not columns.get("response"):
        defaults["response"] = [columns.get(MESSAGES) or MESSAGES]
    columns = complete_columns(columns, raw, defaults, optional)
    columns = {name: path for name, path in columns.items() if path or name not in OWNERS}
    # All sources in one order.
    columns = {name: columns.get(name, "") for name in (*template.slots, *columns)}
    answer = columns["response"]
    check_prompt(template, {name for name, path in columns.items() if path == answer} - {MESSAGES})
    check_columns(raw, {name: path for name, path in columns.items() if path}, str(source), setting)
    needed = {*template.required, "response", *OWNERS} & set(columns)
    rows = [
        {name: field_at(row, path, name) if path else "" for name, path in columns.items()} for row in raw
    ]
    if whole:
        rows = [fields | _end_with_answer(fields[MESSAGES]) for fields in rows]
    asked = sum(
        not fields["response"] and text_at(row, columns["response"]) != ""
        for row, fields in zip(raw, rows, strict=True)
    )
    complete = [row for row in rows if all(row[name] for name in needed)]
    unique = list({tuple(row.values()): row for row in complete}.values())
    rank_zero_info(
        f"{source}: {len(rows):,} rows, {len(unique):,} examples; left out: {len(rows) - len(complete):,} missing"
        f"{f' ({asked:,} end without a reply)' if asked else ''}, {len(complete) - len(unique):,} duplicates"
        + "".join(f"; no column {name}" for name in optional - {*columns})
    )
    if not unique:
        empty = {name: sum(not row[name] for row in rows) for name in sorted(needed)}
        places = ", ".join(
            f"{setting}.{name}={columns[name]} in {count:,}" for name, count in empty.items() if count
        )
        raise RowsError(
            f"{source}: each of the {len(rows):,} rows has an empty value: {places}. Map these to other columns."
        )
    return unique


def _end_with_answer(messages: str) -> dict[str, str]:
    """Return the turns before the last answer of a conversation, and that answer; both empty where nothing was answered."""
    turns = read_turns(messages)
    while turns and turns[-1]["role"] != "assistant":
        turns.pop()  # no answer follows
    if not any(turn["role"] == "user" for turn in turns):  # a greeting answers no question
        return {MESSAGES: "", "response": ""}
    return {MESSAGES: write_turns(turns[:-1]), "response": turns[-1]["content"]}


def check_slots(columns: Columns, template: Template, setting: str = "columns") -> None:
    """Raise ValueError where a column map has no column, "", for the response or a required slot, or an unknown name."""
    needed = [*template.required, *(["response"] if MESSAGES not in template.slots else [])]
    for name in needed:
        if columns.get(name) == "":
            raise ValueError(f"{setting} has no {name!r}. Set {setting}.{name} to the column that holds it.")
    known = [*template.slots, *NO_SLOTS]
    # A map for several templates may have an input for those that show one.
    if unknown := [name for name, path in columns.items() if path and name not in [*known, "input"]]:
        raise ValueError(
            f"{setting}.{unknown[0]}={columns[unknown[0]]} would be read for nothing: use the names {', '.join(known)}."
        )


@dataclass
class PublicRows:
    """Rows that a server holds, each once, and counts of those left out."""

    # template slots, ``response``, and ``category`` where the column map has it
    rows: list[Fields] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)  # source of each row, ``len(rows)`` names
    repeated: int = 0  # rows left out because an earlier row is equal
    private: int = 0  # rows left out because a client has them
    # rows left out because their question is one of a client's validation examples, or held out
    asked: int = 0

    @classmethod
    def gather(
        cls,
        sources: Iterable[tuple[str | GivenRows, Sequence[Fields]]],
        private: Sequence[Fields] = (),
        asked: Sequence[Fields] = (),
    ) -> "PublicRows":
        """Merge the rows of named sources, without those of clients (``private``), of validation or held out (``asked``).

        Examples:
            >>> rows = [{"prompt": p, "response": r} for p, r in zip("xxxyz", "12134", strict=True)]
            >>> public = PublicRows.gather([("file", rows)], private=[rows[3]], asked=[{"prompt": "z", "response": "5"}])
            >>> [row["response"] for row in public.rows], public.repeated, public.private, public.asked
            (['1', '2'], 1, 1, 1)
        """
        known, questions = {make_row_key(row) for row in private}, {make_question_key(row) for row in asked}
        seen: set[tuple[str, ...]] = set()
        public = cls()
        for source, rows in sources:
            for row in rows:
                key = make_row_key(row)
                if key in known:
                    public.private += 1
                elif make_question_key(row) in questions:
                    public.asked += 1
                elif key in seen:
                    public.repeated += 1
                else:
                    seen.add(key)
                    public.rows.append(row)
                    public.sources.append(str(source))
        return public

    def __str__(self) -> str:
        places = len(set(self.sources))
        return (
            f"{len(self.rows):,} public rows of {places} source{'s'[: places != 1]}; left out: {self.repeated:,} repeated, "
            f"{self.private:,} equal to a client's, {self.asked:,} asked in validation or held out"
        )
