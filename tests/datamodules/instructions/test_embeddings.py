from types import SimpleNamespace

import numpy as np
import pytest
from nested import nested
from refusals import refusal
from tiny_world import write_rows

from fedlight.datamodules.instructions.augmentation_record import AugmentationRecord
from fedlight.datamodules.instructions.embeddings import EmbeddingDataModule
from fedlight.datamodules.rows.rows import RowsError
from fedlight.datamodules.vectors.encoders import HashedEncoder

NUMBER = 40


@pytest.fixture
def rows(tmp_path):
    """Forty texts, of which one comes twice and one is empty."""
    lines = [{"task": f"sort list {i}", "input": "abc" * (i % 2), "output": f"a {i}"} for i in range(NUMBER)]
    lines += [lines[0], {"task": "", "input": "", "output": "x"}]
    return write_rows(tmp_path / "rows.jsonl", lines)


COLUMNS = {"instruction": "task", "input": "input", "response": "output"}


def make(source, **options):
    options = {"columns": COLUMNS, "val_share": 0.25, "batch_size": 8, "eval_batch_size": 8, **options}
    encoders = HashedEncoder(16), HashedEncoder(32, seed=1)
    return EmbeddingDataModule(*encoders, source, **nested(EmbeddingDataModule, **options))


def all_rows(data):
    data.setup("fit")
    sets = [part for part in (data.val_set, data.train_set) if part is not None]
    return [np.concatenate([part.datasets[side].numpy() for part in sets]) for side in ("small", "large")]


def test_every_distinct_text_is_there_once_with_both_vectors(rows):
    small, large = all_rows(make(rows))
    texts = [f"sort list {i}" + ("\nabc" if i % 2 else "") for i in range(NUMBER)]
    encoders = HashedEncoder(16), HashedEncoder(32, seed=1)
    expected = np.concatenate([encoder.encode(texts) for encoder in encoders], axis=1)
    found = np.concatenate([small, large], axis=1)
    assert found.shape == (NUMBER, 48)
    order = np.lexsort(expected.T), np.lexsort(found.T)
    np.testing.assert_array_equal(expected[order[0]], found[order[1]])


def test_batches_are_shuffled_by_the_seed_and_none_has_one_text(rows):
    def ready(**options):
        data = make(rows, val_share=0.425, **options)  # 17 held out, 23 to train on
        data.setup("fit")
        return data

    data, few = ready(), ready(val_max=5)
    train, val = list(data.train_dataloader()), list(data.val_dataloader())
    assert [len(batch["small"]) for batch in train] == [8, 8]
    assert [len(batch["large"]) for batch in val] == [9, 8]
    assert [len(few.val_set), len(few.train_set)] == [5, NUMBER - 5]
    again, other = (list(ready(seed=seed).train_dataloader()) for seed in (0, 1))
    assert all((a["small"] == b["small"]).all() for a, b in zip(train, again, strict=True))
    assert (other[0]["small"] != train[0]["small"]).any()


def test_several_sources_each_with_its_columns(rows, tmp_path):
    more = tmp_path / "more.csv"
    more.write_text("question\nwhat is 1\nwhat is 2\nsort list 0\n")
    data = make([rows, str(more)], columns=[COLUMNS, {"instruction": "question"}], val_share=0)
    assert len(all_rows(data)[0]) == NUMBER + 2
    assert data.val_dataloader() == []
    assert data.client_sizes() == {"server": NUMBER + 2}


def test_the_rest_of_a_domain_whose_rows_are_in_part_private(rows, tmp_path):
    """D^p of FedDCA has the rows of the clients' domain that are no client's: 40 texts, 3 private."""
    own = [{"instruction": "sort list 1", "input": "abc", "response": "x", "category": "a"}]
    own += [{"instruction": f"sort list {number}", "input": "", "response": "x"} for number in (0, 2)]
    AugmentationRecord(tmp_path).write({}, {"u": own[:2], "v": own[2:]}, {}, [], {})
    small, _ = all_rows(make(rows, private=str(tmp_path)))
    texts = [f"sort list {number}" + "\nabc" * (number % 2) for number in range(3, NUMBER)]
    left = HashedEncoder(16).encode(texts)
    np.testing.assert_array_equal(small[np.lexsort(small.T)], left[np.lexsort(left.T)])
    with refusal(r"nowhere/private\.jsonl: there is no such file: give the augment"):
        make(rows, private=str(tmp_path / "nowhere")).setup("fit")


def test_so_many_texts_are_drawn(rows):
    assert len(all_rows(make(rows, max_texts=12))[0]) == 12


def test_nothing_is_encoded_twice(rows):
    data = make(rows)
    data.setup("fit")
    first = data.train_set
    data.setup("validate")
    assert data.train_set is first


class Refusing(HashedEncoder):
    def encode(self, texts):
        raise AssertionError("encoded before the settings were looked at")


def test_a_projector_of_other_dimensions_is_refused_before_encoding(rows):
    data = EmbeddingDataModule(Refusing(16), Refusing(32), rows, columns=COLUMNS)
    data.trainer = SimpleNamespace(lightning_module=SimpleNamespace(dimensions=(16, 64)))
    with refusal(r"set model\.small_dimension=16 and model\.large_dimension=32"):
        data.setup("fit")


def test_what_does_not_fit_is_refused(rows):
    with refusal("batch_size=1 must be at least 2"):
        make(rows, batch_size=1)
    with refusal(r"must lie in \[0, 1\) and val_max=1 must be at least 2"):
        make(rows, val_max=1)
    with refusal("columns has 1 mappings for 2 sources"):
        make([rows, rows], columns=[COLUMNS])
    with refusal(r"40 texts with val_share=0\.02 leave 39 for training and 1 for validation"):
        make(rows, val_share=0.02).setup("fit")
    with pytest.raises(RowsError, match=r"names no slot to encode: set columns\.instruction"):
        make(rows, columns={"response": "output"}).setup("fit")
    with pytest.raises(RowsError, match="no column 'missing'"):
        make(rows, columns={"instruction": "missing"}).setup("fit")
