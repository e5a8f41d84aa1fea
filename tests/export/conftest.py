"""Runs that are exported and talked with: instruction tuning that has moved the model, and three selectors."""

import pytest
from tiny_world import VOTES, fedlight, make_model

SMALL = ["--federated.clients_per_round=2", "--federated.local_steps=2", "--trainer.accelerator=cpu"]
SMALL += [f"--data.source={VOTES}", "--data.split.test_source=null", "--trainer.limit_val_batches=0"]


def trained(folder, base, config, *more):
    own = (f"--config={config}.yaml", f"--trainer.default_root_dir={folder}", f"--model.model={base}")
    done = fedlight("fit", *own, *SMALL, *more)
    assert done.code == 0, done.err
    return folder


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("secret-folder") / "base")


@pytest.fixture(scope="session")
def run(tmp_path_factory, base):
    """A run of instruction tuning that has moved the model."""
    folder = tmp_path_factory.mktemp("runs") / "sft"
    return trained(folder, base, "sft", "--trainer.max_epochs=1", "--model.lr=0.1")


@pytest.fixture(scope="session")
def selectors(tmp_path_factory, base):
    """A run of FedBiscuit."""
    folder = tmp_path_factory.mktemp("runs") / "fedbiscuit"
    rounds = ("--federated.algorithm.warmup_rounds=1", "--federated.algorithm.regroup_every=1")
    return trained(folder, base, "fedbiscuit", *rounds, "--trainer.max_epochs=5", "--model.lr=0.05")


@pytest.fixture(scope="session")
def exported_selectors(tmp_path_factory, selectors):
    """The folder of their export."""
    folder = tmp_path_factory.mktemp("exported_selectors") / "out"
    assert fedlight("export", str(selectors), "--output", str(folder)).code == 0
    return folder
