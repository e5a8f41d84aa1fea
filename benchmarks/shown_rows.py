"""What a measurement found: printed, a row on a line, and written for ``reproduce.py record``."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def show(rows: Iterable[Mapping[str, Any]], file: Path | None, **more: Any) -> None:
    """Prints the rows, and writes them to a JSON file if one is given, with ``more`` beside them."""
    rows = list(rows)
    for row in rows:
        print("  ".join(f"{name}: {_short(value)}" for name, value in row.items()), flush=True)
    if file is not None:
        file.write_text(json.dumps({**more, "rows": rows}, indent=1) + "\n", encoding="utf-8")


def _short(value: Any) -> str:
    if isinstance(value, list):
        return "".join(f"\n  {_short(one)}" for one in value)
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_short(one)}" for name, one in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)
