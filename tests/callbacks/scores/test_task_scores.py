from statistics import fmean, pstdev

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, Timer
from lightning.pytorch.loggers import CSVLogger
from plain_lightning import trainer as make_trainer
from refusals import refusal
from tiny_world import read_lines, table, write_rows

from fedlight import (
    FederatedLoop,
    InstructionDataModule,
    LocalOnly,
    Lora,
    Partition,
    SFTModule,
    TaskScores,
)
from fedlight.datamodules.rows import TaskRows
from fedlight.datamodules.rows.split import Split
from fedlight.evaluation.tasks import ExactMatch
from fedlight.evaluation.tasks.result import Verdict

TEMPLATE = "{instruction}"
NAMES = ["anna", "ben", "carl", "dora", "emil", "fiona", "george", "hanna"]
ROWS = [
    {"instruction": f"{name} paints", "input": "", "output": "walls .", "domain": NAMES[i % 2]}
    for i, name in enumerate(NAMES)
]


class Words(ExactMatch):
    """The share of distinct words, so that a score changes with the model; draws from the global stream as well."""

    def score(self, example, answer):
        torch.rand(3)
        words = answer.split()
        return Verdict(len(set(words)) / max(len(words), 1), answer or None)


@pytest.fixture
def rows(tmp_path):
    return write_rows(tmp_path / "rows.jsonl", ROWS)


def make_task(rows, group="group", **changes):
    data = TaskRows(rows, columns={"response": "output", "group": "domain"}, template=TEMPLATE)
    return Words(data, group=group, max_new_tokens=5, **changes)


def quiet(folder, *callbacks, **options):
    epochs = options.pop("max_epochs", 3)
    return make_trainer(epochs, callbacks, default_root_dir=folder, log_every_n_steps=1, **options)


def fit(model, rows, folder, *callbacks, ckpt_path=None, clients=2, val_share=0.25, **options):
    data = InstructionDataModule(
        rows,
        split=Split(test_source=rows, val_share=val_share),
        template=TEMPLATE,
        tokenizer=model,
        partition=Partition(by="iid", num_clients=clients),
        batch_size=2,
    )
    module = SFTModule(model, lr=0.05, lora=Lora(dropout=0.1), seed=1)
    trainer = quiet(folder, *callbacks, **options)
    L.seed_everything(1, verbose=False)
    trainer.fit(module, datamodule=data, ckpt_path=ckpt_path, weights_only=True)
    return module, trainer, data


def logged(folder, name):
    return {
        int(row["step"]): float(row[name])
        for row in table(folder / "m/version_0/metrics.csv")
        if row.get(name)
    }


def numbers_of(folder):
    [numbers] = read_lines(folder / "scores.json")
    return numbers


def answers(folder):
    return [line["answers"] for line in read_lines(folder / "words.jsonl")]


def test_scores_are_logged_and_answers_written(tiny_model, rows, tmp_path):
    task = make_task(rows)
    scores = TaskScores({"words": task}, before_training=True)
    module, trainer, _ = fit(tiny_model, rows, tmp_path, scores, logger=CSVLogger(tmp_path, "m"))
    found = logged(tmp_path, "score/words")
    steps = trainer.global_step // 3
    assert list(found) == [0, steps, 2 * steps, 3 * steps]
    assert len(set(found.values())) > 1
    again = make_task(rows).run(module)  # the model after training
    assert found[3 * steps] == pytest.approx(again.mean)
    assert float(trainer.callback_metrics["score/words"]) == pytest.approx(again.mean)
    assert logged(tmp_path, "score/words/anna")[3 * steps] == pytest.approx(again.by_group["anna"])
    assert found[0] == pytest.approx(make_task(rows).run(SFTModule(tiny_model)).mean)
    lines = read_lines(tmp_path / "tasks/epoch_3/words.jsonl")
    assert [line["row"] for line in lines] == list(range(8))
    assert [line["answers"] for line in lines] == [outcome.answers for outcome in again.outcomes]
    assert lines[0]["prompt"] == "anna paints"
    assert lines[0]["verdicts"][0]["read"] == lines[0]["answers"][0]
    assert numbers_of(tmp_path / "tasks/epoch_3")["score/words"] == again.mean
    moments = sorted(path.name for path in (tmp_path / "tasks").iterdir())
    assert moments == ["epoch_1", "epoch_2", "epoch_3", "start"]


