import pytest
from omegaconf import OmegaConf
from recipe_runs import ran
from tiny_world import PROMPTS, VOTES, fedlight, read_lines, table, tiny_selector, weights

from fedlight.lightning_cli.cli import lightning_cli
from fedlight.recipes.stages import settings_in


def federated(cli):
    return next(callback for callback in cli.trainer.callbacks if type(callback).__name__ == "FederatedLoop")


@pytest.fixture(scope="module")
def run(tiny_model, tmp_path_factory):
    """Folder of a finished run."""
    folder = tmp_path_factory.mktemp("run")
    assert "round 2/2" in ran("fit", *tiny_selector(tiny_model, folder)).out
    return folder


def test_help_is_a_command_too():
    assert fedlight("--version").out.startswith("fedlight 0")
    assert fedlight("help").out == fedlight("--help").out
    assert fedlight("--help").out.startswith("usage: fedlight COMMAND")
    assert fedlight("help", "report").out == fedlight("report", "--help").out


@pytest.mark.parametrize(
    ("arguments", "nearest"),
    [
        (("init", "rows.csv", "--modle", "toy"), "--model"),
        (("report", "--opne=1", "runs"), "--open"),
        (("device", "measure", "--name", "x", "--nmae", "y"), "--name"),
    ],
)
def test_a_mistyped_option_is_told_the_nearest(arguments, nearest):
    outcome = fedlight(*arguments)
    assert outcome.code == 2
    assert f"did you mean {nearest!r}?" in outcome.err


def test_fit_writes_visits_metrics_adapter_and_checkpoints(run):
    visits = table(run / "visits.csv")
    steps = [(row["round"], row["steps"]) for row in visits]
    assert steps == [("0", "2"), ("0", "2"), ("1", "2"), ("1", "2")]
    metrics = table(run / "metrics/version_0/metrics.csv")
    assert {"fed/loss", "val/accuracy", "train/loss"} <= set(metrics[0])
    assert sorted(file.name for file in (run / "checkpoints").iterdir()) == ["epoch=0.ckpt", "epoch=1.ckpt"]
    assert any(value != 0 for values in weights(run).values() for row in values for value in row)


def test_validate_and_test_the_trained_adapter(run, tiny_model):
    arguments = tiny_selector(tiny_model, run, "--trainer.logger=false")
    rows = table(run / "metrics/version_0/metrics.csv")
    logged = [row["val/accuracy"] for row in rows if row["val/accuracy"]]
    validated = lightning_cli(["validate", *arguments, f"--model.adapter={run / 'adapter'}"])
    assert validated.trainer.callback_metrics["val/accuracy"].item() == pytest.approx(float(logged[-1]))
    tested = lightning_cli(["test", *arguments, f"--ckpt_path={run / 'checkpoints/epoch=1.ckpt'}"])
    by_adapter = lightning_cli(["test", *arguments, f"--model.adapter={run / 'adapter'}"])
    assert tested.trainer.callback_metrics["test/loss"] == by_adapter.trainer.callback_metrics["test/loss"]


def test_predict_writes_completions(tiny_model, tmp_path):
    ran(
        *("predict", "--config=completions.yaml", f"--model.model={tiny_model}"),
        *(f"--data.source={PROMPTS}", "--data.limit=3", "--model.completions.number=2"),
        *("--model.completions.max_new_tokens=4", "--trainer.accelerator=cpu"),
        f"--trainer.default_root_dir={tmp_path}",
    )
    assert [len(row["completions"]) for row in read_lines(tmp_path / "completions.jsonl")] == [2, 2, 2]


