"""The YAML of a draft: one commented file, from a template in ``config_files``, without settings of the embedded toy."""

from pathlib import Path
from typing import Any

from fedlight.datamodules.text.templates import CHAT, MESSAGES
from fedlight.first_config.draft import SELECTORS, Draft
from fedlight.first_config.words import SHORT
from fedlight.recipes.overlay import yaml_line

FILES = Path(__file__).parent / "config_files"


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
