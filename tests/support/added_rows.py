"""Rows that an augmentation has added, as a run records them."""

import json

from tiny_world import write_lines


def added_rows(folder, rows):
    """Record rows (client, text, score) in a folder, and give its name."""
    lines = [
        {"client": client, "rank": place, "row": place, "score": score, "source": "x"}
        | {"fields": {"instruction": text}}
        for place, (client, text, score) in enumerate(rows)
    ]
    write_lines(folder / "added.jsonl", *map(json.dumps, lines))
    return str(folder)
