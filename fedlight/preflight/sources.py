"""Checks of data and models: can every data set be read, with the splits and columns that the settings name?

Those of a data set at the hub follow from its card, else from the start or end of a file. Does every model exist, may it be
fetched, and how large is the download?
"""

import csv
import io
import re
import zlib
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from fedlight.datamodules.rows.columns import check_columns
from fedlight.datamodules.rows.rows import ENDINGS, HUB_NAME, RowsError, load_rows
from fedlight.preflight.finding import Finding, ok, problem, unknown
from fedlight.preflight.hub import HEAD_BYTES, Hub, Report, Repository, first_json
from fedlight.preflight.machine import size_text
from fedlight.pretrained.hub import cached_file, find_model
from fedlight.support.needs import Model, RowSource

FORMATS = (".parquet", ".jsonl", ".json", ".ndjson", ".csv", ".tsv")
META = ("dataset_infos.json", "dataset_info.json", "state.json")
CONVERTED = "refs/convert/parquet"
"""Revision at which the hub keeps a Parquet copy of a data set; for one defined by a script, the only readable copy."""
MANY = 64  # entries of a list in the made-up row: more than any setting asks for
SMALL = (".json", ".txt", ".model")


class Shape(NamedTuple):
    """Splits, columns and size of a data set, as far as they are known."""

    # name -> number of rows, None where it is not known; empty where the splits are not known
    splits: dict[str, int | None]
    row: dict[str, Any] | None  # a made-up row with every column; None where the columns are not known
    size: int  # bytes of the download


def read_shape(hub: Hub, name: str, config: str, split: str) -> tuple[Repository, Shape]:
    """Return a data set's repository and shape.

    Raises:
        ValueError: it does not exist, may not be fetched, or has no such configuration.
        HubUnreachableError: the hub cannot be reached.
    """
    repository = hub.repository(name, "dataset")
    shape = _from_card(repository, config)
    if shape is not None:
        return repository, shape
    at, files = repository, _data_files(repository, config)
    if not files:  # a script, which is never run
        at = hub.repository(name, "dataset", CONVERTED)
        folder = config or "default"
        files = {_split_of(path): [path] for path in at.files if path.startswith(f"{folder}/")}
        if not files:
            known = sorted({path.partition("/")[0] for path in at.files if path.endswith(".parquet")})
            raise ValueError(f"it has no configuration {folder!r}; it has {', '.join(known)}")
    splits: dict[str, int | None] = dict.fromkeys(files)
    # Of train+test the first split shows the columns.
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
    from datasets.data_files import sanitize_patterns

    readable = [
        path
        for path in sorted(repository.files)
        if _format(path) and not path.startswith(".") and path.rpartition("/")[2] not in META
    ]
    by_split: dict[str, list[str]] = {}
    for entry in repository.card.get("configs") or []:
        is_default = entry.get("default") and not config
        if is_default or entry.get("config_name", "default") == (config or "default"):
            for split, patterns in sanitize_patterns(entry.get("data_files", [])).items():
                pairs = product(patterns, readable)
                by_split[split] = [path for pattern, path in pairs if PurePosixPath(path).match(pattern)]
            return {split: paths for split, paths in by_split.items() if paths}
    for path in readable:
        by_split.setdefault(_split_of(path), []).append(path)
    return by_split


def _split_of(path: str) -> str:
    """Return the split that a file's path names to the package ``datasets``; ``train`` where it names none.

    Examples:
        >>> [_split_of(path) for path in ("data/test-00000-of-00001.parquet", "askacademia/validation.json", "rows.json")]
        ['test', 'validation', 'train']
    """
    names = {"test": "test|testing|eval|evaluation", "validation": "validation|valid|dev|val"}
    for split, words in names.items():
        if re.search(rf"(?:^|[^a-z])(?:{words})(?:[^a-z]|$)", path.lower()):
            return split
    return "train"


def _format(path: str) -> str | None:
    name = path.removesuffix(".gz")
    return next((ending for ending in FORMATS if name.endswith(ending)), None)


def _first_row(hub: Hub, repository: Repository, path: str) -> dict[str, Any] | None:
    kind = _format(path)
    if kind == ".parquet":
        import pyarrow.parquet  # type: ignore[import-untyped]

        # The schema is at the end of the file; with its size given, the hub is not asked for it.
        options = {"size": repository.files[path], "block_size": HEAD_BYTES}
        return _of_arrow(hub.read(repository, "dataset", path, pyarrow.parquet.read_schema, **options))
    head = hub.head(repository, "dataset", path)
    try:
        if path.endswith(".gz"):
            # 16 stands for a gzip header; the object accepts a file without its end.
            head = zlib.decompressobj(zlib.MAX_WBITS | 16).decompress(head)
        # The beginning may end within a character.
        text = head.decode("utf-8-sig", "ignore")
        if kind in (".csv", ".tsv"):
            delimiter = "\t" if kind == ".tsv" else ","
            return dict.fromkeys(next(csv.reader(io.StringIO(text), delimiter=delimiter)))
        return first_json(text)
    except (ValueError, StopIteration, zlib.error):
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


def check_rows(wanted: Mapping[RowSource, Sequence[str]], hub: Hub, output: Path) -> Report:
    """Check each source once for each split and set of columns; files in ``output`` are not read, as stages write them."""
    report = Report()
    for rows in wanted:
        if Path(rows.source).is_relative_to(output):
            continue
        is_hub_name = HUB_NAME.fullmatch(rows.source) is not None and not rows.source.endswith(ENDINGS)
        if not is_hub_name or rows.source.startswith("toy:") or Path(rows.source).expanduser().exists():
            report.findings.append(_local_rows(rows, report.counts))
        else:
            _rows_at_hub(rows, hub, report)
    return report


