import gzip
import json

import datasets
import pytest

from fedlight.datamodules.rows.rows import RowsError, load_rows

ROWS = [{"prompt": "x", "n": 1}, {"prompt": "y\nz", "n": 2}]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz", "rows.ndjson"])
def test_json_lines(tmp_path, name):
    text = "".join(json.dumps(row) + "\n\n" for row in ROWS)
    opener = gzip.open if name.endswith(".gz") else open
    with opener(tmp_path / name, "wt") as file:
        file.write("\n" + text)
    assert load_rows(str(tmp_path / name)) == ROWS


def test_json_list_may_span_lines(tmp_path):
    (tmp_path / "rows.json").write_text(json.dumps(ROWS, indent=2))
    assert load_rows(str(tmp_path / "rows.json")) == ROWS


def test_csv_cells_hold_line_breaks_and_a_byte_order_mark_is_no_part_of_a_name(tmp_path):
    (tmp_path / "rows.csv").write_bytes('\ufeff\nprompt,n\nx,1\n"y\nz",2\n'.encode())
    assert load_rows(str(tmp_path / "rows.csv")) == [{"prompt": "x", "n": "1"}, {"prompt": "y\nz", "n": "2"}]


@pytest.mark.parametrize(("name", "mark"), [("rows.csv", ";"), ("rows.csv", "\t"), ("rows.tsv.gz", "\t")])
def test_tsv_files_and_csv_files_without_a_comma_in_their_first_line(tmp_path, name, mark):
    text = f"prompt{mark}n\nx, y{mark}1\n".encode()
    (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    assert load_rows(str(tmp_path / name)) == [{"prompt": "x, y", "n": "1"}]


def test_two_columns_of_one_name_are_refused(tmp_path):
    (tmp_path / "rows.csv").write_text("prompt,n,prompt\nx,1,y\n")
    with pytest.raises(RowsError, match="column 'prompt' stands there more than once"):
        load_rows(str(tmp_path / "rows.csv"))


def test_datasets_that_were_saved_to_disk(tmp_path):
    one = datasets.Dataset.from_list(ROWS)
    one.save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=one, test=one.select([0])).save_to_disk(tmp_path / "splits")
    assert list(load_rows(str(tmp_path / "one"))) == ROWS
    assert list(load_rows(str(tmp_path / "splits"))) == ROWS
    assert list(load_rows(str(tmp_path / "splits"), "test")) == ROWS[:1]
    with pytest.raises(RowsError, match="no split 'validation'; its splits are train, test"):
        load_rows(str(tmp_path / "splits"), "validation")
    (tmp_path / "one" / "state.json").write_text("{}")
    with pytest.raises(RowsError, match="not a dataset that datasets can read"):
        load_rows(str(tmp_path / "one"))


def test_parquet(tmp_path):
    datasets.Dataset.from_list(ROWS).to_parquet(tmp_path / "rows.parquet")
    assert load_rows(str(tmp_path / "rows.parquet")) == ROWS


def test_folder_is_read_in_the_order_of_names(tmp_path):
    (tmp_path / "b.jsonl").write_text('{"n": 2}\n')
    (tmp_path / "a.csv").write_text("n\n1\n")
    (tmp_path / "notes.txt").write_text("no data")
    assert load_rows(str(tmp_path)) == [{"n": "1"}, {"n": 2}]


WHOLE = gzip.compress(b'{"n": 1}\n' * 50, mtime=0)  # the time would differ between test processes


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.jsonl", b'{"n": 1}\n\n{"n": \n', r"a\.jsonl, line 3: not valid JSON"),
        ("a.jsonl", b'{"n": 1}\n[2]\n', r"a\.jsonl, line 2: list instead of an object"),
        ("a.jsonl", b"", r"a\.jsonl: the file has no rows"),
        ("a.json", b'[{"n": 1},\n 2]', r"entry 1 of the list is int"),
        ("a.json", b'[{"n": 1},\n {"n": }]', r"a\.json, line 2: not valid JSON"),
        ("a.jsonl.gz", WHOLE[:30], r"a\.jsonl\.gz: damaged gzip data after line \d+ .* Fetch the file again"),
        ("a.jsonl.gz", b"plain", r"damaged gzip data after line 0"),
        ("a.csv", b"n,m\n1,2\n3\n", r"a\.csv, line 3: another number of cells than the 2 columns"),
        ("a.csv", b"n,m\n1,2,3\n", r"a\.csv, line 2: another number of cells"),
        ("a.csv", b'n\n"x"y\n', r"a\.csv, line 2: "),
        ("a.csv", "n\n1\nß\n2\n".encode("latin-1"), r"a\.csv, line 3: not UTF-8 \("),
        ("a.jsonl.gz", gzip.compress(b'{"n": 1}\n{"n": "\xff"}\n', mtime=0), r"\.gz, line 2: not UTF-8 \("),
        ("a.csv", "n\n1\nß".encode()[:-1], r"a\.csv, line 3: not UTF-8 \("),
        ("a.parquet", b"PAR1", r"not a readable Parquet file"),
        ("a.txt", b"x", r"the ending is not one of"),
    ],
)
def test_damaged_files_name_file_and_line(tmp_path, name, data, message):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(RowsError, match=message):
        load_rows(str(tmp_path / name))


def test_missing_file_and_empty_folder(tmp_path):
    with pytest.raises(RowsError, match=r"votes\.jsonl: no such file"):
        load_rows("data/votes.jsonl")
    with pytest.raises(RowsError, match=r"the folder has no file that ends in"):
        load_rows(str(tmp_path))


def test_unreachable_hub_is_one_line_with_a_remedy(monkeypatch):
    def fail(*args, **kwargs):
        raise ConnectionError("Couldn't reach 'owner/name' on the Hub (LocalEntryNotFoundError)")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(RowsError, match=r"cannot be reached.*HF_ENDPOINT.*local") as error:
        load_rows("owner/name", "train")
    assert "\n" not in str(error.value)


def test_hub_name_configuration_and_split_are_passed_on(monkeypatch):
    calls = []

    def load(*args, **kwargs):
        calls.append((args, kwargs))
        if len(calls) == 1:
            raise RuntimeError("Dataset scripts are no longer supported, but found name.py")
        return ROWS

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert load_rows("owner/name:part", "validation") == ROWS
    exported = {"data_dir": "part", "revision": "refs/convert/parquet", "split": "validation"}
    assert calls == [(("owner/name", "part"), {"split": "validation"}), (("owner/name",), exported)]


def test_unknown_split_is_told(monkeypatch):
    def fail(*args, **kwargs):
        raise ValueError("Unknown split 'dev'. Should be one of ['train'].")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(RowsError, match=r"owner/name, split dev: Unknown split"):
        load_rows("owner/name", "dev")


def test_toy_rows_take_options():
    rows = load_rows("toy:prompts?seed=3&size=5")
    assert len(rows) == 5
    assert rows == load_rows("toy:prompts?seed=3&size=5") != load_rows("toy:prompts?seed=4&size=5")
