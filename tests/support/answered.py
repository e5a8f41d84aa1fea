"""Folders of runs that have answered prompts, for judges to compare, and what selectors say of pairs."""

import lightning
from lightning_facts import QUIET
from tiny_world import write_rows

from fedlight.datamodules.preferences.labelling import gather


def run_folder(folder, lengths, target=6) -> str:
    """Make the folder of a run whose answers, and one that all are compared with, have so many letters."""
    rows = [
        {"row": n, "prompt": f"Name {n}.", "target": "x" * target, "answers": ["x" * length], "fields": {}}
        for n, length in enumerate(lengths)
    ]
    (folder / "tasks/test").mkdir(parents=True)
    write_rows(folder / "tasks/test/names.jsonl", rows)
    return str(folder)


def predicted(module, data, pairs, orders):
    """What a selector says of pairs by a prediction, ``(selectors, pairs, 2)``."""
    votes = []
    batches = lightning.Trainer(**QUIET).predict(module, datamodule=data)
    for batch, said in zip(data.predict_dataloader(), batches, strict=True):
        places = zip(batch["index"].tolist(), batch["order"].tolist(), said.tolist(), strict=True)
        votes += [
            {"index": index, "order": order, "logp_a": a, "logp_b": b} for index, order, (a, b) in places
        ]
    return gather(votes, pairs, orders)