def _local_rows(rows: RowSource, counts: dict[tuple[str, str], int]) -> Finding:
    what = f"data {rows.source}"
    try:
        loaded = load_rows(rows.source, rows.split)
        # texts=False: a task's rows may hold lists of objects.
        check_columns(loaded, dict(rows.columns), rows.source, texts=False)
    except (RowsError, ValueError, OSError) as error:
        return problem(what, str(error))
    counts[rows.source, rows.split] = len(loaded)
    return ok(what, f"{len(loaded):,} rows{_columns(rows)}")


def _columns(rows: RowSource) -> str:
    return f"; columns {', '.join(dict.fromkeys(path for _, path in rows.columns))}" if rows.columns else ""


def _rows_at_hub(rows: RowSource, hub: Hub, report: Report) -> None:
    name, _, config = rows.source.partition(":")
    what, cached = f"data {rows.source}, {rows.split}", _cached_rows(name)
    with report.asking(what, rows.source, cached and f"{cached}; its columns were not looked at"):
        repository, shape = read_shape(hub, name, config, rows.split)
        count = shape.splits.get(rows.split)
        if count is not None:
            report.counts[rows.source, rows.split] = count
        if cached is None:
            # A card may lack the size.
            report.downloads[rows.source] = shape.size or sum(repository.files.values())
        report.findings.append(_shape_finding(what, rows, repository, shape))


def _shape_finding(what: str, rows: RowSource, repository: Repository, shape: Shape) -> Finding:
    """Return the finding of a data set that is there; raise ValueError where it lacks a split or a column."""
    splits = rows.split.split("+")
    # train[:10%] is a part of train.
    missing = [split for split in splits if split.partition("[")[0] not in shape.splits]
    if shape.splits and missing:
        known = ", ".join(shape.splits)
        raise ValueError(f"it has no split {missing[0]!r}; it has {known}: set split to one of them")
    if shape.row is None:
        return unknown(what, "it exists, but its columns are not known without fetching it")
    try:
        check_columns([shape.row], dict(rows.columns), rows.source, texts=False)
    except RowsError as error:
        raise ValueError(str(error).removeprefix(f"{rows.source}: ")) from None
    counts = [count for split in splits if (count := shape.splits.get(split)) is not None]
    number = f"{sum(counts):,} rows" if len(counts) == len(splits) else "there"
    return ok(what, f"{number}{_columns(rows)}{repository.terms}")


def _cached_rows(name: str) -> str | None:
    """Return the folder where the package ``datasets`` has cached a data set; None where it has not."""
    import datasets

    name = name.replace("/", "___")
    folders = [Path(datasets.config.HF_DATASETS_CACHE) / part for part in (name, name.lower())]
    return next((str(folder) for folder in folders if any(folder.rglob("*.arrow"))), None)


def check_models(wanted: Mapping[Model, Sequence[str]], hub: Hub, output: Path) -> Report:
    """Check each model once, given the names of the stages that load it; a model in ``output`` is written by a stage."""
    report = Report()
    for model in wanted:
        if Path(model.name).is_relative_to(output):
            continue
        if is_local(model.name):
            report.findings.append(_local_model(model))
        else:
            _model_at_hub(model, hub, report)
    return report


def is_local(name: str) -> bool:
    """Return whether a name is that of a folder, or surely no hub name."""
    return (
        name == "toy"
        or Path(name).expanduser().exists()
        or name.count("/") != 1  # a hub name is owner/name
        or name.startswith((".", "~", "/"))
    )


def _local_model(model: Model) -> Finding:
    what = f"model {model.name}"
    try:
        if model.is_encoder:
            from fedlight.datamodules.vectors.encoders import find_folder

            folder = find_folder(model.name)
        else:
            folder = Path(find_model(model.name))
    except OSError as error:
        return problem(what, str(error))
    weights = sum(file.stat().st_size for file in folder.rglob("*.safetensors"))
    if not weights:
        return problem(what, f"{folder} has no .safetensors file: save the model anew with save_pretrained")
    return ok(what, f"here, {size_text(weights)} of weights")


def _model_at_hub(model: Model, hub: Hub, report: Report) -> None:
    what, cached = f"model {model.name}", _cached_weights(model.name)
    with report.asking(what, model.name, f"{size_text(cached)} of weights" if cached else None):
        repository = hub.repository(model.name, "model")
        report.configs[model.name] = hub.head(repository, "model", "config.json")
        # onnx/ and openvino/ have copies of the weights for other libraries; a language model's lie beside its config.
        weights = sum(
            size
            for path, size in repository.files.items()
            if path.endswith(".safetensors")
            and ("/" not in path or (model.is_encoder and not path.startswith(("onnx/", "openvino/"))))
        )
        if not weights:
            raise ValueError(
                "it has no .safetensors file, and no other format is read: take a model that has one"
            )
        if not cached:
            files = repository.files.items()
            small = (size for path, size in files if "/" not in path and path.endswith(SMALL))
            report.downloads[model.name] = weights + sum(small)
        state = f"{size_text(weights)} of weights, {'in the cache' if cached else 'to be fetched'}"
        report.findings.append(ok(what, state + repository.terms))


def _cached_weights(name: str) -> int:
    """Return the bytes of weights in the cache, 0 without a complete download."""
    config = cached_file(name, "config.json")
    return sum(file.stat().st_size for file in config.parent.rglob("*.safetensors")) if config else 0
