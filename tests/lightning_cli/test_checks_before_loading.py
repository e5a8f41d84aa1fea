import pytest
import yaml

from fedlight import FederatedDataModule
from fedlight.lightning_cli.cli import lightning_cli
from fedlight.modules.language import base_model
from fedlight.recipes.stages import settings_in


@pytest.fixture
def loads(monkeypatch):
    """The models whose weights were loaded."""
    found, load = [], base_model.load_base

    def counted(model, *args, **options):
        found.append(model)
        return load(model, *args, **options)

    monkeypatch.setattr(base_model, "load_base", counted)
    return found


@pytest.fixture
def fit(tmp_path):
    """Fits a config with these arguments, on one core."""

    def run(config, *arguments):
        here = [f"--trainer.default_root_dir={tmp_path}", "--trainer.accelerator=cpu"]
        return lightning_cli(["fit", f"--config={config}", *here, *arguments])

    return run


def test_loads_are_counted(loads, fit):
    few = ("--trainer.max_epochs=1", "--federated.local_steps=1", "--trainer.limit_val_batches=0")
    fit("selector.yaml", *few)
    assert loads == ["toy"]


@pytest.mark.parametrize(
    ("config", "arguments", "message"),
    [
        ("fedbiscuit.yaml", ["--federated.algorithm.warmup_rounds=9"], "the warm-up of 3 selectors takes 27"),
        ("fedbiscuit.yaml", ["--data.split.val_share=0"], "set data.split.val_share"),
        ("sft.yaml", ["--model.lora=null"], r"model.lora: null, and it has settings below it \(rank"),
        ("selector.yaml", ["--model.lora=null"], r"model.lora: null, and it has settings below it \(rank"),
        ("sft.yaml", ["--data.split=null"], "data.split: null, and it has settings below it"),
        (
            "fedbiscuit.yaml",
            ["--federated.algorithm.assignment=SoftGroups", "--federated.aggregation=CoordinateMedian"],
            "SoftGroups weights",
        ),
        ("selector.yaml", ["--federated.algorithm=FewFedPIT"], "have clients make|has clients make"),
        ("selector.yaml", ["--federated.algorithm=FedKSeed"], "set --federated.forward ZerothOrder"),
        (
            "selector.yaml",
            ["--federated.algorithm=Scaffold", "--federated.aggregation=CoordinateMedian"],
            "Scaffold needs the mean",
        ),
        ("selector.yaml", ["--federated.clients_per_round=1000"], "is more than the 40 clients"),
        ("selector.yaml", ["--model.choices=[apples,pears]"], "must differ in the last token only"),
    ],
)
def test_a_refusal_that_needs_settings_or_rows_comes_before_the_model(loads, fit, config, arguments, message):
    with pytest.raises(ValueError, match=message):
        fit(config, *arguments)
    assert loads == []


@pytest.mark.parametrize(
    ("attack", "arguments", "message"),
    [
        (
            {"class_path": "DiscoverableMemorization", "init_args": {"random_secrets": 5}},
            [],
            "data.rows.canaries",
        ),
        ({"class_path": "MemoryExtraction"}, ["--data=PreferenceDataModule"], "knows the clients' rows"),
    ],
)
def test_an_attack_on_other_data_is_refused_before_rows_are_read(
    loads, fit, tmp_path, monkeypatch, attack, arguments, message
):
    config = settings_in("feddca.yaml")
    config["trainer"]["callbacks"] = [attack]
    file = tmp_path / "attacked.yaml"
    file.write_text(yaml.safe_dump(config))
    read = []
    monkeypatch.setattr(FederatedDataModule, "prepare_data", lambda self: read.append(self))
    with pytest.raises(ValueError, match=message):
        fit(file, *arguments)
    assert loads == []
    assert read == []
