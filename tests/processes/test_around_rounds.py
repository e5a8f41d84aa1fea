import csv
from collections import Counter

import pytest
import torch
from attacked import BOTH, COLUMNS, TEMPLATE, attacks, fit
from lightning.pytorch.loggers import CSVLogger
from ranks import run_ranks
from tiny_world import write_rows

from fedlight import AdapterExport, FederatedLoop, FewFedPIT, Partition, TaskScores, VisitLog
from fedlight.callbacks.logs import ClientData
from fedlight.datamodules.instructions.datamodule import TaughtRows
from fedlight.datamodules.rows import Canaries, TaskRows
from fedlight.datamodules.rows.split import Split
from fedlight.datamodules.synthesis import Candidate, Synthesis, SyntheticInstructionDataModule
from fedlight.datamodules.synthesis.generation import BatchGenerator, Prompt
from fedlight.evaluation.tasks import ExactMatch
from fedlight.evaluation.tasks.result import Verdict
from fedlight.federation.algorithms.self_made import LocalSelfGeneration

ALGORITHMS = {"FewFedPIT": FewFedPIT, "LocalSelfGeneration": LocalSelfGeneration}


class Answers(Synthesis):
    """Answers to a client's own prompts, cut off after five tokens."""

    def make(self, clients, template, model, seed):
        generator = BatchGenerator(model, 5, (), 0.0, 1.0, 3, keep_cut=True)
        made = {}
        for client, rows in clients.items():
            texts = [template.render(row).text for row in rows]
            asked = [Prompt(client, (), lambda _, text=text: text) for text in texts]
            replies = generator.generate(asked, seed, "")
            made[client] = [
                Candidate({**row, "response": reply.text})
                for row, reply in zip(rows, replies, strict=True)
                if reply.text
            ]
        number = sum(map(len, made.values()))
        self.counts = Counter(tried=number, survived=number)
        return made


class Words(ExactMatch):
    def score(self, example, answer):
        return Verdict(float(len(set(answer.split()))), answer or None)


def train(model, asked, folder, algorithm, **options):
    """Two rounds of three clients; returns the trained weights."""
    data = SyntheticInstructionDataModule(
        "toy:instructions?num_clients=3&client_rows=8",
        synthesis=Answers(),
        keep=3, columns=COLUMNS, template=TEMPLATE, split=Split(val_share=0.25), batch_size=4,
        partition=Partition(by="client"), rows=TaughtRows(canaries=Canaries(repeats=2)),
    )  # fmt: skip
    own = algorithm == "LocalSelfGeneration"
    task = Words(TaskRows(asked, template="{instruction}"), batch_size=2, max_new_tokens=4)
    module, _ = fit(
        model,
        folder,
        FederatedLoop(ALGORITHMS[algorithm](), clients_per_round=3, local_steps=1),
        *attacks(targets=("global",) if own else BOTH),
        TaskScores({"words": task}, own_models=own),
        *(VisitLog(), ClientData(), AdapterExport(str(folder / "adapter"))),
        data=data,
        logger=CSVLogger(folder, "metrics"),
        max_epochs=2,
        **options,
    )
    return {name: weight.clone() for name, weight in module.state_dict().items()}


def files(folder):
    """All files but those with wall times, which are without them."""
    found = {}
    for file in sorted(one for one in folder.rglob("*") if one.is_file()):
        name = str(file.relative_to(folder))
        if file.name == "visits.csv":
            with file.open(newline="") as lines:
                found[name] = [{**row, "seconds": ""} for row in csv.DictReader(lines)]
        else:
            found[name] = file.read_bytes()
    return found


@pytest.mark.slow  # whole runs
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_two_processes_leave_the_files_of_one(tiny_model, tmp_path, algorithm):
    asked = write_rows(
        tmp_path / "asked.jsonl",
        [{"instruction": f"w{i} w{i}", "input": "", "response": "x"} for i in range(5)],
    )
    alone = train(tiny_model, asked, tmp_path / "1", algorithm)
    weights = run_ranks(
        2,
        lambda rank: train(
            tiny_model, asked, tmp_path / "2", algorithm, strategy="client_parallel", devices=2
        ),
        tmp_path / "logs",
    )
    for own in weights:
        assert all(torch.equal(own[name], weight) for name, weight in alone.items())
    expected, found = files(tmp_path / "1"), files(tmp_path / "2")
    assert found.keys() == expected.keys()
    assert {name for name in found if found[name] != expected[name]} == set()
    assert {"visits.csv", "data.csv", "attacks/attacks.csv", "synthetic/round_0001.jsonl"} <= found.keys()
    assert len(found["synthetic/round_0000.jsonl"].splitlines()) > 6
    if algorithm == "FewFedPIT":
        assert found["attacks/round_2/membership_inference.jsonl"].count(b'"target": "c') > 2
    else:
        assert found["tasks/own/words.jsonl"].count(b'"client": "c') == 15
