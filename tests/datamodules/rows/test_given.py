import datasets
import numpy as np
import pytest
import torch

from fedlight import (
    InstructionDataModule,
    PreferenceDataModule,
    PromptDataModule,
    SelfGeneration,
    SyntheticInstructionDataModule,
)
from fedlight.datamodules.rows.given import RowsError
from fedlight.datamodules.rows.split import Split

pytestmark = pytest.mark.usefixtures("any_text")

ALL = Split(val_share=0.0)

ROWS = [{"client": f"u{i % 2}", "instruction": f"w{i}", "response": "x"} for i in range(6)]
VOTES = [
    {"prompt": f"w{i}", "response_a": "x", "response_b": "y", "choice": "ab"[i % 2], "client": f"u{i % 3}"}
    for i in range(6)
]


def frame(rows):
    return datasets.Dataset.from_list(rows).to_pandas()


FORMS = {"list": list, "tuple": tuple, "pandas": frame, "datasets": datasets.Dataset.from_list}


def ready(data, stage="fit"):
    data.setup(stage)
    return data


@pytest.mark.parametrize("form", FORMS)
def test_votes_prompts_and_instructions_need_no_setting(form):
    votes = ready(PreferenceDataModule(FORMS[form](VOTES), split=ALL))
    assert votes.client_sizes() == {"u0": 4, "u1": 4, "u2": 4}  # two votes each, in both orders
    prompts = ready(PromptDataModule(FORMS[form](VOTES)), "predict")
    assert [prompts.predict_set[i]["fields"]["prompt"] for i in range(6)] == [f"w{i}" for i in range(6)]
    rows = FORMS[form](ROWS)
    made = SyntheticInstructionDataModule(rows, SelfGeneration(), split=ALL)
    for data in (InstructionDataModule(rows, split=ALL), made):
        assert ready(data).client_sizes() == {"u0": 3, "u1": 3}
        assert data.client_rows["u1"][0] == {"instruction": "w1", "input": "", "response": "x"}


def test_given_and_read_rows_train_alike(tmp_path):
    """The same digest of the examples, the same batches."""
    file = tmp_path / "rows.jsonl"
    datasets.Dataset.from_list(ROWS).to_json(file)
    given, read = (ready(InstructionDataModule(source, batch_size=2)) for source in (ROWS, str(file)))
    assert given.examples_digest() == read.examples_digest()
    for one, other in zip(given.train_dataloader(), read.train_dataloader(), strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_partial_column_map_is_completed():
    rows = [{"ask": "w1", "response": "x", "client": "a"}, {"ask": "w2", "response": "y", "client": "b"}]
    data = ready(InstructionDataModule(rows, columns={"instruction": "ask"}, split=ALL))
    assert data.client_sizes() == {"a": 1, "b": 1}
    votes = [{"who": row["client"], **row} for row in VOTES]
    data = ready(PreferenceDataModule(votes, columns={"client": "who"}, split=ALL))
    assert {*data.client_sizes()} == {"u0", "u1", "u2"}
    pairs = [{"prompt": "w1", "good": "x", "rejected": "y"}]
    data = ready(PreferenceDataModule(pairs, columns={"chosen": "good"}, split=ALL))
    assert len(data.train_set) == 2


def test_clients_are_read_only_where_they_are_wanted():
    rows = InstructionDataModule(ROWS, columns={"client": ""}, split=ALL)
    assert ready(rows).client_sizes() == {"c0": 6}
    votes = PreferenceDataModule(VOTES, columns={"client": ""}, split=ALL)
    assert ready(votes).client_sizes() == {"c0": 12}


def test_test_rows_and_validation_rows_are_given_too():
    data = PreferenceDataModule(VOTES[:4], split=Split(val_source=VOTES[4:], test_source=frame(VOTES[:1])))
    assert len(ready(data).val_set) == 4
    assert len(ready(data, "test").test_set) == 2
    assert len(ready(InstructionDataModule(ROWS, split=Split(test_source=ROWS[:2])), "test").test_set) == 2


def test_a_cell_without_a_value_is_missing():
    table = frame(ROWS).reindex(range(7))  # pandas fills the seventh row with NaN
    table.loc[6, ["client", "instruction"]] = "u0", "w9"
    for source in (table, table.to_dict("records")):
        assert ready(InstructionDataModule(source, split=ALL)).client_sizes() == {"u0": 3, "u1": 3}


def test_numbers_stay_what_they_are():
    table = frame([{"client": n, "instruction": "w1", "response": "x"} for n in (7, 8)])
    assert table["client"].dtype == np.int64
    assert ready(InstructionDataModule(table, split=ALL)).client_sizes() == {"7": 1, "8": 1}


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (["w1", "w2"], r"row 0 of the given rows is 'w1': give a list of mappings"),
        ([ROWS[0], 3], r"row 1 of the given rows is 3"),
        ([], r"the given rows are empty"),
        (frame(ROWS)[:0], r"the given rows are empty"),
        ({"instruction": ["w1"]}, r"source is a dict: give the name of a file, a list of mappings"),
        (iter(ROWS), r"source is a list_iterator"),
        (None, r"source is a NoneType"),
        (frame(ROWS).set_axis(["x", "x", "y"], axis=1), r"two columns of the DataFrame have the same name"),
    ],
)
def test_other_things_are_refused_when_they_are_given(source, said):
    with pytest.raises(RowsError, match=said):
        InstructionDataModule(source)


def test_messages_name_rows_in_memory_by_their_number():
    with pytest.raises(RowsError, match=r"the 6 given rows: no column 'ask' \(mapped to 'instruction'\)"):
        ready(InstructionDataModule(ROWS, columns={"instruction": "ask"}))
