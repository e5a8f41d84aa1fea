"""Rows from local files and folders, datasets of the Hugging Face hub, or the embedded toy world.

The cells of a CSV file stand between commas, or between semicolons or tabs where its first line has no comma.
Local files are read line by line, and not by ``datasets``: an error can then name the file and the line, nothing is written
to a cache, and no heavy import is needed. Every row is a plain dictionary.

====================================================  ==================================================================
source                                                 meaning
====================================================  ==================================================================
``votes.jsonl``, ``.json``, ``.csv``, ``.tsv``, ``.parquet``  file; text formats in UTF-8, also with ``.gz``
``votes/``                                             folder: all such files, in the order of their names, or a dataset that
                                                       ``save_to_disk`` has written
``openai/summarize_from_feedback:comparisons``         dataset of the hub, with its configuration after the colon
``toy:votes?seed=1``                                   rows of the embedded world, with options
====================================================  ==================================================================
"""

import csv
import gzip
import json
import re
import sys
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from io import TextIOWrapper
from itertools import chain
from pathlib import Path
from typing import IO, Any
from urllib.parse import parse_qsl

from fedlight.datamodules.rows.given import GivenRows, Source, name_source
from fedlight.datamodules.rows.given import RowsError as RowsError
from fedlight.pretrained.hub import hub_asked_once
from fedlight.support.files import BoundError, check_regular, write_whole
from fedlight.support.types import Rows
from fedlight.support.words import first_line

TEXT_ENDINGS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv")
ENDINGS = (*TEXT_ENDINGS, *(ending + ".gz" for ending in TEXT_ENDINGS), ".parquet")
WANTED = (
    f"give the path of a {', '.join(ENDINGS[:5])} or .parquet file (gzip allowed), a hub name such as owner/name, or "
    "toy:votes."
)
MOST_ROWS = 50_000_000
"""Rows of a Parquet file, which may pack equal ones into a few bytes."""
MOST_TIMES, SMALL_BYTES = 100, 2**28  # small files may unpack to 256 MiB
TOO_DEEP = "lists and objects are nested too deep. Write it flatter."
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?")


def load_rows(source: Source, split: str | None = None) -> Rows:
    """Return the rows of a source, each a mapping from column to value.

    Args:
        source: see the table at the top of this file; or the rows, see `fedlight.datamodules.rows.given`.
        split: split of a hub dataset, or of one that ``save_to_disk`` has written; None: ``"train"``. Files and the toy
            world have no splits and ignore it.

    Raises:
        RowsError: the file is missing, empty or damaged, the name is neither a file nor a dataset, or the hub cannot be
            reached.
        BoundError: it is a pipe or a device, or unpacks to far more than its own size.
    """
    source = name_source(source)
    if isinstance(source, GivenRows):
        return source.rows
    if not source.strip():
        raise RowsError(f"the source is empty: {WANTED}")
    if source.startswith("toy:"):
        return _toy_rows(source)
    path = Path(source).expanduser()
    if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():  # of save_to_disk
        return _saved_rows(path, split or "train")
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.name.endswith(ENDINGS))
        if not files:
            raise RowsError(f"{path}: the folder has no file that ends in one of {', '.join(ENDINGS)}.")
        return [row for file in files for row in _read_file(file)]
    if path.exists():
        return _read_file(path)
    if HUB_NAME.fullmatch(source) and not source.endswith(ENDINGS):  # data/votes.csv is a missing file
        return _hub_rows(source, split or "train")
    raise RowsError(f"{source}: no such file. {WANTED[0].upper()}{WANTED[1:]}")


def _saved_rows(folder: Path, split: str) -> Rows:
    """Return the rows of a dataset that ``datasets.Dataset.save_to_disk`` or ``DatasetDict.save_to_disk`` has written."""
    import datasets

    try:
        loaded = datasets.load_from_disk(str(folder))
    except (OSError, ValueError, KeyError) as error:
        raise RowsError(f"{folder}: not a dataset that datasets can read ({first_line(error)}).") from None
    if isinstance(loaded, datasets.Dataset):
        return loaded
    if split not in loaded:
        raise RowsError(
            f"{folder}: no split {split!r}; its splits are {', '.join(loaded)}. Give the folder of one."
        )
    return loaded[split]


