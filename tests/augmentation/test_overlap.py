from refusals import refusal
from tiny_world import write_rows

from fedlight.augmentation.overlap import overlap, retrieval_overlap


def write(folder, rows):
    folder.mkdir()
    lines = [
        {"client": client, "rank": rank, "row": row, "score": 0.5, "source": "x", "fields": {"prompt": "p"}}
        for client, numbers in rows.items()
        for rank, row in enumerate(numbers)
    ]
    write_rows(folder / "added.jsonl", lines)
    return str(folder)


def test_records_are_compared_client_by_client(tmp_path):
    reference = write(tmp_path / "large", {"u": [4, 5, 6, 7], "v": [1, 2]})
    same = write(tmp_path / "same", {"v": [2, 1], "u": [7, 6, 5, 4]})
    other = write(tmp_path / "other", {"u": [4, 9], "v": [4, 5]})
    assert retrieval_overlap(same, reference) == 1.0
    assert retrieval_overlap(other, reference) == 0.125  # a quarter for u, nothing for v


def test_what_is_missing_is_named(tmp_path):
    with refusal("no client has rows in the reference"):
        overlap({"u": [1]}, {"u": []})
    with refusal(r"added\.jsonl: there is no such file: give the augmentation_folder"):
        retrieval_overlap(str(tmp_path), str(tmp_path))
