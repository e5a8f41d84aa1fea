import pytest
from tiny_world import write_rows

from fedlight import AugmentedInstructionDataModule, Partition
from fedlight.datamodules.instructions.augmentation import Added, Augmentation
from fedlight.datamodules.rows.exclusion import Holdout

ROWS = [{"instruction": f"w{i}", "output": "x", "task": "far" if i < 2 else "near"} for i in range(10)]


class AllWords(Augmentation):
    """Invents a row for each of the questions w0 to w19, for every client, whatever it has."""

    needs_public = False
    calls = 0

    def augment(self, clients, public, seed):
        self.calls += 1
        rows = [Added({"instruction": f"w{i}", "response": "y"}) for i in range(20)]
        return dict.fromkeys(clients, rows)


class AllRows(Augmentation):
    def augment(self, clients, public, seed):
        rows = [Added(fields, row) for row, fields in enumerate(public)]
        return dict.fromkeys(clients, rows)


@pytest.fixture
def build(made):
    settings = {"columns": {"instruction": "instruction", "response": "output"}}
    settings |= {"template": "POST: {instruction} ANSWER:", "partition": Partition("iid", 2)}
    return lambda augmentation, **options: made(
        AugmentedInstructionDataModule, ROWS, augmentation=augmentation, **settings, **options
    )


def questions(examples, tokenizer):
    return {tokenizer.decode(examples[i]["ids"]).split()[2] for i in range(len(examples))}


def test_held_out_rows_do_not_come_back_as_public_ones(build, tmp_path):
    rows = [{"instruction": f"w{i}", "output": "y"} for i in range(20)]
    options = {"public_source": write_rows(tmp_path / "public.jsonl", rows), "val_share": 0.25}
    module = build(AllRows(number=50), holdout=Holdout("task", ["far"]), **options)
    trained, scored = (questions(rows, module.tokenizer) for rows in (module.train_set, module.val_set))
    assert trained == {f"w{i}" for i in range(2, 20)} - scored
    assert (module.public.asked, module.public.private, len(scored)) == (4, 0, 2)


def test_generated_rows_that_ask_the_same_are_left_out(build, caplog):
    module = build(AllWords(number=20), val_share=0.25, holdout=Holdout("task", ["far"]))
    trained, scored = (questions(rows, module.tokenizer) for rows in (module.train_set, module.val_set))
    assert trained == {f"w{i}" for i in range(2, 20)} - scored
    assert {client: len(rows) for client, rows in module.added.items()} == {"c0": 16, "c1": 16}
    assert "of the generated rows: 8 asked in validation or held out, 0 longer than" in caplog.text


def test_a_record_of_generated_rows_is_made_anew_when_others_are_held_out(build, tmp_path, caplog):
    options = {"augmentation_folder": str(tmp_path / "record"), "val_share": 0.0}
    build(AllWords(number=20), **options)
    again = build(AllWords(number=20), **options)
    assert (again.augmentation.calls, len(again.added["c0"])) == (0, 20)
    other = build(AllWords(number=20), holdout=Holdout("task", ["far"]), **options)
    assert len(other.added["c0"]) == 18
    assert "not used: made with other private rows, validation rows" in caplog.text
