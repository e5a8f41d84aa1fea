"""FEDLIGHT_SHARED names a folder with ``models/stories260k`` and ``data/natural_instructions``."""

import dataclasses
import gzip
import json
import logging
import os
from collections import defaultdict
from itertools import islice
from pathlib import Path

import lightning as L
import pytest
from tiny_world import read_lines, write_rows

from fedlight import FederatedLoop, FewFedPIT, HashedEncoder, Lora, SFTModule, SyntheticInstructionDataModule
from fedlight.datamodules.clients import FewShot, Partition
from fedlight.datamodules.instructions.taught_rows import TaughtRows
from fedlight.datamodules.rows.split import Split
from fedlight.datamodules.synthesis.prompts import FEWFEDPIT_PROMPTS
from fedlight.datamodules.synthesis.self_generation import NewInstructions, NewResponses, SelfGeneration

SHARED = Path(os.environ.get("FEDLIGHT_SHARED", "nowhere"))
STORIES, TASKS = SHARED / "models/stories260k", SHARED / "data/natural_instructions/training.jsonl.gz"
pytestmark = pytest.mark.skipif(
    not (STORIES.is_dir() and TASKS.is_file()), reason="FEDLIGHT_SHARED names no folder with both"
)
NUMBER = 6
ANY_ANSWER = dataclasses.replace(
    FEWFEDPIT_PROMPTS,
    response=dataclasses.replace(FEWFEDPIT_PROMPTS.response, pattern="(?:Input:)?(?P<response>.+)"),
)
TRAINER = {"accelerator": "cpu", "logger": False, "limit_val_batches": 0}
TRAINER |= dict.fromkeys(("enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Ten rows of each of ten tasks whose rows are short: eight of the longer ones do not fit into 512 tokens."""
    tasks = defaultdict(list)
    with gzip.open(TASKS, "rt") as lines:
        for row in map(json.loads, lines):
            if sum(len(row[name]) for name in ("instruction", "input", "output")) < 300:
                tasks[row["client"]].append(row)
    whole = (rows[:10] for rows in tasks.values() if len(rows) >= 10)
    rows = [row for own in islice(whole, 10) for row in own]
    return write_rows(tmp_path_factory.mktemp("tasks") / "rows.jsonl", rows)


def test_two_rounds(source, tmp_path, caplog):
    """Sampled, any text is taken for an answer: most candidates survive, and are trained on apart from the own rows."""
    instructions = NewInstructions(max_new_tokens=16, tries=NUMBER)
    responses = NewResponses(max_new_tokens=24, tries=1)
    data = SyntheticInstructionDataModule(
        source=source,
        columns={"instruction": "instruction", "input": "input", "response": "output"},
        tokenizer=str(STORIES),
        max_tokens=256,
        rows=TaughtRows(few_shot=FewShot(HashedEncoder(128), clusters=8, per_cluster=4)),
        partition=Partition(by="dirichlet", num_clients=4, alpha=1.0),
        split=Split(val_share=0),
        batch_size=8,
        keep=NUMBER // 2,
        synthesis=SelfGeneration(
            NUMBER, instructions, responses, temperature=1.0, keep_cut=True, prompts=ANY_ANSWER
        ),
    )
    visits = []

    class Visits(L.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            visits.append([(row["client"], row["split"], row["loss"]) for row in loop.visit_records])

    loop = FederatedLoop(algorithm=FewFedPIT(beta=0.5), clients_per_round=2)
    module = SFTModule(str(STORIES), lora=Lora(rank=4, dropout=0), lr=0.001, dtype="fp32")
    trainer = L.Trainer(max_epochs=2, default_root_dir=tmp_path, callbacks=[loop, Visits()], **TRAINER)
    with caplog.at_level(logging.INFO, "lightning.pytorch"):
        trainer.fit(module, datamodule=data)
    lines = [read_lines(tmp_path / f"synthetic/round_{number:04d}.jsonl")[1:] for number in range(2)]
    made = [[line for line in own if "dropped" not in line] for own in lines]
    for own, candidates in zip(visits, made, strict=True):
        with_some = {one["client"] for one in candidates}
        assert with_some
        clients = list(dict.fromkeys(client for client, *_ in own))
        expected = [(one, "train") for one in clients] + [(one, "synthetic") for one in with_some]
        assert sorted((client, split) for client, split, _ in own) == sorted(expected)
        assert all(0 < loss < 20 for *_, loss in own)
    texts = [one["fields"]["instruction"] for candidates in made for one in candidates]
    assert len(set(texts)) == len(texts)
    # What was written is no copy of what was shown.
    rows = [row["instruction"] for own in data.client_rows.values() for row in own]
    assert not set(texts) & set(rows)
    counts = data.synthesis_metrics()
    dropped = sum(value for name, value in counts.items() if name.startswith("dropped/"))
    assert counts["tried"] == 2 * NUMBER == counts["survived"] + dropped
    assert counts["survived"] == len(made[1])
    assert "round 2: 2 clients made" in caplog.text
