"""Rows that augmentations added to clients' data, and vectors of their texts, made without loading a model."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedlight.datamodules.instructions.augmentation import Added
from fedlight.datamodules.instructions.augmentation_record import AugmentationRecord
from fedlight.datamodules.rows.fields import instruction_text
from fedlight.datamodules.vectors.embedding_cache import EmbeddingCache
from fedlight.datamodules.vectors.encoders import HashedEncoder
from fedlight.runs import facts
from fedlight.runs.run import Run
from fedlight.support.files import read_text


class Addition(NamedTuple):
    """Rows that one augmentation added."""

    added: dict[str, list[Added]]  # client -> its rows, best first
    own: list[str]  # texts of the clients' own rows, each once
    encoder: str  # identity of the encoder that chose the rows; empty where none did
    cache: str | None  # folder with that encoder's vectors, if any
    alpha: float | None  # rows as similar as this to a client's centre were passed over; None: no bound


def additions_of(runs: Sequence[Run]) -> tuple[dict[str, Addition], list[str]]:
    """Return what each augmentation added, for the first seed that has it, and a line for each record that is damaged.

    Runs of several algorithms may share a record; it is read once and has the name of its folder.
    """
    found: dict[str, Addition] = {}
    faults: list[str] = []
    seen: set[Path] = set()
    homes = dict.fromkeys(run.home for run in runs)
    of_home = {home: f"{home.name}/" if len(homes) > 1 else "" for home in homes}
    for run in runs:
        folder = facts.augmentation_folder(run)
        if folder is None or folder.resolve() in seen:
            continue
        seen.add(folder.resolve())
        name = run.method if folder.name == "augmentation" else f"{of_home[run.home]}{folder.name}"
        if name in found:
            continue
        try:
            addition = _read(folder, run)
        except (OSError, ValueError, KeyError, TypeError) as error:
            faults.append(
                f"{run.label}: the record of added rows is not whole ({type(error).__name__}) and is left out."
            )
            continue
        if addition.added:
            found[name] = addition
    return found, faults


def scores_of(added: Mapping[str, Sequence[Added]]) -> dict[str, np.ndarray]:
    """Return the scores that rows were chosen by, ``(rows,)`` for each client, by name; rows without one are left out."""
    return {
        client: np.array([row.score for row in rows if row.score is not None], dtype=float)
        for client, rows in sorted(added.items())
    }


def vectors_of(texts: Sequence[str], additions: Mapping[str, Addition]) -> tuple[np.ndarray, str]:
    """Return vectors ``(texts, dimension)`` from an encoder's cache, else of hashed words, and which of both they are."""
    for identity, cache in dict.fromkeys((each.encoder, each.cache) for each in additions.values()):
        found = EmbeddingCache(cache, identity).find(texts) if identity and cache else None
        if found is not None and found[1].all():
            return found[0], f"vectors of {identity}"
    hashed = HashedEncoder()
    own = all(each.encoder in ("", hashed.identity) for each in additions.values())
    return hashed.encode(texts), "hashed words" + (
        "" if own else ", as no encoder's vectors of all texts are at hand"
    )


def _read(folder: Path, run: Run) -> Addition:
    record = AugmentationRecord(folder)
    record.refuse_damaged()
    added = record.read()
    own = [instruction_text(fields) for _, fields in record.read_own()]
    settings = _settings(record)
    encoder = settings.get("encoder") or settings.get("server_encoder")
    alpha = settings.get("alpha")
    return Addition(
        added,
        list(dict.fromkeys(own)),
        encoder if isinstance(encoder, str) else "",
        _cache(facts.within(run.config(), "data", "init_args", "augmentation")),
        alpha if isinstance(alpha, float) else None,
    )


def _settings(record: AugmentationRecord) -> dict[str, Any]:
    """Return the augmentation's settings; raise KeyError for a record without any, which was not finished."""
    settings = json.loads(read_text(record.settings))["settings"]["augmentation"]
    return settings if isinstance(settings, dict) else {}


def _cache(augmentation: Any) -> str | None:
    """Return the folder of the first encoder cache in the settings of an augmentation."""
    if not isinstance(augmentation, dict):
        return None
    for name, value in augmentation.items():
        found = value if name == "cache" else _cache(value)
        if isinstance(found, str):
            return found
    return None