def test_training_does_not_notice(tiny_model, rows, tmp_path):
    scores = TaskScores({"words": make_task(rows, samples=2, temperature=1.0)}, before_training=True)
    one, _, _ = fit(tiny_model, rows, tmp_path, scores)
    other, _, _ = fit(tiny_model, rows, tmp_path)
    assert all(torch.equal(weight, other.state_dict()[name]) for name, weight in one.state_dict().items())


def test_rounds_are_scored_with_the_global_model(tiny_model, rows, tmp_path):
    class Global(L.Callback):
        def __init__(self):
            self.states = []

        def on_validation_end(self, trainer, pl_module):
            self.states.append({name: weight.clone() for name, weight in pl_module.state_dict().items()})

    loop, seen = FederatedLoop(clients_per_round=1, local_steps=2), Global()
    drawn = {"samples": 2, "temperature": 1.0}
    scores = TaskScores({"words": make_task(rows, **drawn)}, every_n_epochs=2)
    logger = CSVLogger(tmp_path, "m")
    fit(tiny_model, rows, tmp_path, loop, scores, seen, logger=logger, num_sanity_val_steps=0)
    assert len(seen.states) == 3
    assert list(logged(tmp_path, "score/words")) == [4, 6]  # after the second round and after the last
    for state, step, epoch in zip(seen.states[1:], (4, 6), (2, 3), strict=True):
        module = SFTModule(tiny_model)
        module.configure_model()
        module.load_state_dict(state)
        expected = make_task(rows, **drawn).run(module)
        given = [outcome.answers for outcome in expected.outcomes]
        assert answers(tmp_path / f"tasks/epoch_{epoch}") == given
        assert logged(tmp_path, "score/words")[step] == pytest.approx(expected.mean)
    assert answers(tmp_path / "tasks/epoch_2") != answers(tmp_path / "tasks/epoch_3")


class Clock(Timer):
    """An hour has passed after the first round."""

    hours = 0

    def __init__(self):
        super().__init__({"hours": 1}, interval="epoch")

    def time_elapsed(self, stage="train"):
        return 3600 * self.hours

    def on_train_epoch_end(self, trainer, pl_module):
        self.hours += 1
        super().on_train_epoch_end(trainer, pl_module)


@pytest.mark.parametrize(
    ("stopping", "stop", "written"),
    [
        (lambda: EarlyStopping("val/loss", stopping_threshold=1e9), {}, ["epoch_1"]),
        (lambda: EarlyStopping("val/loss", stopping_threshold=1e9), {"min_epochs": 2}, ["epoch_2"]),
        (Clock, {}, []),  # the run may go on
    ],
)
def test_a_run_that_stops_early_is_scored_at_its_end(stopping, stop, written, tiny_model, rows, tmp_path):
    scores = TaskScores({"words": make_task(rows)}, every_n_epochs=None)
    loop, by = FederatedLoop(clients_per_round=1, local_steps=1), stopping()
    fit(tiny_model, rows, tmp_path, loop, by, scores, **stop)
    assert 0 < loop.rounds_done < 3
    assert [path.name for path in tmp_path.glob("tasks/*")] == written