def write_rows(rows: Rows, file: Path) -> None:
    """Write JSON lines, which `load_rows` reads."""
    write_whole(file, "".join(json.dumps(row) + "\n" for row in rows))


def _read_file(path: Path) -> list[dict[str, Any]]:
    check_regular(path)
    if not path.name.endswith(ENDINGS):
        raise RowsError(f"{path}: the ending is not one of {', '.join(ENDINGS)}; rename or convert the file.")
    rows = (_read_parquet if path.suffix == ".parquet" else _read_text)(path)
    if not rows:
        raise RowsError(f"{path}: the file has no rows. Was its download or its writer cut short?")
    return rows


def _read_parquet(path: Path) -> list[dict[str, Any]]:
    import pyarrow  # type: ignore[import-untyped]
    import pyarrow.parquet  # type: ignore[import-untyped]

    try:
        if (number := pyarrow.parquet.read_metadata(path).num_rows) > MOST_ROWS:
            raise BoundError(
                f"{path} has {number:,} rows, and at most {MOST_ROWS:,} are read: give a part of it"
            )
        return pyarrow.parquet.read_table(path).to_pylist()
    except (OSError, pyarrow.ArrowInvalid) as error:
        raise RowsError(
            f"{path}: not a readable Parquet file ({first_line(error)}). Fetch or write it again."
        ) from None


def _read_text(path: Path) -> list[dict[str, Any]]:
    name = path.name.removesuffix(".gz")
    reader = _read_table if name.endswith((".csv", ".tsv")) else _read_json
    place = _Lines()
    try:
        with _open(path) as file:
            return reader(path, place.count(file), place)  # `place` has the line of an error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise RowsError(
            f"{path}: damaged gzip data after line {place.number} ({first_line(error)}). Fetch the file again."
        ) from None
    except UnicodeDecodeError as error:
        raise RowsError(_describe_not_utf8(path, error.reason)) from None
    except csv.Error as error:
        raise RowsError(f"{path}, line {place.number}: {error}. Save the file as plain CSV.") from None


def _describe_not_utf8(path: Path, reason: str) -> str:
    """Return the message for a file in another encoding, with the first line that is not UTF-8."""
    with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
        lines = enumerate(file, 1)
        number = next(number for number, line in lines if line.decode("utf-8", "ignore").encode() != line)
    return f"{path}, line {number}: not UTF-8 ({reason}). Save the file as UTF-8, as by iconv -f cp1252 -t utf-8."


def _open(path: Path) -> IO[str]:
    file = _Unpacked(path) if path.suffix == ".gz" else path.open("rb")
    # utf-8-sig: spreadsheets put a byte order mark before the first column's name; newline="": cells hold line breaks.
    newline = "" if ".csv" in path.suffixes or ".tsv" in path.suffixes else None
    return TextIOWrapper(file, encoding="utf-8-sig", newline=newline)


