"""Values on the command line and in configs as they were written: texts of templates, and whole numbers."""

import functools
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from fedlight.support.checks import MOST_DEPTH, check_yaml
from fedlight.support.pokes import parser_function, set_parser_function

ENDING = "template"  # of the keys whose values are texts: ``template``, ``choice_template`` and so on


def as_written(text: str) -> str:
    r"""Return a typed template: ``\n`` begins a new line.

    Examples:
        >>> as_written(r"Question: {prompt}\nAnswer:").splitlines()
        ['Question: {prompt}', 'Answer:']
    """
    return text.replace("\\n", "\n")


def typed_templates(arguments: Sequence[str]) -> tuple[list[str], set[str]]:
    r"""Return arguments with templates as ``--KEY=TEXT``, and the texts.

    Examples:
        >>> typed_templates(["fit", "--data.template", r"Q: {prompt}\nA:", "--model", "toy"])
        (['fit', '--data.template=Q: {prompt}\nA:', '--model', 'toy'], {'Q: {prompt}\nA:'})
    """
    rewritten, texts, rest = [], set(), iter(arguments)
    for argument in rest:
        key, equals, value = argument.partition("=")
        is_template = key.startswith("--") and key.endswith(ENDING)
        given = value if equals else next(rest, None) if is_template else None
        if is_template and given is not None:
            argument = f"{key}={as_written(given)}"
            texts.add(as_written(given))
        rewritten.append(argument)
    return rewritten, texts


@contextmanager
def loaded_as_written(mode: str, texts: Collection[str]) -> Iterator[None]:
    """Keep the parser of this mode from reading these texts as YAML, and all others within the bounds of `check_yaml`."""
    from jsonargparse import ArgumentParser, get_loader, set_loader  # here: recipes are read without it
    from yaml import YAMLError

    ArgumentParser(parser_mode=mode).parse_string("{}")  # the first use makes the mode's loader
    load = get_loader(mode)

    @functools.wraps(load)  # jsonargparse looks at its signature
    def load_others(text: str, **options: Any) -> Any:
        # YAML would read a template as a map or a list.
        if text in texts:
            return text
        if len(text) > MOST_DEPTH or "*" in text:  # shorter ones without aliases pass no bound
            check_yaml(text, "a config or value")
        return load(text, **options)

    set_loader(mode, load_others, exceptions=(YAMLError,))
    try:
        yield
    finally:
        set_loader(mode, load, exceptions=(YAMLError,))


def integers_before_fractions() -> None:
    """Make all parsers of this process try int before float: ``1`` is one batch, ``1.0`` is all of them."""
    theirs = parser_function("order of types")
    if isinstance(theirs(int), tuple):  # the rank is ours already
        return

    # Python keeps one Optional[Union[int, float]] for a process, in the order of the package imported first.
    def rank(subtype: Any) -> tuple[int, bool]:
        return theirs(subtype), subtype is float

    set_parser_function("order of types", rank)
