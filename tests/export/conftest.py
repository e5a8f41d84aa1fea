"""Runs that are exported and talked with: instruction tuning that has moved the model, and three selectors."""

import pytest
from tiny_world import VOTES, fedlight, make_model

SMALL = [
    "--trainer.max_epochs=1",
    "--federated.clients_per_round=2",
    "--federated.local_steps=2",
    "--trainer.accelerator=cpu",
]


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("secret-folder") / "base")


@pytest.fixture(scope="session")
def run(tmp_path_factory, base):
    """A run of instruction tuning that has moved the model."""
    folder = tmp_path_factory.mktemp("runs") / "sft"
    done = fedlight(
        *(
            "fit",
            "--config=sft.yaml",
            f"--trainer.default_root_dir={folder}",
            f"--model.model={base}",
            *SMALL,
        ),
        *(
            f"--data.source={VOTES}",
            "--data.split.test_source=null",
            "--model.lr=0.1",
            "--trainer.limit_val_batches=0",
        ),
    )
    assert done.code == 0, done.err
    return folder


@pytest.fixture(scope="session")
def selectors(tmp_path_factory, base):
    """A run of FedBiscuit."""
    folder = tmp_path_factory.mktemp("runs") / "fedbiscuit"
    done = fedlight(
        *("fit", "--config=fedbiscuit.yaml", f"--trainer.default_root_dir={folder}", f"--model.model={base}"),
        *(
            f"--data.source={VOTES}",
            "--data.split.test_source=null",
            "--federated.algorithm.warmup_rounds=1",
            "--model.lr=0.05",
        ),
        *(
            "--federated.algorithm.regroup_every=1",
            *SMALL[1:],
            "--trainer.max_epochs=5",
            "--trainer.limit_val_batches=0",
        ),
    )
    assert done.code == 0, done.err
    return folder


@pytest.fixture(scope="session")
def exported_selectors(tmp_path_factory, selectors):
    """The folder of their export."""
    folder = tmp_path_factory.mktemp("exported_selectors") / "out"
    assert fedlight("export", str(selectors), "--output", str(folder)).code == 0
    return folder
