"""Numbers in the prose of the pages: each has to be a published figure of its section, or to be named as a setting.

Looked at are numbers with a decimal point and percentages, outside of written tables, code, links and formulas. A
number is a figure if a table or a field of ``said`` prints it with the same digits.
"""

import re
from collections.abc import Collection, Iterator

from published.measurements import ROOT, Published
from published.tables import BLOCK, RESULTS, said, table

# Pages that quote figures of the pages of results, from whatever section.
QUOTING = (
    "README.md",
    "docs/algorithms.md",
    "docs/devices.md",
    "docs/judges.md",
    "docs/papers/fedbiscuit.md",
    "docs/privacy.md",
    "docs/real_votes.md",
    "docs/threats.md",
    "fedlight/toy/README.md",
)
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


def results() -> dict[str, str]:
    """Heading of the second level -> what stands under it, of all pages of results; their beginnings have an empty one."""
    pages = [sections((ROOT / page).read_text(encoding="utf-8")) for page in RESULTS]
    whole = {heading: text for page in pages for heading, text in page.items()}
    return whole | {"": "".join(page[""] for page in pages)}


def numbers(text: str) -> list[str]:
    """Those of the prose, in their written form.

    Example:
        >>> numbers("With `0.5` it is 0.74 (0.2 with eq. 4), 98 % of 12.")
        ['0.74', '0.2', '98 %']
    """
    text = BLOCK.sub("", text)
    for pattern in NO_PROSE:
        text = pattern.sub(" ", text)
    found = NUMBER.finditer(text)
    return [one[0] + " %" * text[one.end() :].lstrip(" ").startswith("%") for one in found]


def figures_in(text: str) -> set[str]:
    """All numbers of a text, in their written form.

    Example:
        >>> sorted(figures_in("0.60 ± 0.14, 98 %, 1,024"))
        ['0.14', '0.60', '1,024', '98 %']
    """
    return {found[0] for found in re.finditer(r"\d+(?:,\d{3})*(?:\.\d+)?(?:e-?\d+)?(?: %)?", text)}


def figures_of(published: Published, section: str | None = None) -> set[str]:
    """Everything that measurements of a section, or of all, have printed in tables, or say."""
    found: set[str] = set()
    for measurement in published.measurements.values():
        if section in (None, measurement.section):
            shown = [figure for name in measurement.tables for figure in table(published, name)[1]]
            for figure in [*shown, *said(published, measurement)]:
                found |= figures_in(figure.text)
    return found


def unknown(published: Published) -> Iterator[str]:
    """Each number of the prose that is neither a figure nor a setting, with its page and its section."""
    known = figures_of(published)
    for page in QUOTING:
        told = published.pages.get(page, {})
        text = (ROOT / page).read_text(encoding="utf-8")
        yield from _unknown(page, text, known, told.get("settings", []))
    settings = published.pages.get("results", {}).get("settings", {})
    for section, text in results().items():
        of_section = figures_of(published, section)
        yield from _unknown(f"results, {section}", text, of_section, settings.get(section, []))


def _unknown(place: str, text: str, figures: Collection[str], settings: Collection[str]) -> Iterator[str]:
    for number in numbers(text):
        if number not in figures and number not in settings:
            yield f"{place}: {number}"
