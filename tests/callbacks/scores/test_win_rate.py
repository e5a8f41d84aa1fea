import math
from collections import Counter

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import DummyLogger
from plain_lightning import trainer as make_trainer
from refusals import refusal
from tiny_world import EVAL_PROMPTS, table, write_rows

from fedlight import DPOModule, FederatedLoop, Judge, Lora, PreferenceDataModule, PromptDataModule, WinRate
from fedlight.datamodules.rows.split import Split
from fedlight.toy import rows

SHORT = {"max_new_tokens": 6, "seed": 5}


class NoPrompts(L.LightningDataModule):
    """A user's own, of which a filter has left nothing."""

    def predict_dataloader(self):
        return []


class Notes(Judge):
    """Prefers what comes later in the alphabet; like a judge that loads a model it draws from the global stream."""

    sees_order = False

    def __init__(self):
        self.shown = []

    def verdicts(self, fields, ours, theirs):
        torch.rand(3)
        self.shown.append((list(fields), list(ours), list(theirs)))
        return [0.5 if a == b else float(a > b) for a, b in zip(ours, theirs, strict=True)]


class Keeps(L.Callback):
    """Saves each epoch as a checkpoint of ModelCheckpoint's does, but has no state of its own in it."""

    def on_train_epoch_end(self, trainer, pl_module):
        trainer.save_checkpoint(f"{trainer.default_root_dir}/{trainer.current_epoch}.ckpt")


def make_prompts(model, **changes):
    settings = {"source": EVAL_PROMPTS, "tokenizer": model, "max_tokens": 128, "eval_batch_size": 5}
    return PromptDataModule(**settings | changes)


def fit(model, folder, *callbacks, epochs=2, ckpt_path=None, **options):
    """Two batches of four pairs per epoch; gives the module and the trainer."""
    folder.mkdir(exist_ok=True)
    votes = [row for row in rows("votes", num_clients=6, votes_per_client=10) if row["choice"] != "tie"][:8]
    data = PreferenceDataModule(
        write_rows(folder / "pairs.jsonl", votes),
        view="dpo",
        tokenizer=model,
        batch_size=4,
        split=Split(val_share=0.0),
    )
    settings = {"log_every_n_steps": 1, "limit_val_batches": 0, "default_root_dir": folder}
    trainer = make_trainer(epochs, callbacks, **settings | options)
    L.seed_everything(1, verbose=False)
    module = DPOModule(model, lr=0.05, lora=Lora(dropout=0.1))
    trainer.fit(module, datamodule=data, ckpt_path=ckpt_path, weights_only=True)
    return module, trainer


@pytest.fixture(scope="module")
def run(tiny_model, tmp_path_factory):
    """A whole run, and what its judge was shown."""
    folder, judge = tmp_path_factory.mktemp("run"), Notes()
    callback = WinRate(make_prompts(tiny_model), {"alphabet": judge}, **SHORT)
    logger = CSVLogger(folder, name="metrics")
    module, trainer = fit(tiny_model, folder, callback, Keeps(), logger=logger)
    return folder, judge, module, trainer


def logged(folder, version=0, name="win_rate/alphabet"):
    """Optimizer steps and win rates of metrics.csv."""
    found = table(folder / f"metrics/version_{version}/metrics.csv")
    return {int(row["step"]): float(row[name]) for row in found if row.get(name)}


def test_the_win_rate_is_logged_before_training_and_after_each_epoch(run):
    folder, judge, _, trainer = run
    expected = []
    for _, ours, theirs in judge.shown:
        expected.append(sum((a > b) + 0.5 * (a == b) for a, b in zip(ours, theirs, strict=True)) / 12)
    assert logged(folder) == dict(zip((0, 2, 4), expected, strict=True))
    assert expected[0] == 0.5
    assert expected[2] != 0.5
    ratio = sum(len(a.split()) for a in judge.shown[2][1]) / sum(len(b.split()) for b in judge.shown[2][2])
    assert logged(folder, name="win_rate/words")[4] == pytest.approx(ratio)
    assert float(trainer.callback_metrics["win_rate/alphabet"]) == pytest.approx(expected[2])


