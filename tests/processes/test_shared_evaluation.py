from types import SimpleNamespace

import lightning as L
import numpy as np
import pytest
import torch
from plain_lightning import trainer as quiet_trainer
from thread_team import on_team
from tiny_world import EVAL_PROMPTS, VOTES, write_rows
from torch.utils.data import DataLoader

from fedlight import (
    DPOModule,
    FederatedLoop,
    Judge,
    PreferenceDataModule,
    PromptDataModule,
    SelectorModule,
    SFTModule,
    WinRate,
)
from fedlight.callbacks.export import PredictionWriter
from fedlight.callbacks.loop.round_table import RoundTable
from fedlight.callbacks.loop.run import client_losses
from fedlight.callbacks.scores import TaskScores
from fedlight.datamodules.rows import TaskRows
from fedlight.datamodules.rows.split import Split
from fedlight.evaluation.tasks import ExactMatch
from fedlight.evaluation.tasks.result import Verdict
from fedlight.modules.language.adapters import Lora
from fedlight.processes.work import for_each
from fedlight.toy import rows as toy_rows


class Prompts(L.LightningDataModule):
    """Eleven prompts in batches of two."""

    def __init__(self):
        super().__init__()
        self.skip_predict_batches = 0

    def predict_dataloader(self):
        rows = [{"index": i, "prompt": f"prompt {i}"} for i in range(11)]
        return DataLoader(rows[2 * self.skip_predict_batches :], batch_size=2)


class Echo(L.LightningModule):
    def __init__(self, dies_at=None):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(1.0))
        self.dies_at, self.seen = dies_at, []

    def predict_step(self, batch, batch_idx):
        if self.dies_at in batch["index"].tolist():
            raise KeyError("killed")
        self.seen += batch["index"].tolist()
        return [f"{prompt} ü" for prompt in batch["prompt"]]


def predict(path, dies_at=None):
    model, writer = Echo(dies_at), PredictionWriter(str(path), ["text"], ["index"])
    quiet_trainer(callbacks=[writer]).predict(model, datamodule=Prompts(), return_predictions=False)
    assert "predict_step" not in vars(model)
    return model.seen


EXPECTED = "".join(f'{{"index": {i}, "text": "prompt {i} ü"}}\n' for i in range(11))


@pytest.mark.parametrize(("size", "shares"), [(2, [6, 5]), (4, [4, 3, 2, 2]), (8, [2, 2, 2, 2, 2, 1, 0, 0])])
def test_predictions_are_shared_and_written_in_order(monkeypatch, tmp_path, size, shares):
    seen = on_team(monkeypatch, size, lambda rank: predict(tmp_path / "made.jsonl"))
    assert (tmp_path / "made.jsonl").read_text() == EXPECTED
    assert [len(own) for own in seen] == shares
    assert sorted(sum(seen, [])) == list(range(11))
    assert [file.name for file in tmp_path.iterdir()] == ["made.jsonl"]


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (3, 2)])
def test_a_killed_run_goes_on_with_another_number_of_processes(monkeypatch, tmp_path, before, after):
    path = tmp_path / "made.jsonl"
    with pytest.raises(KeyError, match="killed"):
        on_team(monkeypatch, before, lambda rank: predict(path, dies_at=8))
    assert not path.exists()
    seen = on_team(monkeypatch, after, lambda rank: predict(path))
    assert path.read_text() == EXPECTED
    assert min(sum(seen, [])) == {1: 8, 2: 8, 3: 6}[before]  # whole turns are kept


def test_losses_by_client_are_shared(monkeypatch):
    data = SimpleNamespace(
        val_dataloader=lambda: DataLoader(torch.arange(10.0), batch_size=3),
        val_client_indices={"a": np.array([0, 4, 9]), "b": np.array([1, 2])},
    )
    computed = []
    monkeypatch.setattr("fedlight.callbacks.loop.run.ready", lambda module, batch: batch)

    class Squares(L.LightningModule):
        def example_losses(self, batch):
            computed.append(batch.tolist())
            return batch**2 / 7

    def measure(rank=0):
        return {client: own.mean() for client, own in client_losses(Squares(), data).items()}

    alone = measure()
    assert alone["b"] == pytest.approx(2.5 / 7)
    batches, computed[:] = [*computed], []
    assert on_team(monkeypatch, 3, measure) == [alone] * 3
    assert sorted(computed) == sorted(batches)


def test_tables_are_written_by_the_first_process(monkeypatch, tmp_path):
    def write(rank):
        table = RoundTable(tmp_path / "visits.csv")
        table.restart()
        for round_idx in range(3):
            table.append([{"round": round_idx, "rank": rank}])
            for_each(str, [])  # all are here
        return table.last_round

    assert on_team(monkeypatch, 3, write) == [2, 2, 2]
    assert (tmp_path / "visits.csv").read_text().split() == ["round,rank", "0,0", "1,0", "2,0"]


class Counting(Judge):
    sees_order = False

    def __init__(self):
        self.asked = 0

    def verdicts(self, fields, ours, theirs):
        self.asked += 1
        return [0.5 if a == b else float(a > b) for a, b in zip(ours, theirs, strict=True)]


