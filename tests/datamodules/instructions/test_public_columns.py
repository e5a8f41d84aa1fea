import json

import pytest

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
def test_the_setting_is_named(tmp_path, causal, public_columns, column, setting):
    own, public = tmp_path / "own.jsonl", tmp_path / "public.jsonl"
    own.write_text("".join(json.dumps({"question": f"w{i}", "output": "x"}) + "\n" for i in range(4)))
    public.write_text(json.dumps({"instruction": "w9", "output": "y"}) + "\n")
    data = AugmentedInstructionDataModule(
        str(own),
        public_source=str(public),
        public_columns=public_columns,
        augmentation=RandomSampling(number=1),
        template="{instruction}",
        tokenizer=causal,
        columns=OWN,
    )
    with pytest.raises(RowsError, match=rf"no column '{column}'.*Set {setting}.instruction to one of them"):
        data.setup("fit")
