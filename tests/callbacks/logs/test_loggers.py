import pytest
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger
from plain_lightning import trainer as make_trainer
from tiny_world import EVAL_PROMPTS, HELDOUT, VOTES, table

from fedlight import DPOModule, FederatedLoop, Judge, PreferenceDataModule, PromptDataModule, WinRate
from fedlight.datamodules.rows.split import Split

pytest.importorskip("tensorboard")
pytest.importorskip("wandb")
EXPECTED = {
    *("train/loss", "val/loss", "win_rate/alphabet", "win_rate/words"),
    *("fed/loss", "fed/clients", "fed/bytes_down", "fed/bytes_up"),
}


class LaterInTheAlphabet(Judge):
    """A judge without a model."""

    def verdicts(self, fields, ours, theirs):
        return [0.5 if a == b else float(a > b) for a, b in zip(ours, theirs, strict=True)]


class OfflineRun:
    """What Lightning's W&B logger asks of a run; keeps what it is given. A real one starts a process for seconds."""

    name = id = "offline"

    def __init__(self) -> None:
        self.given: list[dict[str, float]] = []
        self.config = self

    def update(self, *args, **kwargs):
        """Hyperparameters."""

    def log(self, metrics):
        self.given.append(dict(metrics))


@pytest.fixture(scope="module")
def logged(tiny_model, tmp_path_factory):
    """Logger -> metric -> {step: value}, of two rounds of two clients."""
    folder, run = tmp_path_factory.mktemp("loggers"), OfflineRun()
    loggers = [CSVLogger(folder, name="csv"), TensorBoardLogger(folder, name="tensorboard")]
    loggers += [WandbLogger(experiment=run, save_dir=folder)]
    prompts = PromptDataModule(EVAL_PROMPTS, tokenizer=tiny_model, max_tokens=128, eval_batch_size=12)
    trainer = make_trainer(
        2,
        [
            FederatedLoop(clients_per_round=2, local_steps=2),
            WinRate(prompts, {"alphabet": LaterInTheAlphabet()}, max_new_tokens=4),
        ],
        log_every_n_steps=1,
        default_root_dir=folder,
        num_sanity_val_steps=0,
        logger=loggers,
    )
    data = PreferenceDataModule(
        VOTES, split=Split(test_source=HELDOUT, val_share=0.2), view="dpo", tokenizer=tiny_model, batch_size=2
    )
    trainer.fit(DPOModule(tiny_model, lr=0.01), datamodule=data)
    return {
        "csv": from_csv(folder / "csv/version_0/metrics.csv"),
        "tensorboard": from_events(loggers[1].log_dir),
        "wandb": from_run(run),
    }


def from_csv(file):
    found: dict[str, dict[int, float]] = {}
    for row in table(file):
        for name, value in row.items():
            if value and name not in ("step", "epoch"):
                found.setdefault(name, {})[int(row["step"])] = float(value)
    return found


def from_events(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    names = [name for name in events.Tags()["scalars"] if name not in ("epoch", "hp_metric")]
    return {name: {event.step: event.value for event in events.Scalars(name)} for name in names}


def from_run(run):
    found: dict[str, dict[int, float]] = {}
    for metrics in run.given:
        step = metrics.pop("trainer/global_step")
        for name, value in metrics.items():
            if name != "epoch":
                found.setdefault(name, {})[step] = value
    return found


def test_all_that_belongs_to_a_run_is_there(logged):
    assert set(logged["csv"]) >= EXPECTED
    assert len(logged["csv"]["train/loss"]) == len(logged["csv"]["train/reward_margin"]) == 2  # once a round
    assert len(logged["csv"]["fed/bytes_up"]) == 2
    assert sorted(logged["csv"]["win_rate/alphabet"]) == [0, 4, 8]  # before training too


@pytest.mark.parametrize("other", ["tensorboard", "wandb"])
def test_names_steps_and_values_are_the_same(logged, other):
    assert set(logged[other]) == set(logged["csv"])
    for name, points in logged["csv"].items():
        assert logged[other][name] == pytest.approx(points, rel=1e-5), name