class _Unpacked(gzip.GzipFile):
    """Gzip file that unpacks to at most ``MOST_TIMES`` its size: a few megabytes of zeros can stand for gigabytes."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "rb")
        self._most = max(SMALL_BYTES, MOST_TIMES * path.stat().st_size)

    def read1(self, size: int = -1) -> bytes:  # TextIOWrapper reads by it
        if self.tell() > self._most:
            raise BoundError(
                f"{self.name} unpacks to more than {self._most / 2**20:,.0f} MiB, {MOST_TIMES} times its size, as no "
                "rows do: if they are meant, unpack it by hand"
            )
        return super().read1(size)


class _Lines:
    """Counter of the lines read so far, for error messages."""

    def __init__(self) -> None:
        self.number = 0

    def count(self, lines: Iterable[str]) -> Iterator[str]:
        for line in lines:
            self.number += 1
            yield line


def _read_json(path: Path, lines: Iterator[str], place: _Lines) -> list[dict[str, Any]]:
    first = next((line for line in lines if line.strip()), "")
    if first.lstrip().startswith("["):
        return _read_json_list(path, first + "".join(lines))
    return [_parse_object(path, place.number, line) for line in chain([first], lines) if line.strip()]


def _read_json_list(path: Path, text: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = _parse(path, text)
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise RowsError(f"{path}: entry {number} of the list is {type(row).__name__}, not an object.")
    return rows


def _parse(path: Path, text: str, number: int | None = None) -> Any:
    """Return the value of a JSON text, of a file or of the line with this number."""
    where = f"{path}, line {number}" if number else str(path)
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        where = where if number else f"{path}, line {error.lineno}"
        is_begun = number == 1 and text.strip() == "{"
        whole = " An object must stand in one line, or be part of a list." if is_begun else ""
        raise RowsError(f"{where}: not valid JSON ({error.msg}, column {error.colno}).{whole}") from None
    except RecursionError:
        raise RowsError(f"{where}: {TOO_DEEP}") from None


def _parse_object(path: Path, number: int, line: str) -> dict[str, Any]:
    row: dict[str, Any] = _parse(path, line, number)
    if not isinstance(row, dict):
        raise RowsError(
            f"{path}, line {number}: {type(row).__name__} instead of an object with named columns."
        )
    return row


def _read_table(path: Path, lines: Iterator[str], place: _Lines) -> list[dict[str, Any]]:
    csv.field_size_limit(sys.maxsize)  # forum posts are longer than the 131,072 characters of the default
    header = next((line for line in lines if line.strip()), "")
    separators = "\t" if ".tsv" in path.suffixes else ",;\t"
    separator = next((mark for mark in separators if mark in header), separators[0])
    # strict: a quoted cell without its end is an error, and does not hold the rest of the file.
    reader = csv.DictReader(chain([header], lines), delimiter=separator, strict=True)
    names = reader.fieldnames or []
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise RowsError(
            f"{path}, line 1: column {twice[0]!r} stands there more than once. Give each a name of its own."
        )
    rows = []
    for row in reader:
        if None in row or None in row.values():  # DictReader's marks of too many and of too few cells
            raise RowsError(
                f"{path}, line {place.number}: another number of cells than the {len(names)} columns of "
                "the first line. Quote cells that contain the separator."
            )
        rows.append(row)
    return rows


def _toy_rows(source: str) -> Rows:
    from fedlight import toy

    name, _, query = source.removeprefix("toy:").partition("?")
    given = parse_qsl(query, keep_blank_values=True)
    options = {key: int(value) if value.lstrip("-").isdigit() else value for key, value in given}
    if len(options) < len(given):
        raise RowsError(f"{source}: an option is given twice: give it once")
    return toy.rows(name, **options)


def _hub_rows(source: str, split: str) -> Rows:
    import datasets

    name, _, config = source.partition(":")
    bars_were_on = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        with hub_asked_once(name):
            return _load_dataset(name, config, split)
    except datasets.exceptions.DatasetNotFoundError:
        raise RowsError(
            f"{source}: no such local file, and no such dataset on the hub. Check the name; for a private dataset log in."
        ) from None
    except (OSError, ConnectionError) as error:
        raise RowsError(_describe_unreachable(source, error)) from None
    except (ValueError, RuntimeError) as error:
        if "offline" in str(error).lower() or "connect" in str(error).lower():
            raise RowsError(_describe_unreachable(source, error)) from None
        raise RowsError(f"{source}, split {split}: {first_line(error)}") from None
    finally:
        if bars_were_on:
            datasets.enable_progress_bars()


def _load_dataset(name: str, config: str, split: str) -> Rows:
    """Load a dataset; for one defined by a script, which is never run, load the hub's Parquet copy."""
    import datasets

    try:
        return datasets.load_dataset(name, config or None, split=split)
    except RuntimeError as error:
        if "scripts are no longer supported" not in str(error):
            raise
        return datasets.load_dataset(
            name, data_dir=config or "default", revision="refs/convert/parquet", split=split
        )


def _describe_unreachable(source: str, error: BaseException) -> str:
    return (
        f"{source}: the hub cannot be reached ({type(error).__name__}). Set HF_ENDPOINT to a mirror, or give the path of a "
        "local .jsonl, .csv or .parquet file instead of the name; HF_HUB_OFFLINE=1 reads from the cache."
    )
