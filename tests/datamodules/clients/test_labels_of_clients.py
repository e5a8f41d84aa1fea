from nested import datamodule
from tiny_world import write_rows

from fedlight import InstructionDataModule, Partition, PreferenceDataModule

ABOUT = ("jam", "tea")


def counted(data, split="train"):
    data.setup("fit")
    return {(count.client, count.label): count.rows for count in data.client_counts() if count.split == split}


def test_instructions_are_counted_by_category(tmp_path):
    rows = [
        {"instruction": f"dan roses {n}", "output": "kind 1", "who": "uv"[n > 5], "about": ABOUT[n % 3 > 0]}
        for n in range(10)
    ]
    columns = {"instruction": "instruction", "response": "output", "client": "who", "category": "about"}
    settings = {"template": "POST : {instruction}\nCHOICE :", "tokenizer": "toy", "max_tokens": 64}
    settings |= {"columns": columns, "partition": Partition("client", min_size=1), "val_share": 0}
    data = datamodule(InstructionDataModule, write_rows(tmp_path / "rows.jsonl", rows), **settings)
    assert counted(data) == {("u", "tea"): 4, ("u", "jam"): 2, ("v", "tea"): 2, ("v", "jam"): 2}


def test_a_vote_counts_twice_for_a_selector_and_once_for_dpo(tmp_path):
    names = ("prompt", "response_a", "response_b", "choice", "client")
    votes = [(f"which roses {n} ?", f"kind {n}", f"rude {n}", "a", "uv"[n > 4]) for n in range(8)]
    rows = [dict(zip(names, vote, strict=True), about=ABOUT[n % 2]) for n, vote in enumerate(votes)]
    columns = {**{name: name for name in names}, "category": "about"}
    source = write_rows(tmp_path / "rows.jsonl", rows)
    common = {"columns": columns, "partition": Partition("client", min_size=1), "val_share": 0.25}
    for view, each in (("selector", 2), ("dpo", 1)):
        data = datamodule(PreferenceDataModule, source, view=view, **common)
        train, val = counted(data), counted(data, "val")
        both = {key: train.get(key, 0) + val.get(key, 0) for key in {*train, *val}}
        assert both == {
            **{("u", "tea"): 2 * each, ("u", "jam"): 3 * each},
            **{("v", "tea"): 2 * each, ("v", "jam"): 1 * each},
        }
        assert sum(val.values()) == 2 * each
        assert len(data.train_labels) == len(data.train_set)
