"""Folders of stages and runs as commands leave them, for what reads them afterwards."""

import json
from pathlib import Path

from tiny_world import write_lines


def stage_folder(folder: Path, told: str | dict = "fit selector.yaml", **texts: str) -> Path:
    """Make the folder of a recipe's stage; ``visits_csv`` is the text of visits.csv, and so on."""
    folder.mkdir(parents=True)
    settings = {"stage": told} if isinstance(told, str) else told
    (folder / "settings.json").write_text(json.dumps(settings))
    for name, text in texts.items():
        (folder / ".".join(name.rsplit("_", 1))).write_text(text)
    return folder


def logged(folder: Path, columns: str, *rows: str, version: int = 0) -> Path:
    """Write the metrics of a run, of which the first columns are ``epoch`` and ``step``; give its folder."""
    write_lines(folder / f"metrics/version_{version}/metrics.csv", f"epoch,step,{columns}", *rows)
    return folder