@pytest.mark.parametrize("read", [[1.0, math.nan], [math.nan] * 2])
def test_unread_verdicts_are_counted_and_left_out(read, tiny_model, tmp_path):
    judge = Notes()
    judge.verdicts = lambda fields, ours, theirs: read * 6
    _, trainer = fit(tiny_model, tmp_path, WinRate(make_prompts(tiny_model), {"a": judge}, **SHORT), epochs=1)
    assert float(trainer.callback_metrics["win_rate_unread/a"]) == read.count(math.nan) / 2
    assert trainer.callback_metrics.get("win_rate/a") == (1.0 if 1.0 in read else None)


def test_checkpoints_can_be_chosen_by_it(run, tiny_model, tmp_path):
    best = ModelCheckpoint(
        tmp_path / "best", monitor="win_rate/alphabet", mode="max", save_on_train_epoch_end=True
    )
    callback = WinRate(make_prompts(tiny_model), {"alphabet": Notes()}, **SHORT)
    fit(tiny_model, tmp_path, callback, best, enable_checkpointing=True)
    after = [rate for step, rate in logged(run[0]).items() if step > 0]
    assert float(best.best_model_score) == pytest.approx(max(after))


def test_answers_are_those_of_the_model_and_of_the_raw_model(run, tiny_model):
    _, judge, module, _ = run
    assert len(judge.shown) == 3
    prompts = [f"POST: {row['prompt']}" for row in rows("eval_prompts", size=12)]
    for fields, _, _ in judge.shown:
        assert [f"POST: {own['prompt']}" for own in fields] == prompts
    (_, start, raw), *_, (_, end, same_raw) = judge.shown
    assert start == raw == same_raw
    assert end != raw
    callback = WinRate(make_prompts(tiny_model), {"alphabet": Notes()}, **SHORT)
    untrained = DPOModule(tiny_model)
    callback.setup(L.Trainer(logger=False, accelerator="cpu", enable_progress_bar=False), untrained, "fit")
    assert callback._answers(untrained, raw=False) == raw
    assert callback._answers(module, raw=False) == end
    assert callback._answers(module, raw=True) == raw
    assert Counter(map(len, callback._batches)) == {5: 2, 2: 1}


def test_training_does_not_notice(tiny_model, tmp_path):
    """With and without the callback the same is found in front of each batch, and at the end."""

    class Looks(L.Callback):
        def __init__(self):
            self.seen = []

        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            trained = {name: p.requires_grad for name, p in pl_module.named_parameters()}
            modes = {name: part.training for name, part in pl_module.named_modules()}
            self.seen.append((torch.get_rng_state().tolist(), trained, modes, batch["index"].tolist()))

    seen, ends = [], []
    for callbacks in ([], [WinRate(make_prompts(tiny_model), {"alphabet": Notes()}, **SHORT)]):
        looks = Looks()
        ends.append(fit(tiny_model, tmp_path, *callbacks, looks)[0].state_dict())
        seen.append(looks.seen)
    assert len(seen[0]) == 4
    assert seen[0] == seen[1]
    assert len(ends[0]) == 28
    torch.testing.assert_close(*ends, rtol=0, atol=0)


def test_a_resumed_run_judges_against_the_same_answers(run, tiny_model, tmp_path):
    folder, judge, module, _ = run
    again = Notes()
    # Another base would answer otherwise: what counts is what the checkpoint holds.
    state = torch.load(folder / "0.ckpt", weights_only=True)
    (key,) = (key for key in state["callbacks"] if key.startswith("WinRate"))
    assert state["callbacks"][key]["raw"] == judge.shown[0][2]
    state["callbacks"][key]["raw"][0] = "marked"
    torch.save(state, tmp_path / "marked.ckpt")
    callback = WinRate(make_prompts(tiny_model), {"alphabet": again}, **SHORT)
    resumed, _ = fit(
        tiny_model,
        tmp_path,
        callback,
        ckpt_path=tmp_path / "marked.ckpt",
        logger=CSVLogger(tmp_path, name="metrics"),
    )
    assert len(again.shown) == 1
    assert again.shown[0] == (judge.shown[2][0], judge.shown[2][1], ["marked", *judge.shown[2][2][1:]])
    assert list(logged(tmp_path)) == [4]
    torch.testing.assert_close(resumed.state_dict(), module.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("changes", "data"), [({"seed": 6}, {}), ({"temperature": 1.0}, {}), ({}, {"limit": 4})], ids=str
)
def test_other_prompts_or_draws_are_refused_on_resuming(changes, data, run, tiny_model, tmp_path):
    callback = WinRate(make_prompts(tiny_model, **data), {"alphabet": Notes()}, **SHORT | changes)
    with refusal("the raw answers in the checkpoint are to other prompts, or were drawn"):
        fit(tiny_model, tmp_path, callback, ckpt_path=run[0] / "0.ckpt")


