"""Numbers in the prose of the pages: each has to be a published figure of its section, or to be named as a setting.

Looked at are numbers with a decimal point and percentages, outside of written tables, code, links and formulas. A
number is a figure if one of the section, as it is printed, is the same when it is rounded to as many digits.
"""

import re
from collections.abc import Iterable, Iterator

from published.figures import filled
from published.measurements import ROOT, Published
from published.tables import BLOCK, table

RESULTS = "docs/results.md"
# Pages that quote figures of docs/results.md, from whatever section.
QUOTING = ("README.md", "docs/devices.md", "docs/judges.md", "docs/privacy.md", "fedlight/toy/README.md")
NUMBER = re.compile(r"(?<![\w.])(\d+(?:,\d{3})*\.\d+(?:e-?\d+)?|\d+(?:\.\d+)?(?= ?%))(?![\w]|\.\d)")
NO_PROSE = (
    re.compile(r"<!--.*?-->", re.DOTALL),
    re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE),
    re.compile(r"\$\$.*?\$\$", re.DOTALL),
    re.compile(r"`[^`\n]*`"),
    re.compile(r"\]\([^)]*\)"),
    re.compile(r"https?://\S+"),
)


def sections(text: str) -> dict[str, str]:
    """Heading of the second level -> what stands under it; under an empty heading what stands before the first."""
    pieces = re.split(r"^## (.*)$", text, flags=re.MULTILINE)
    return {"": pieces[0], **dict(zip(pieces[1::2], pieces[2::2], strict=True))}


def numbers(text: str) -> list[str]:
    """Those of the prose, as they are written.

    Example:
        >>> numbers("With `0.5` it is 0.74 (0.2 with eq. 4), 98 % of 12.")
        ['0.74', '0.2', '98 %']
    """
    text = BLOCK.sub("", text)
    for pattern in NO_PROSE:
        text = pattern.sub(" ", text)
    found = NUMBER.finditer(text)
    return [one[0] + " %" * text[one.end() :].lstrip(" ").startswith("%") for one in found]


def is_printed(number: str, figures: Iterable[str]) -> bool:
    """Is it one of the figures, rounded to the digits that it is written with?

    Example:
        >>> is_printed("0.75", ["0.749"]), is_printed("0.76", ["0.749"]), is_printed("98 %", ["0.976"])
        (True, False, True)
    """
    value, places = _read(number)
    for one in figures:
        other, digits = _read(one)
        if digits >= places and abs(value - other) <= 0.5 * 10.0**-places + 1e-9:
            return True
    return False


def _read(number: str) -> tuple[float, int]:
    """The value and the number of its decimal places; of a percentage those of the share that it is."""
    percent = number.endswith("%")
    digits = number.rstrip("% ").replace(",", "")
    mantissa, _, exponent = digits.partition("e")
    places = len(mantissa.partition(".")[2]) - int(exponent or 0)
    return float(digits) / (100 if percent else 1), places + 2 * percent


def figures_in(text: str) -> list[str]:
    """All numbers of a text, as they are written."""
    return [found[0] for found in re.finditer(r"\d+(?:,\d{3})*(?:\.\d+)?(?:e-?\d+)?(?: %)?", text)]


def figures_of(published: Published, section: str | None = None) -> list[str]:
    """Everything that measurements of a section, or of all, have printed in tables, or say."""
    found: list[str] = []
    for measurement in published.measurements.values():
        if section in (None, measurement.section):
            for name in measurement.tables:
                found += figures_in(" ".join(figure.text for figure in table(published, name)[1]))
            for text in measurement.said:
                found += figures_in(filled(text, published.measurements, measurement)[0])
    return found


def unknown(published: Published) -> Iterator[str]:
    """Each number of the prose that is neither a figure nor a setting, with its page and its section."""
    known = figures_of(published)
    for page in QUOTING:
        told = published.pages.get(page, {})
        text = (ROOT / page).read_text(encoding="utf-8")
        if not told.get("unguarded"):
            yield from _unknown(page, text, known, told.get("settings", []))
    told = published.pages.get(RESULTS, {})
    for section, text in sections((ROOT / RESULTS).read_text(encoding="utf-8")).items():
        if section not in told.get("unguarded", []):
            settings = told.get("settings", {}).get(section, [])
            yield from _unknown(f"{RESULTS}, {section}", text, figures_of(published, section), settings)


def _unknown(place: str, text: str, figures: list[str], settings: list[str]) -> Iterator[str]:
    for number in numbers(text):
        if number not in settings and not is_printed(number, figures):
            yield f"{place}: {number}"
