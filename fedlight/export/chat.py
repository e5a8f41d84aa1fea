"""``fedlight chat RUN [--selector RUN]``: the tuned model beside the raw one, and which of both a selector prefers."""

import argparse
import math
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
from rich.columns import Columns
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from fedlight.datamodules.text.encoding import Comparison
from fedlight.datamodules.text.templates import Template
from fedlight.devices import hardware
from fedlight.export.opened import open_run
from fedlight.export.write import template_name, template_of
from fedlight.judges.selector_judge import SelectorJudge
from fedlight.modules.reward import RewardModule
from fedlight.modules.selector import SelectorModule
from fedlight.runs.facts import within
from fedlight.support.checks import check_range
from fedlight.support.console import OneLineArguments

ASKED = ("instruction", "prompt", "question", "post")
"""Slots for what is typed, the first that a template has."""
NARROW = 100  # characters of a terminal below which both answers stand below each other
QUIT = ("/quit", "/exit")


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of ``fedlight chat``."""
    parser = OneLineArguments(
        "fedlight chat",
        description="Answers of a run's tuned model beside those of its raw base, to lines that are typed or piped in; "
        "each line is a prompt of its own.",
    )
    parser.add_argument("run", help="folder of a run, or of a recipe's stage, that trained a model to write")
    parser.add_argument("--selector", metavar="RUN", help="folder of a FedBis or FedBiscuit run, to compare")
    parser.add_argument("--checkpoint", metavar="FILE", help="these weights, or `last`; default: the adapter")
    parser.add_argument("--model", help="hub name or folder of the base, where it has moved since the run")
    parser.add_argument("--max-new-tokens", type=int, default=80, help="of an answer; default: 80")
    parser.add_argument("--temperature", type=float, default=0.0, help="default: 0, the likeliest answer")
    parser.add_argument("--seed", type=int, default=0, help="of the draws with a temperature; default: 0")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SLOT=TEXT",
        help="text of another slot of the prompt's template, such as title=...; default: empty",
    )
    return parser


def main(argv: Sequence[str]) -> None:
    """Answer line by line, until the input ends."""
    options = make_parser().parse_args(argv)
    if options.max_new_tokens < 1 or not 0 <= options.temperature < math.inf:
        raise ValueError("--max-new-tokens is at least 1, and --temperature a number from 0")
    check_range("--seed", options.seed, 0, 2**64 - 1)
    opened = open_run(options.run, options.checkpoint, options.model)
    if issubclass(opened.kind, (SelectorModule, RewardModule)):
        raise ValueError(
            f"{opened.run.label} trained a model that compares answers and writes none: give a run of SFTModule or "
            "DPOModule as RUN, and this one with --selector"
        )
    template = template_of(opened) or Template("{prompt}", "prompt")
    if wrong := [text for text in options.set if "=" not in text]:
        raise ValueError(f"--set {wrong[0]}: it has the form SLOT=TEXT")
    fields = dict(text.split("=", 1) for text in options.set)
    slot = _slot_of(template)
    others = [name for name in template.slots if name != slot]
    if unknown := sorted(fields.keys() - {*others}):
        raise ValueError(
            f"--set {unknown[0]}: the template of {opened.run.label} has the slots {', '.join(others) or '-'} besides "
            f"{slot}, which is typed"
        )
    fields = dict.fromkeys(template.slots, "") | fields
    console = Console()
    with _selector(options.selector) as judge, hardware.choose_device("auto"):
        model = opened.load()
        settings = {"n": 1, "max_new_tokens": options.max_new_tokens, "temperature": options.temperature}
        settings["stop"] = template.stops
        for line in _lines(console):
            fields[slot] = line
            prompt = [template.render(fields).text]
            try:
                ((raw,),) = model.generate(prompt, raw=True, seed=options.seed, **settings)
                ((tuned,),) = model.generate(prompt, seed=options.seed, **settings)
            except ValueError as error:  # such as a prompt that is too long
                console.print(Text(f"not answered: {error}", style="red"))
                continue
            width = console.width if console.width < NARROW else console.width // 2 - 1  # 1 for the gap
            panels = [
                Panel(Text(text or "(nothing)"), title=title, border_style=colour, width=width)
                for title, text, colour in (("raw", raw, "dim"), ("tuned", tuned, "green"))
            ]
            console.print(Columns(panels, padding=(0, 1)))
            if judge is not None:
                console.print(Text(preference(judge, fields, line, raw, tuned), style="bold"))


def preference(judge: SelectorJudge, fields: Mapping[str, str], asked: str, raw: str, tuned: str) -> str:
    """Return in words which answer the selectors prefer, with the probability that each gives to the tuned one."""
    if raw == tuned:
        return "both answers are the same"
    texts = dict.fromkeys(judge.template.slots, "") | dict(fields)
    if not texts[slot := _slot_of(judge.template)]:  # the selector's template may ask under another name
        texts[slot] = asked
    log_probs = judge.log_probs([Comparison(texts, raw, tuned)])[:, 0]  # [selectors, 2]
    if np.isnan(log_probs).any():
        return f"not compared: the pair is longer than the selector's max_tokens={judge.max_tokens}"
    shares = 1 / (1 + np.exp(log_probs[:, 0] - log_probs[:, 1]))  # the softmax over both answers
    probabilities = ", ".join(f"{share:.3f}" for share in shares)
    for_tuned, for_raw = int((shares > 0.5).sum()), int((shares < 0.5).sum())
    if for_tuned == for_raw:
        return f"undecided (probability of the tuned answer: {probabilities})"
    most, better = max((for_tuned, "tuned"), (for_raw, "raw"))
    voters = f"{most} of {len(shares)} selectors prefer" if len(shares) > 1 else "the selector prefers"
    return f"{voters} the {better} answer (probability of the tuned one: {probabilities})"


def _lines(console: Console) -> Iterator[str]:
    """Yield the typed lines, or those of a pipe, without empty ones."""
    if not sys.stdin.isatty():
        for line in filter(None, map(str.strip, sys.stdin)):
            console.print(Text(f"> {line}", style="cyan"))
            yield line
        return
    console.print("a line is a prompt; /quit or Ctrl-D ends", style="dim")
    while True:
        try:
            line = console.input("[cyan]> [/]").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        if line in QUIT:
            return
        if line:
            yield line


def _slot_of(template: Template) -> str:
    """Return the slot for the typed text."""
    return next(str(slot) for slot in (*ASKED, template.trim, *template.slots) if slot in template.slots)


@contextmanager
def _selector(folder: str | None) -> Iterator[SelectorJudge | None]:
    """Give the selectors of a run, which are loaded at the first pair; None without a run."""
    if folder is None:
        yield None
        return
    opened = open_run(folder)
    settings, named = opened.settings, template_name(opened)
    chooses = issubclass(opened.kind, SelectorModule) and settings.get("head", "choice") == "choice"
    if not chooses or named is None:
        raise ValueError(
            f"--selector {folder}: {opened.run.label} trained {opened.kind.__name__}, which is no selector that reads "
            "two answers: give a run of FedBis or FedBiscuit"
        )
    if opened.is_on_merged_base:
        raise ValueError(
            f"--selector {folder}: {opened.run.label} trained on a base with another adapter merged into it, which its own "
            "adapter does not hold: give a selector that was trained on the model as it is"
        )
    with tempfile.TemporaryDirectory() as saved:
        if opened.adapter is None:  # the judge reads folders of adapters alone
            opened.load().save_adapter(saved)
        of_data = within(opened.run.config(), "data", "init_args") or {}
        yield SelectorJudge(
            str(opened.adapter or saved),
            settings["model"],
            base=settings.get("base", "plain"),
            choice_template=named[0],
            choices=tuple(settings.get("choices") or ("A", "B")),
            max_tokens=of_data.get("max_tokens") or 512,
            dtype=settings.get("dtype", "auto"),
            trim=(of_data.get("format") or {}).get("trim", "auto"),
        )