@pytest.mark.parametrize("every", [1, None])
def test_a_round_that_a_stop_cuts_short_has_no_score(every, tiny_model, rows, tmp_path):
    class Stop(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            trainer.should_stop = trainer.current_epoch == 1

    scores = TaskScores({"words": make_task(rows)}, every_n_epochs=every)
    loop = FederatedLoop(clients_per_round=2, local_steps=1)
    fit(tiny_model, rows, tmp_path, loop, Stop(), scores, limit_val_batches=0)
    assert loop.rounds_done == 1
    assert [path.name for path in (tmp_path / "tasks").iterdir()] == ["epoch_1"]


def test_a_resumed_run_scores_the_same(tiny_model, rows, tmp_path):
    whole = TaskScores({"words": make_task(rows)}, output=str(tmp_path / "whole"))
    fit(tiny_model, rows, tmp_path, whole)
    _, trainer, _ = fit(tiny_model, rows, tmp_path, TaskScores({"words": make_task(rows)}), max_epochs=1)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    resumed = TaskScores({"words": make_task(rows)}, before_training=True, output=str(tmp_path / "resumed"))
    fit(tiny_model, rows, tmp_path, resumed, ckpt_path=tmp_path / "one.ckpt")
    moments = sorted(path.name for path in (tmp_path / "resumed").iterdir())
    assert moments == ["epoch_2", "epoch_3"]
    for moment in moments:
        one, other = ((tmp_path / name / moment / "words.jsonl").read_text() for name in ("resumed", "whole"))
        assert one == other


def test_training_leaves_no_answers_of_an_earlier_run_or_an_earlier_model(tiny_model, rows, tmp_path):
    """A report and a duel read the last ones: a client's own, those of a test, else of the last epoch."""

    def train(epochs, **options):
        fit(tiny_model, rows, tmp_path, TaskScores({"words": make_task(rows)}), max_epochs=epochs, **options)
        return {path.parent.name for path in (tmp_path / "tasks").glob("*/words.jsonl")}

    def add(*moments):
        for file in (tmp_path / f"tasks/{moment}/words.jsonl" for moment in moments):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("{}")

    add("start", "epoch_5", "validate", "test", "own", "mine")
    _, trainer, _ = fit(tiny_model, rows, tmp_path, TaskScores({"words": make_task(rows)}), max_epochs=1)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    add("start", "epoch_3", "test")
    assert train(2, ckpt_path=tmp_path / "one.ckpt") == {"start", "epoch_1", "epoch_2", "mine"}
    assert train(1) == {"epoch_1", "mine"}


@pytest.mark.parametrize("stage", ["validate", "test"])
def test_scores_without_training(stage, tiny_model, rows, tmp_path):
    module, _, data = fit(tiny_model, rows, tmp_path, max_epochs=1)
    scores = TaskScores({"words": make_task(rows)})
    [numbers] = getattr(quiet(tmp_path, scores), stage)(module, datamodule=data, verbose=False)
    assert numbers["score/words"] == pytest.approx(make_task(rows).run(module).mean)
    assert (tmp_path / f"tasks/{stage}/words.jsonl").is_file()
    assert not (tmp_path / "tasks/epoch_1").exists()


def test_what_does_not_fit_is_refused_before_any_work(tiny_model, rows, tmp_path):
    for wrong in (0, -1):
        with refusal(r"every_n_epochs=.* must be at least 1"):
            TaskScores({"a": make_task(rows)}, every_n_epochs=wrong)
    for tasks in ({}, {"a/b": make_task(rows)}):
        with refusal("by names without a slash"):
            TaskScores(tasks)
    with refusal(r"TaskScores\.tasks is not given, and InstructionDataModule has none"):
        fit(tiny_model, rows, tmp_path, TaskScores())
    missing = ExactMatch(TaskRows(rows, columns={"response": "answer"}, template=TEMPLATE))
    with refusal("no column 'answer'"):
        fit(tiny_model, rows, tmp_path, TaskScores({"a": missing}))
    callback = TaskScores({"a": make_task(rows)})
    with refusal("needs a module with generate and log_likelihoods"):
        callback.setup(quiet(tmp_path), L.LightningModule(), "fit")
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"TaskScores\.output=.*file cannot be written \("):
        fit(tiny_model, rows, tmp_path, TaskScores({"a": make_task(rows)}, output=str(tmp_path / "file")))


