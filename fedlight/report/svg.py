"""Matplotlib figures as SVG inside an HTML page, in the colours of the page's theme.

Matplotlib writes hex colours, ids that repeat from figure to figure, and a style sheet that would hold for the whole page.
Here colours of `fedlight.report.figures.style` become CSS variables, greys mixtures of ink and paper, ids get a prefix,
and the page's script can pick out an artist whose gid is ``series:NAME``.
"""

import io
import re
from html import escape

import matplotlib
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from fedlight.report.figures.style import COLORS, STYLE

DECLARATIONS = re.compile(r"<\?xml.*?\?>|<!DOCTYPE.*?>|<metadata>.*?</metadata>|<style.*?</style>", re.DOTALL)
COLOR = re.compile(r"(?P<property>fill|stroke|stop-color): (?P<color>#[0-9a-f]{6})\b")
COORDINATES = re.compile(r'\b(?:d|x|y|points)="[^"]*"')
DECIMALS = re.compile(r"(\.\d\d)\d+")  # hundredths of a point are too small to be seen
FONT = re.compile(r"font: (?P<size>[\d.]+px)[^;\"]*")
VARIABLES = {color.lower(): f"var(--series-{place})" for place, color in enumerate(COLORS, start=1)}


def inlined(figure: Figure, name: str, alt: str) -> str:
    """Return the ``<svg>`` element of a figure, as wide as the page allows; ``name``, once on a page, prefixes its ids."""
    see_through(figure)
    text = io.StringIO()
    with matplotlib.rc_context({**STYLE, "svg.fonttype": "none"}):
        FigureCanvasSVG(figure).print_svg(text, metadata={"Date": None})  # savefig would draw it twice
    return themed(text.getvalue(), name, alt)


def see_through(figure: Figure) -> None:
    """Make the background transparent."""
    for patch in (figure.patch, *(axes.patch for axes in figure.axes)):
        patch.set_alpha(0)


def themed(svg: str, name: str, alt: str) -> str:
    """Return matplotlib's SVG with the page's colours and with ids that are unique on the page.

    Examples:
        >>> themed('<svg><g id="a" style="fill: #0072b2; stroke: #808080"/></svg>', "x", "A dot")
        '<svg role="img" aria-label="A dot"><g id="x-a" style="fill: var(--series-1); stroke: var(--grey-50)"/></svg>'
    """
    svg = DECLARATIONS.sub("", svg).strip()
    svg = re.sub(r"<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="series:([^"]*)">', r'<g class="series" data-series="\1"><title>\1</title>', svg)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'(href="#|url\(#)', rf"\g<1>{name}-", svg)
    svg = COLOR.sub(lambda found: f"{found['property']}: {_variable(found['color'])}", svg)
    svg = FONT.sub(r"font-size: \g<size>", svg)
    svg = COORDINATES.sub(lambda found: DECIMALS.sub(r"\1", found[0]), svg)
    svg = re.sub(r"\n\s*", "\n", svg)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    return svg.replace("<svg", f'<svg role="img" aria-label="{escape(alt)}"', 1)


def _variable(color: str) -> str:
    """Return the page's variable for greys and the figures' own colours, other colours as they are."""
    red, green, blue = color[1:3], color[3:5], color[5:7]
    if red == green == blue:
        return f"var(--grey-{round(int(red, 16) / 255 * 20) * 5})"
    return VARIABLES.get(color, color)
