"""``fedlight init DATA [--method METHOD] [--model MODEL] [--output FILE] [--dry-run] ...``."""

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

from fedlight import first_config
from fedlight.datamodules.rows.rows import TEXT_ENDINGS
from fedlight.datamodules.text.templates import CHAT, MESSAGES
from fedlight.first_config.columns import Guess
from fedlight.first_config.draft import DEFAULT_MODEL, METHODS, SELECTORS, Draft, Wishes, make_draft
from fedlight.first_config.settings import SHORT
from fedlight.recipes.overlay import yaml_line
from fedlight.support.console import OneLineArguments, print_table
from fedlight.support.files import write_whole

ABOUT = """Write a config for data that fedlight has not seen, and say what was guessed:

  fedlight init votes.jsonl --model FOLDER_OR_HUB_NAME
  fedlight fit --config votes_fedbis.yaml
  fedlight report runs/votes_fedbis

Columns, clients, meaning of the choices, template, tokens and sizes come from the rows and the model's tokenizer. What
cannot be told is asked for by the option that says it. With --dry-run the checks of `fedlight run --dry-run` follow."""
ROLES = {
    "question": "what was asked",
    "choice": "which answer won",
    "chosen": "the answer that won, where the rows have that instead of a choice",
    "rejected": "the one that lost",
    "input": "further input of an instruction",
    "response": "response to an instruction",
    "client": "whose row it is; none: rows are dealt out at random",
    "category": "category of a row",
}
USED = ("choice", "client")
"""Roles of columns that votes on single statements have as well."""
FILES = Path(first_config.__file__).parent / "config_files"


def main(argv: Sequence[str]) -> None:
    """Write the config, print the table, and check the config where wanted."""
    options = make_parser().parse_args(argv)
    values = {name: getattr(options, name) for name in ("a", "b", "tie") if getattr(options, name)}
    if values and not ("a" in values and "b" in values):
        raise ValueError("--a, --b and --tie belong together: say which values mean A and which mean B")
    if options.statements:  # first: a draft refuses votes on single statements
        return _write_opinions(options)
    draft = make_draft(
        Wishes(
            options.data,
            options.method,
            options.model,
            {role: getattr(options, role) for role in ROLES},
            options.answers,
            values or None,
            tuple(options.choices) if options.choices else None,
            # A shell passes \n on as two characters.
            options.template.replace("\\n", "\n") if options.template else None,
            options.public,
        )
    )
    file = _free(options, draft.method)
    _show(f"{draft.wishes.source}: {draft.rows:,} rows", draft.guesses)
    if draft.looks:
        print(f"what the model reads:\n\n{draft.looks}\n")
    write_whole(file, write(draft, str(file)))
    print(
        f"written: {file}\nnext:    fedlight fit --config {file}\nthen:    fedlight report runs/{file.stem}"
    )
    if draft.method not in SELECTORS:
        print(f"and:     fedlight chat runs/{file.stem}")
    # Late: the import takes seconds, and the lines above need not wait for it.
    from fedlight.preflight import dry_run, finding

    if options.dry_run:
        findings = dry_run.check({"stages": {"fit": {"fit": str(file)}}}, Path("runs") / file.stem, [0])
        finding.show(f"{file}: before the run", findings)
        sys.exit(finding.exit_code(findings))
    for each in dry_run.foretell(file):
        print(f"{each.what}: {each.detail}")


def _write_opinions(options: argparse.Namespace) -> None:
    from fedlight.first_config.opinions import make_opinions

    if options.method not in (None, "fedbis"):
        raise ValueError(f"--method {options.method} cannot use --statements: take fedbis, or leave it out")
    given = {role: getattr(options, role) for role in ROLES}
    others = ("answers", "a", "choices", "template", "public", *(role for role in ROLES if role not in USED))
    if unused := [name for name in others if getattr(options, name)]:
        raise ValueError(f"--{unused[0]} is of no use to --statements: leave it out")
    # The default model writes text and is no encoder of sentences.
    encoder = "hashed" if options.model == DEFAULT_MODEL else options.model
    draft = make_opinions(options.data, options.statements, given, encoder)
    file = _free(options, "opinions")
    _show(f"{draft.votes}: {draft.rows:,} votes", draft.guesses)
    write_whole(file, filled("opinions", draft, str(file)))
    print(f"written: {file}\nnext:    fedlight run {file}\nthen:    fedlight report runs/{file.stem}")
    if options.dry_run:
        from fedlight.preflight.dry_run import dry_run

        sys.exit(dry_run(str(file)))