def test_overrides_and_class_swaps_reach_loop_and_module(tiny_model, tmp_path):
    more = ("--federated.clients_per_round", "5", "--federated.algorithm", "FedAvg")
    more += ("--federated.algorithm.weighting", "uniform", "--trainer.max_epochs", "1")
    cli = lightning_cli(["fit", *tiny_selector(tiny_model, tmp_path), *more])
    assert federated(cli).algorithm.weighting == "uniform"
    assert len(table(tmp_path / "visits.csv")) == 5
    arguments = tiny_selector(
        *(tiny_model, tmp_path / "swapped", "--model", "SFTModule", "--model.model", tiny_model),
        *("--data.view=sft", "--trainer.max_epochs=1"),
    )
    cli = lightning_cli(["fit", *arguments])
    assert type(cli.model).__name__ == "SFTModule"
    assert cli.model.hparams["lr"] == 1e-5  # its own; selector.yaml has 0.003


def test_the_printed_config_is_complete_and_runs_the_same(run, tiny_model, tmp_path):
    printed = fedlight("fit", *tiny_selector(tiny_model, run, "--print_config")).out
    config = OmegaConf.create(printed)
    assert set(config) >= {"seed_everything", "trainer", "model", "data", "federated", "ckpt_path"}
    assert config["model"]["init_args"]["seed"] == 0  # resolved
    (tmp_path / "all.yaml").write_text(printed)
    assert fedlight("fit", f"--config={tmp_path / 'all.yaml'}", "--print_config").out == printed

    (tmp_path / "all.yaml").write_text(printed.replace(str(run), str(tmp_path)))
    ran("fit", f"--config={tmp_path / 'all.yaml'}")
    assert weights(tmp_path) == weights(run)


def test_without_the_key_federated_training_is_central(run, tiny_model, tmp_path, monkeypatch):
    given = tiny_selector(tiny_model, tmp_path / "null")
    central = [argument for argument in given if not argument.startswith("--federated")]
    assert "epoch 2/2" in fedlight("fit", *central, "--federated", "null").out
    assert not (tmp_path / "null/visits.csv").exists()

    config = OmegaConf.create(settings_in("selector.yaml"))
    del config["federated"]
    (tmp_path / "selector.yaml").write_text(OmegaConf.to_yaml(config))
    monkeypatch.chdir(tmp_path)  # a file that is here goes before fedlight's own of that name
    outcome = fedlight("fit", *central, "--trainer.default_root_dir=deleted")
    assert "epoch 2/2" in outcome.out
    assert weights(tmp_path / "deleted") == weights(tmp_path / "null") != weights(run)


def test_interpolation_comes_after_overrides(tiny_model, tmp_path):
    given = tiny_selector(tiny_model, tmp_path, "--seed_everything=7", "--print_config")
    config = OmegaConf.create(fedlight("fit", *given).out)
    assert [config[key]["init_args"]["seed"] for key in ("model", "data", "federated")] == [7, 7, 7]
    assert config["trainer"]["logger"]["init_args"]["save_dir"] == str(tmp_path)
    assert config["data"]["init_args"]["tokenizer"] == tiny_model


def test_null_is_nothing_at_every_depth(tiny_model, tmp_path):
    generator = "--data.augmentation.generator"
    arguments = (
        *("--config", "feddca.yaml", "--data.augmentation", "SelfInstruct", "--data.augmentation.number=2"),
        generator,
        "ChatEndpoint",
        f"{generator}.base_url=http://localhost/v1",
        f"{generator}.model=None-7B",
        *(f"{generator}.api_key_variable", "null", f"{generator}.cache=null", "--data.public_source", "null"),
    )
    printed = ran("fit", *arguments, "--print_config")
    data = OmegaConf.create(printed.out)["data"]["init_args"]
    asked = data["augmentation"]["init_args"]["generator"]["init_args"]
    assert (asked["api_key_variable"], asked["cache"], data["public_source"]) == (None, None, None)
    assert asked["model"] == "None-7B"


def test_a_data_config_is_found_by_its_name(tiny_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = ("--data", "data/toy_votes.yaml", f"--data.source={VOTES}")
    asked = fedlight("fit", *tiny_selector(tiny_model, tmp_path), *data, "--print_config")
    config = OmegaConf.create(asked.out)
    assert config["data"]["init_args"]["partition"]["by"] == "client"
    assert config["data"]["init_args"]["source"] == VOTES
