import pytest
from tiny_world import write_rows

from fedlight.augmentation.random_sampling import RandomSampling
from fedlight.datamodules.instructions.augmented import AugmentedInstructionDataModule
from fedlight.datamodules.rows.rows import RowsError

OWN = {"instruction": "question", "response": "output"}


@pytest.mark.parametrize(
    ("public_columns", "column", "setting"),
    [
        ({"instruction": "task", "response": "output"}, "task", "public_columns"),
        ([{"instruction": "task", "response": "output"}], "task", "public_columns.0"),
        (None, "question", "public_columns"),
    ],
)
def test_the_setting_is_named(tmp_path, made, public_columns, column, setting):
    options = {"augmentation": RandomSampling(number=1), "template": "{instruction}", "columns": OWN}
    options["public_source"] = write_rows(tmp_path / "public.jsonl", [{"instruction": "w9", "output": "y"}])
    rows = [{"question": f"w{i}", "output": "x"} for i in range(4)]
    with pytest.raises(RowsError, match=rf"no column '{column}'.*Set {setting}.instruction to one of them"):
        made(AugmentedInstructionDataModule, rows, public_columns=public_columns, **options)