def local(model, rows, folder, *callbacks, clients_per_round=3, **options):
    """Three clients that train alone."""
    loop = FederatedLoop(LocalOnly(), clients_per_round=clients_per_round, local_steps=3)
    options = {"max_epochs": 2, "clients": 3, "val_share": 0.0, "limit_val_batches": 0, **options}
    module, trainer, _ = fit(model, rows, folder, loop, *callbacks, **options)
    return module, trainer, loop


def test_each_client_answers_with_its_own_weights(tiny_model, rows, tmp_path):
    scores = TaskScores({"words": make_task(rows, None)}, every_n_epochs=None, own_models=True)
    module, trainer, loop = local(tiny_model, rows, tmp_path, scores, logger=CSVLogger(tmp_path, "m"))
    expected = {}
    for client in loop.clients:
        one = SFTModule(tiny_model, seed=1)
        one.configure_model()
        _, unexpected = one.load_state_dict(loop.own_state(client), strict=False)
        assert not unexpected
        expected[client] = make_task(rows, None).run(one)
    lines = read_lines(tmp_path / "tasks/own/words.jsonl")
    assert len({result.mean for result in expected.values()}) > 1
    for client, result in expected.items():
        given = [line["answers"] for line in lines if line["client"] == client]
        assert given == [outcome.answers for outcome in result.outcomes]
    means = [result.mean for result in expected.values()]
    numbers = numbers_of(tmp_path / "tasks/own")
    assert numbers["clients"] == {"words": {client: result.mean for client, result in expected.items()}}
    found = {"client_mean": fmean(means), "client_std": pstdev(means), "client_worst_tenth": min(means)}
    [row] = [row for row in table(tmp_path / "m/version_0/metrics.csv") if row.get("own/words/client_mean")]
    for name, value in found.items():
        assert numbers[f"own/words/{name}"] == pytest.approx(value)
        assert trainer.callback_metrics[f"own/words/{name}"].item() == pytest.approx(value)
        assert float(row[f"own/words/{name}"]) == pytest.approx(value)
    # The global model of local training is the one that it began with, and it is back.
    assert numbers["own/words/client_mean"] != trainer.callback_metrics["score/words"].item()
    plain, _, _ = local(tiny_model, rows, tmp_path / "plain")
    assert all(torch.equal(weight, plain.state_dict()[name]) for name, weight in module.state_dict().items())


def test_who_was_never_trained_answers_with_the_global_model(tiny_model, rows, tmp_path, caplog):
    scores = TaskScores({"words": make_task(rows, None)}, own_models=True)
    with caplog.at_level("INFO", logger="lightning.pytorch.utilities.rank_zero"):
        *_, loop = local(tiny_model, rows, tmp_path, scores, clients_per_round=1, max_epochs=1)
    assert "2 of 3 clients were never trained and answer with the global model" in caplog.text
    (trained,) = [client for client in loop.clients if loop.own_state(client) is not None]
    overall = numbers_of(tmp_path / "tasks/epoch_1")["score/words"]
    own = numbers_of(tmp_path / "tasks/own")["clients"]["words"]
    assert {score for client, score in own.items() if client != trained} == {overall}


def test_algorithms_without_own_models_are_refused_after_the_first_round(tiny_model, rows, tmp_path):
    scores = TaskScores({"words": make_task(rows)}, every_n_epochs=None, own_models=True)
    with refusal(r"no client keeps a model of its own: set algorithm"):
        fit(tiny_model, rows, tmp_path, FederatedLoop(clients_per_round=1), scores, max_epochs=5)
    assert not (tmp_path / "tasks/epoch_5").exists()
    with refusal("needs clients: add a federated loop"):
        fit(tiny_model, rows, tmp_path, scores)