def _free(options: argparse.Namespace, method: str) -> Path:
    """Return the file to write, which is not there yet."""
    file: Path = options.output or Path(f"{_stem(options.data)}_{method}.yaml")
    if file.exists() and not options.force:
        raise ValueError(f"{file} exists already: give another --output FILE, or --force to replace it")
    return file


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of ``fedlight init``."""
    parser = OneLineArguments(
        "fedlight init",
        usage="fedlight init DATA [--method METHOD] [--model MODEL] [--output FILE] [--dry-run] [--ROLE COLUMN ...]",
        description=ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("data", metavar="DATA", help="JSON, CSV or Parquet file, folder, or hub name")
    parser.add_argument("--method", choices=METHODS, help="default: fedbis for votes, sft for instructions")
    parser.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        help=f"folder, hub name or name of `fedlight models`; default: {DEFAULT_MODEL}",
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: DATA_METHOD.yaml here")
    parser.add_argument("--force", action="store_true", help="replace the file")
    parser.add_argument("--dry-run", action="store_true", help="check the written config before a run")
    for role, words in ROLES.items():
        parser.add_argument(f"--{role}", metavar="COLUMN", help=words)
    parser.add_argument("--answers", nargs=2, metavar="COLUMN", help="the two answers, A first")
    for name, words in {"a": "A won", "b": "B won", "tie": "neither won"}.items():
        parser.add_argument(f"--{name}", nargs="+", metavar="VALUE", help=f"values that mean: {words}")
    parser.add_argument("--choices", nargs=2, metavar="WORD", help="two words, single tokens of the model")
    parser.add_argument("--template", metavar="TEXT", help=r"text with slots as {prompt}; \n is a line break")
    parser.add_argument("--statements", metavar="DATA", help="what DATA agrees or disagrees with (Polis)")
    parser.add_argument("--public", metavar="DATA", help="the server's rows for feddca; default: half")
    return parser


def _stem(source: str) -> str:
    """Return the name of a source without folders and endings.

    Examples:
        >>> _stem("data/votes.jsonl.gz"), _stem("owner/name:config"), _stem("toy:votes?seed=1")
        ('votes', 'name_config', 'toy_votes_seed_1')
    """
    name = Path(source.rstrip("/")).name
    for ending in (".gz", *TEXT_ENDINGS, ".parquet"):  # the outer ending first
        name = name.removesuffix(ending)
    return re.sub(r"[^\w.-]", "_", name).strip("._") or "data"


def _show(title: str, guesses: Sequence[Guess]) -> None:
    from rich.text import Text

    rows = []
    for what, value, reason, sure in map(astuple, guesses):
        shown = (
            " and ".join(map(str, value))
            if isinstance(value, tuple)
            else str("none" if value is None else value)
        )
        rows.append((what, shown, Text("yes", "green") if sure else Text("no", "yellow"), reason))
    print_table(title, ("what", "guess", "sure", "why"), rows)


def write(draft: Draft, file: str) -> str:
    """Return the YAML of a draft, which will be called ``file``."""
    has_input = "{input}" in draft.template or draft.template in ("alpaca", CHAT)
    wide = "input" not in draft.columns and (not has_input or MESSAGES in draft.columns)
    columns: dict[str, str] = draft.columns if wide or draft.is_votes else {"input": "", **draft.columns}
    is_short = draft.positions is not None and draft.positions <= SHORT
    compares = draft.method in SELECTORS
    return filled("config", draft, file, columns=columns, is_short=is_short, compares=compares)


def filled(template: str, draft: Any, file: str, **values: Any) -> str:
    """Return a template of ``config_files`` with the values of a draft, for a file that will be called ``file``."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(FILES),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"scalar": yaml_line, "block": _block}
    folder = f"runs/{Path(file).stem}"
    return environment.get_template(f"{template}.template").render(
        draft=draft, file=file, folder=folder, **values
    )


def _block(text: str, indent: int) -> str:
    r"""Return a text for a YAML value: on one line, or as a block.

    Examples:
        >>> print("t: " + _block("a {b}\nc:", 2))
        t: |-
          a {b}
          c:
    """
    # A block takes blanks before its first line for indentation, and editors remove those behind a line.
    if "\n" not in text or any(line != line.rstrip() or line[:1] == " " for line in text.split("\n")):
        return yaml_line(text)
    return "|-\n" + "\n".join(" " * indent * bool(line) + line for line in text.split("\n"))
