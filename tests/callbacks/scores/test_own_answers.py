import json
from statistics import fmean, pstdev

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from plain_lightning import trainer as make_trainer
from tiny_world import table, write_rows

from fedlight import FederatedLoop, InstructionDataModule, LocalOnly, Lora, Partition, SFTModule, TaskScores
from fedlight.datamodules.rows import TaskRows
from fedlight.datamodules.rows.split import Split
from fedlight.evaluation.tasks import ExactMatch
from fedlight.evaluation.tasks.result import Verdict

NAMES = ("anna", "ben", "carla", "dan", "eva", "finn")
ROWS = [{"instruction": f"{name} paints", "input": "", "output": "walls ."} for name in NAMES]


class Words(ExactMatch):
    """The share of distinct words, so that a score changes with the model."""

    def score(self, example, answer):
        words = answer.split()
        return Verdict(len(set(words)) / max(len(words), 1), answer or None)


@pytest.fixture
def rows(tmp_path):
    return write_rows(tmp_path / "rows.jsonl", ROWS)


def words(rows):
    data = TaskRows(rows, columns={"response": "output"}, template="{instruction}")
    return Words(data, max_new_tokens=5, batch_size=4)


def fit(model, rows, folder, *callbacks, rounds=2, **options):
    data = InstructionDataModule(
        rows,
        template="{instruction}",
        tokenizer=model,
        partition=Partition(by="iid", num_clients=3),
        batch_size=1,
        split=Split(val_share=0),
    )
    settings = {"log_every_n_steps": 1, "limit_val_batches": 0, "default_root_dir": folder}
    trainer = make_trainer(rounds, callbacks, **settings | options)
    L.seed_everything(1, verbose=False)
    module = SFTModule(model, lr=0.05, lora=Lora(dropout=0.1), seed=1)
    trainer.fit(module, datamodule=data)
    return module, trainer


def local(clients_per_round=3):
    return FederatedLoop(LocalOnly(), clients_per_round=clients_per_round, local_steps=3)


def test_each_client_answers_with_its_own_weights(tiny_model, rows, tmp_path):
    loop = local()
    scores = TaskScores({"words": words(rows)}, every_n_epochs=None, own_models=True)
    module, trainer = fit(tiny_model, rows, tmp_path, loop, scores, logger=CSVLogger(tmp_path, "m"))
    expected = {}
    for client in loop.clients:
        one = SFTModule(tiny_model, seed=1)
        one.configure_model()
        _, unexpected = one.load_state_dict(loop.own_state(client), strict=False)
        assert not unexpected
        expected[client] = words(rows).run(one)
    lines = [json.loads(line) for line in (tmp_path / "tasks/own/words.jsonl").read_text().splitlines()]
    assert len({result.mean for result in expected.values()}) > 1
    for client, result in expected.items():
        answers = [line["answers"] for line in lines if line["client"] == client]
        assert answers == [outcome.answers for outcome in result.outcomes]
    means = [result.mean for result in expected.values()]
    numbers = json.loads((tmp_path / "tasks/own/scores.json").read_text())
    assert numbers["clients"] == {"words": {client: result.mean for client, result in expected.items()}}
    found = {
        "own/words/client_mean": fmean(means),
        "own/words/client_std": pstdev(means),
        "own/words/client_worst_tenth": min(means),
    }
    logged = [row for row in table(tmp_path / "m/version_0/metrics.csv") if row.get("own/words/client_mean")]
    assert len(logged) == 1
    for name, value in found.items():
        assert numbers[name] == pytest.approx(value)
        assert trainer.callback_metrics[name].item() == pytest.approx(value)
        assert float(logged[0][name]) == pytest.approx(value)
    # The global model of local training is the one that it began with, and it is back.
    assert numbers["own/words/client_mean"] != trainer.callback_metrics["score/words"].item()
    plain, _ = fit(tiny_model, rows, tmp_path / "plain", local())
    assert all(torch.equal(weight, plain.state_dict()[name]) for name, weight in module.state_dict().items())


def test_who_was_never_trained_answers_with_the_global_model(tiny_model, rows, tmp_path, caplog):
    loop = local(clients_per_round=1)
    scores = TaskScores({"words": words(rows)}, own_models=True)
    with caplog.at_level("INFO", logger="lightning.pytorch.utilities.rank_zero"):
        fit(tiny_model, rows, tmp_path, loop, scores, rounds=1)
    assert "2 of 3 clients were never trained and answer with the global model" in caplog.text
    (trained,) = [client for client in loop.clients if loop.own_state(client) is not None]
    numbers = json.loads((tmp_path / "tasks/own/scores.json").read_text())["clients"]["words"]
    [overall] = json.loads(f"[{(tmp_path / 'tasks/epoch_1/scores.json').read_text()}]")
    assert {score for client, score in numbers.items() if client != trained} == {overall["score/words"]}


def test_algorithms_without_own_models_are_refused_after_the_first_round(tiny_model, rows, tmp_path):
    scores = TaskScores({"words": words(rows)}, every_n_epochs=None, own_models=True)
    with pytest.raises(ValueError, match=r"no client keeps a model of its own: set algorithm"):
        fit(tiny_model, rows, tmp_path, FederatedLoop(clients_per_round=1), scores, rounds=5)
    assert not (tmp_path / "tasks/epoch_5").exists()
    with pytest.raises(ValueError, match="needs clients: add a federated loop"):
        fit(tiny_model, rows, tmp_path, scores)
