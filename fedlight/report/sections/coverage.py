"""Rows that were added to the clients' data: a map of their texts, their similarities, and coverage.

Figures 11 and 12 of FedDCA (Wang et al., 2024, https://arxiv.org/abs/2409.20135). Deviation: the report knows no domain but
the clients' own rows, so these are the grey ground, and added rows are told apart by their category where they have one.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedlight.datamodules.instructions.augmentation import Added
from fedlight.datamodules.instructions.augmentation_record import AugmentationRecord
from fedlight.datamodules.rows.fields import instruction_text
from fedlight.datamodules.vectors.embedding_cache import EmbeddingCache
from fedlight.datamodules.vectors.encoders import HashedEncoder
from fedlight.report.figures.coverage_plots import draw_similarities, scores_of, similarity_table
from fedlight.report.figures.retrieval_map import draw_groups_of_points, flatten, some
from fedlight.report.parts import Chart, Part, Section, Table, table_of
from fedlight.runs import facts
from fedlight.runs.contents import texts_in
from fedlight.runs.run import Run
from fedlight.support.files import read_text

POINTS = 800
"""Texts on the map, own and added together: t-SNE of them takes two or three seconds."""
STEPS = 500
PANELS = 6
HISTOGRAMS = 4
NAMED = 5  # categories with separate colours
OTHERS = "other categories"


class Addition(NamedTuple):
    """Rows that one augmentation added."""

    added: dict[str, list[Added]]  # client -> its rows, best first
    own_texts: list[str]  # texts of the clients' own rows, each once
    encoder: str  # identity of the encoder that chose the rows; empty where none did
    cache: str | None  # folder with that encoder's vectors, if any
    alpha: float | None  # rows as similar as this to a client's centre were passed over; None: no bound


def section(runs: Sequence[Run]) -> Section | None:
    """Return a map, similarities and numbers; None where nothing was added and no coverage was measured."""
    additions, faults = additions_of(runs)
    if not additions and not faults:
        return None
    parts: list[Part] = []
    if additions:
        parts = [_map(additions), *_similarities(additions), _table(additions)]
    intro = "What clients train on besides their own rows."
    return Section("coverage", "Added data and coverage", intro, parts, tuple(faults))


def _map(every: Mapping[str, Addition]) -> Chart:
    additions = dict(list(every.items())[:PANELS])
    left = f" {len(every) - PANELS:,} more runs are not drawn." if len(every) > PANELS else ""
    own_texts = list(dict.fromkeys(text for addition in additions.values() for text in addition.own_texts))
    ground = some(own_texts, POINTS // 4, 0, "report", "own")
    each = (POINTS - len(ground)) // len(additions)
    category = {name: _categories(addition) for name, addition in additions.items()}
    shown = {name: some(texts, each, 0, "report", name) for name, texts in category.items()}
    texts = list(dict.fromkeys([*ground, *(text for chosen in shown.values() for text in chosen)]))
    vectors, how = vectors_of(texts, additions)
    # Of three texts or fewer, t-SNE's perplexity would be below 1.
    place = dict(zip(texts, flatten(vectors, 0, STEPS) if len(texts) > 3 else vectors[:, :2], strict=True))
    frequent = Counter(label for labels in category.values() for label in labels.values()).most_common(NAMED)
    names = [label for label, _ in frequent]

    def point(text: str, run: str = "", label: str = "") -> dict[str, Any]:
        return {"run": run, "category": label, "x": float(place[text][0]), "y": float(place[text][1])}

    points = [point(text, name, category[name][text]) for name, chosen in shown.items() for text in chosen]
    panels = {name: _groups([row for row in points if row["run"] == name], names) for name in shown}
    own_places = np.array([place[text] for text in ground]).reshape(-1, 2)  # a shape also without any
    return Chart(
        "added_map",
        "Map of added rows",
        f"t-SNE of {how}: texts that are alike lie close together. Grey: {len(ground):,} of {len(own_texts):,} own rows; "
        f"colours: at most {each:,} added rows of each run. Distances between far points mean little.{left}",
        draw_groups_of_points(own_places, panels, "clients' own rows"),
        [*map(point, ground), *points],
    )


def _groups(points: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, np.ndarray]:
    groups: dict[str, list[tuple[float, float]]] = {name: [] for name in (*names, OTHERS)}
    for row in points:
        groups[row["category"] if row["category"] in names else OTHERS].append((row["x"], row["y"]))
    return {name or "added rows": np.array(places) for name, places in groups.items() if places}


def _categories(addition: Addition) -> dict[str, str]:
    """Return text -> category of the added rows; empty where a row has none."""
    rows = (row for of_client in addition.added.values() for row in of_client)
    return {instruction_text(row.fields): row.fields.get("category", "") for row in rows}


def _similarities(additions: Mapping[str, Addition]) -> list[Chart]:
    scores: dict[str, dict[str, np.ndarray]] = {}
    for name, addition in additions.items():
        for client, values in scores_of(addition.added).items():
            if np.isfinite(values).any():
                scores.setdefault(name, {})[client] = values[np.isfinite(values)]
    if not scores:
        return []
    shown = dict(list(scores.items())[:HISTOGRAMS])
    bounds = {additions[name].alpha for name in shown}
    are_cosines = all(additions[name].encoder for name in shown)
    table = similarity_table(shown)
    left = f" {len(scores) - len(shown):,} more runs are not drawn." if len(scores) > len(shown) else ""
    rows = [
        {"run": name, "client": client, "from": low, "to": high, "rows": rows}
        for name, histograms in table.items()
        for client, counts in histograms["counts"].items()
        for (low, high), rows in zip(pairwise(histograms["edges"]), counts, strict=True)
        if rows
    ]
    return [
        Chart(
            "added_similarities",
            "Scores by which rows were chosen",
            f"A thin line for each client, their mean thick; what a score is depends on the method.{left}",
            draw_similarities(
                table,
                bounds.pop() if len(bounds) == 1 else None,
                "cosine to the client's centre" if are_cosines else "score",
            ),
            rows,
        )
    ]


def _table(additions: Mapping[str, Addition]) -> Table:
    """Return a table with the numbers of added rows, and of texts that clients share."""
    lines = []
    for name, addition in additions.items():
        rows = sum(map(len, addition.added.values()))
        distinct = _categories(addition)
        known = len(set(distinct) & set(addition.own_texts))
        frequent = Counter(label for label in distinct.values() if label).most_common(1)
        top = f"{frequent[0][0]} ({frequent[0][1] / len(distinct):.0%})" if frequent else "-"
        lines.append(
            {
                "run": name,
                "clients": f"{len(addition.added):,}",
                "rows added": f"{rows:,}",
                "distinct texts": f"{len(distinct):,}",
                "clients' own": f"{known:,}",
                "most frequent category": top,
            }
        )
    caption = (
        "Distinct texts: without answers, each once. Clients' own: of these, how many a client had already."
    )
    return table_of("What was added", lines, caption)


def additions_of(runs: Sequence[Run]) -> tuple[dict[str, Addition], list[str]]:
    """Return the rows that each augmentation added, for the first seed that has it, and a line for each damaged record.

    Runs of several algorithms may share a record; it is read once and has the name of its folder.
    """
    additions: dict[str, Addition] = {}
    faults: list[str] = []
    seen: set[Path] = set()
    are_several = len({run.home for run in runs}) > 1
    for run in runs:
        folder = facts.augmentation_folder(run)
        if folder is None or folder.resolve() in seen:
            continue
        seen.add(folder.resolve())
        named = f"{run.home.name}/{folder.name}" if are_several else folder.name
        name = run.method if folder.name == "augmentation" else named
        try:
            if name not in additions and (addition := _read(folder, run)).added:
                additions[name] = addition
        except (OSError, ValueError, KeyError, TypeError) as error:
            what = f"the record of added rows is not whole ({type(error).__name__}) and is left out."
            faults.append(f"{run.label}: {what}")
    return additions, faults


def vectors_of(texts: Sequence[str], additions: Mapping[str, Addition]) -> tuple[np.ndarray, str]:
    """Return vectors ``(texts, dimension)`` from an encoder's cache, else of hashed words, and which of both they are."""
    for identity, cache in dict.fromkeys((each.encoder, each.cache) for each in additions.values()):
        cached = EmbeddingCache(cache, identity).find(texts) if identity and cache else None
        if cached is not None and cached[1].all():
            return cached[0], f"vectors of {identity}"
    hashed = HashedEncoder()
    is_other = any(each.encoder not in ("", hashed.identity) for each in additions.values())
    how = "hashed words" + ", as no encoder's vectors of all texts are at hand" * is_other
    return hashed.encode(texts), how


def _read(folder: Path, run: Run) -> Addition:
    record = AugmentationRecord(folder)
    record.refuse_damaged()
    added = record.read()
    # KeyError: a record without settings was not finished.
    settings = json.loads(read_text(record.settings))["settings"]["augmentation"]
    settings = settings if isinstance(settings, dict) else {}
    encoder = settings.get("encoder") or settings.get("server_encoder")
    alpha = settings.get("alpha")
    configured = facts.within(run.config(), "data", "init_args", "augmentation")
    return Addition(
        added,
        list(dict.fromkeys(instruction_text(fields) for _, fields in record.read_own())),
        encoder if isinstance(encoder, str) else "",
        next(
            (text for key, text in texts_in(configured) if key == "cache"), None
        ),  # of the first encoder with one
        alpha if isinstance(alpha, float) else None,
    )