class Stop(L.Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        trainer.should_stop = trainer.current_epoch == 1


def test_a_round_that_a_stop_cuts_short_has_no_win_rate(tiny_model, tmp_path):
    judge, loop = Notes(), FederatedLoop(clients_per_round=1, local_steps=2)
    fit(tiny_model, tmp_path, WinRate(make_prompts(tiny_model), {"alphabet": judge}, **SHORT), loop, Stop())
    assert (loop.rounds_done, len(judge.shown)) == (1, 2)  # before training, and after the first round


def test_every_second_epoch_and_a_second_fit(tiny_model, tmp_path):
    judge = Notes()
    callback = WinRate(make_prompts(tiny_model), {"alphabet": judge}, every_n_epochs=2, **SHORT)
    fit(tiny_model, tmp_path, callback)
    assert len(judge.shown) == 2
    fit(tiny_model, tmp_path, callback, epochs=1)  # begins anew, with raw answers of its own
    assert len(judge.shown) == 3
    assert judge.shown[2][1] == judge.shown[2][2]


def test_nothing_written_has_no_ratio_and_stops_nothing(tiny_model, tmp_path):
    class Silent(DPOModule):
        def generate(self, prompts, **options):
            return [[""] for _ in prompts]

    class First(Judge):
        def verdicts(self, fields, ours, theirs):
            return [1.0] * len(ours)

    callback = WinRate(make_prompts(tiny_model), {"alphabet": Notes(), "first": First()})
    trainer = L.Trainer(logger=DummyLogger(), accelerator="cpu", enable_progress_bar=False, max_epochs=1)
    module = Silent(tiny_model)
    callback.setup(trainer, module, "fit")
    callback.on_train_start(trainer, module)
    assert float(trainer.callback_metrics["win_rate/alphabet"]) == 0.5
    assert float(trainer.callback_metrics["win_rate/first"]) == 0.5  # asked in both orders
    assert math.isnan(trainer.callback_metrics["win_rate/words"])


def test_errors_come_before_training(tiny_model, tmp_path):
    class Trained(L.Callback):
        def on_train_batch_start(self, *args):
            raise AssertionError

    class Broken(Judge):
        def verdicts(self, fields, ours, theirs):
            raise ValueError("no such adapter")

    for prompts, judge, why in (
        (make_prompts(tiny_model, columns={"prompt": "post"}), Notes(), "post"),
        (make_prompts(tiny_model), Broken(), "no such adapter"),
        (NoPrompts(), Notes(), r"WinRate\.prompts gives no prompt to answer: give it rows"),
    ):
        with refusal(why):
            fit(tiny_model, tmp_path, WinRate(prompts, {"judge": judge}, **SHORT), Trained())


def test_what_does_not_fit_is_refused(tiny_model):
    prompts, judges = make_prompts(tiny_model), {"judge": Notes()}
    with refusal("every_n_epochs=0 must be at least 1"):
        WinRate(prompts, judges, every_n_epochs=0)
    for wrong in ({"temperature": -1.0}, {"max_new_tokens": 0}):
        with refusal("must be"):
            WinRate(prompts, judges, **wrong)
    for wrong in ({}, {"words": Notes()}):
        with refusal("name one or more"):
            WinRate(prompts, wrong)
    trainer = L.Trainer(logger=False, accelerator="cpu", enable_progress_bar=False)
    with refusal(r"needs a module with generate.*not LightningModule"):
        WinRate(prompts, judges).setup(trainer, L.LightningModule(), "fit")