class Words(ExactMatch):
    def score(self, example, answer):
        return Verdict(float(len(answer.split()) > 2), answer)


def test_scores_in_training_are_shared(monkeypatch, tiny_model, tmp_path):
    """Each prompt is answered in one process, the judge is asked by one, and all log the same."""
    votes = [row for row in toy_rows("votes", num_clients=2, votes_per_client=9) if row["choice"] != "tie"]
    pairs = write_rows(tmp_path / "pairs.jsonl", votes[:4])
    rows = [{"instruction": f"w{i}", "input": "", "response": "x"} for i in range(7)]
    asked = write_rows(tmp_path / "asked.jsonl", rows)
    batches = []

    class Counted(DPOModule):
        def generate(self, prompts, *args, **options):
            batches.append(tuple(prompts))
            return super().generate(prompts, *args, **options)

    def score(rank=0):
        judge = Counting()
        prompts = PromptDataModule(EVAL_PROMPTS, tokenizer=tiny_model, max_tokens=128, eval_batch_size=5)
        wins = WinRate(prompts, {"longer": judge}, max_new_tokens=4)
        task = Words(TaskRows(str(asked), template="{instruction}"), batch_size=2, max_new_tokens=4)
        scores = TaskScores({"words": task}, output=str(tmp_path / f"{size}"))
        trainer = quiet_trainer(1, [wins, scores], limit_val_batches=0)
        split = Split(val_share=0.0)
        data = PreferenceDataModule(str(pairs), view="dpo", tokenizer=tiny_model, batch_size=4, split=split)
        trainer.fit(Counted(tiny_model, lr=0.05), datamodule=data)
        logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
        return {n: value for n, value in logged.items() if n.startswith(("win_rate", "score"))}, judge.asked

    size = 1
    alone, verdicts = score()
    assert len(alone) > 4
    known, batches[:] = sorted(batches), []
    size = 2
    on_each = on_team(monkeypatch, 2, score)
    assert on_each == [(alone, verdicts), (alone, 0)]
    assert sorted(batches) == known
    files = [{file.name: file.read_bytes() for file in (tmp_path / name).rglob("*.json*")} for name in "12"]
    assert files[0] == files[1] != {}


@pytest.mark.parametrize("view", ["selector", "dpo"])
def test_a_pass_over_validation_examples_is_shared(monkeypatch, tiny_model, tmp_path, view):
    """All processes log the values of one process, bit for bit, and compute a share of the batches each."""
    votes = [row for row in toy_rows("votes", num_clients=3, votes_per_client=9) if row["choice"] != "tie"]
    pairs = write_rows(tmp_path / "pairs.jsonl", votes)
    computed = []

    def evaluate(rank=0):
        class Counted({"selector": SelectorModule, "dpo": DPOModule}[view]):
            def evaluation(self, batch):
                computed.append(self.batch_key(batch))
                return super().evaluation(batch)

        data = PreferenceDataModule(
            str(pairs), split=Split(test_source=str(pairs), val_share=0.5, val_max=20), view=view, tokenizer=tiny_model,
            batch_size=4, eval_batch_size=3, )  # fmt: skip
        module = Counted(tiny_model, seed=1)
        trainer = quiet_trainer(1, [Outputs()], limit_val_batches=3)
        metrics = trainer.validate(module, data, verbose=False) + trainer.test(module, data, verbose=False)
        return metrics, [float(value) for value in trainer.callbacks[0].correct]

    alone = evaluate()
    keys, computed[:] = sorted(computed), []
    assert len(keys) > 6
    assert on_team(monkeypatch, 2, evaluate) == [alone, alone]
    assert sorted(computed) == keys


def test_what_the_reference_of_dpo_says_of_a_pair_is_shared_after_each_round(monkeypatch, tiny_model):
    """A client is trained by another process in a later round, in other batches."""

    def train(rank=0):
        module = DPOModule(tiny_model, lr=0.05, lora=Lora(dropout=0.0))
        split = Split(val_share=0)
        data = PreferenceDataModule(VOTES, view="dpo", tokenizer=tiny_model, batch_size=4, split=split)
        loop = FederatedLoop(clients_per_round=4, local_steps=2)
        quiet_trainer(3, [loop], limit_val_batches=0).fit(module, datamodule=data)
        return {name: value.tolist() for name, value in module.state_dict().items()}, module._reference

    alone = train()
    assert on_team(monkeypatch, 2, train) == [alone, alone]


class Outputs(L.Callback):
    """Keeps what the steps return."""

    def __init__(self):
        self.correct = []

    def on_test_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.correct += outputs["vote"].tolist()


def test_a_loader_with_another_order_each_time_is_noticed():
    module = SFTModule("toy")
    module.batch_key = lambda batch: batch
    module.evaluation = lambda batch: {"loss": batch}
    module._evaluated.extend([(1, {"loss": torch.ones(1)}), (2, {"loss": torch.zeros(1)})])
    assert module.evaluated(1) == {"loss": 1.0}
    with pytest.raises(ValueError, match="gives other batches when it is read again"):
        module.evaluated(3)
    assert module.evaluated(4) == {"loss": 4}
