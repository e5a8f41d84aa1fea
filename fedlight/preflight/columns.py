"""Splits and columns of a data set at the hub, from its card, else from the start or end of a file."""

import csv
import gzip
import io
import re
import zlib
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from fedlight.preflight.hub import HEAD_BYTES, Hub, Repository, first_json

FORMATS = (".parquet", ".jsonl", ".json", ".ndjson", ".csv", ".tsv")
CONVERTED = "refs/convert/parquet"
"""Revision at which the hub keeps a Parquet copy of a data set; for one defined by a script, the only readable copy."""
MANY = 64  # entries of a list in the made-up row: more than any setting asks for


class Shape(NamedTuple):
    """Splits, columns and size of a data set, as far as they are known.

    Attributes:
        splits: name -> number of rows, None where it is not known; empty where the splits are not known.
        row: a made-up row with every column; None where the columns are not known.
        size: bytes of the download.
    """

    splits: dict[str, int | None]
    row: dict[str, Any] | None
    size: int


def read_shape(hub: Hub, name: str, config: str, split: str) -> tuple[Repository, Shape]:
    """Return a data set's repository and shape.

    Raises:
        ValueError: it does not exist, may not be fetched, or has no such configuration.
        HubUnreachableError: the hub cannot be reached.
    """
    repository = hub.repository(name, "dataset")
    found = _from_card(repository, config)
    if found is not None:
        return repository, found
    at, files = repository, _data_files(repository, config)
    if not files:  # a script, which is never run
        at = hub.repository(name, "dataset", CONVERTED)
        folder = config or "default"
        files = {_split_of(path): [path] for path in at.files if path.startswith(f"{folder}/")}
        if not files:
            known = sorted({path.partition("/")[0] for path in at.files if path.endswith(".parquet")})
            raise ValueError(f"it has no configuration {folder!r}; it has {', '.join(known)}")
    splits: dict[str, int | None] = dict.fromkeys(files)
    of_split = files.get(split.partition("+")[0], [])
    size = sum(at.files[path] for paths in files.values() for path in paths)
    return repository, Shape(splits, _first_row(hub, at, of_split[0]) if of_split else None, size)


def _from_card(repository: Repository, config: str) -> Shape | None:
    from datasets.info import DatasetInfosDict
    from huggingface_hub import DatasetCardData

    infos = DatasetInfosDict.from_dataset_card_data(DatasetCardData(**repository.card))
    info = infos.get(config or "default")
    if info is None and config and infos:
        raise ValueError(f"it has no configuration {config!r}; it has {', '.join(infos)}")
    if info is None or info.features is None:
        return None
    splits = {name: split.num_examples for name, split in (info.splits or {}).items()}
    return Shape(splits, _of_arrow(info.features.arrow_schema), int(info.download_size or 0))


def _data_files(repository: Repository, config: str) -> dict[str, list[str]]:
    """Return split -> files, from the card, else from the files' names."""
    readable = [path for path in sorted(repository.files) if _format(path) and not _is_meta(path)]
    for entry in repository.card.get("configs") or []:
        if entry.get("config_name", "default") == (config or "default") or (
            entry.get("default") and not config
        ):
            return _by_patterns(entry, readable)
    by_split: dict[str, list[str]] = {}
    for path in readable:
        by_split.setdefault(_split_of(path), []).append(path)
    return by_split


def _by_patterns(entry: Mapping[str, Any], readable: list[str]) -> dict[str, list[str]]:
    from datasets.data_files import sanitize_patterns

    found: dict[str, list[str]] = {}
    for split, patterns in sanitize_patterns(entry.get("data_files", [])).items():
        for pattern in patterns:
            matches = [path for path in readable if PurePosixPath(path).match(pattern)]
            found.setdefault(split, []).extend(matches)
    return {split: paths for split, paths in found.items() if paths}


def _split_of(path: str) -> str:
    """Return the split that a file's path names, as the package ``datasets`` reads it; ``train`` where it names none.

    Examples:
        >>> [_split_of(path) for path in ("data/test-00000-of-00001.parquet", "askacademia/validation.json", "rows.json")]
        ['test', 'validation', 'train']
    """
    for split, words in {
        "test": "test|testing|eval|evaluation",
        "validation": "validation|valid|dev|val",
    }.items():
        if re.search(rf"(?:^|[^a-z])(?:{words})(?:[^a-z]|$)", path.lower()):
            return split
    return "train"


def _format(path: str) -> str | None:
    name = path.removesuffix(".gz")
    return next((ending for ending in FORMATS if name.endswith(ending)), None)


def _is_meta(path: str) -> bool:
    return path.startswith(".") or path.rpartition("/")[2] in (
        "dataset_infos.json",
        "dataset_info.json",
        "state.json",
    )


def _first_row(hub: Hub, of: Repository, path: str) -> dict[str, Any] | None:
    kind = _format(path)
    if kind == ".parquet":
        import pyarrow.parquet  # type: ignore[import-untyped]

        # The schema stands at the end of the file; with its size given, the hub is not asked for it.
        options = {"size": of.files[path], "block_size": HEAD_BYTES}
        return _of_arrow(hub.read(of, "dataset", path, pyarrow.parquet.read_schema, **options))
    head = hub.head(of, "dataset", path)
    if path.endswith(".gz"):
        head = zlib.decompressobj(zlib.MAX_WBITS | 16).decompress(head)
    text = head.decode("utf-8-sig", "ignore")
    try:
        if kind in (".csv", ".tsv"):
            return dict.fromkeys(
                next(csv.reader(io.StringIO(text), delimiter="\t" if kind == ".tsv" else ","))
            )
        return first_json(text)
    except (ValueError, StopIteration, gzip.BadGzipFile):
        return None


def _of_arrow(fields: Any) -> dict[str, Any]:
    import pyarrow

    def value(kind: Any) -> Any:
        if pyarrow.types.is_struct(kind):
            return {field.name: value(field.type) for field in kind}
        if pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind):
            return [value(kind.value_type)] * MANY
        return None

    return {field.name: value(field.type) for field in fields}
