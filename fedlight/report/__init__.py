"""Report of runs as one HTML page, with every figure as PNG and CSV beside it.

`runs` reads folders of finished, running or damaged runs; `sections` makes the page's headings from them; `figures` draws,
for the page and for stages of recipes; `page` writes the file. Nothing here trains, and no file is trusted.
"""

from fedlight.support.lazy import lazy_names

_FILES = {"write_report": "page"}

__all__ = [*_FILES]
__getattr__ = lazy_names(__name__, _FILES)
