import errno
import os
import shutil

import pytest
from tiny_world import HELDOUT, fedlight, refused, tiny_selector, weights

FEDBISCUIT = [
    *("--federated.algorithm=FedBiscuit", "--federated.algorithm.warmup_rounds=0"),
    *("--model.num_adapters=3", "--data.split.val_share=0.3"),
]
ON_DISK = [
    *("--federated.algorithm=Scaffold", "--model.optimizer.name=SGD", "--model.optimizer.args={}"),
    *("--model.lr=0.5", "--federated.clients_per_round=5"),
]


@pytest.fixture
def fit(tiny_model, tmp_path):
    """Runs the tiny selector with more arguments."""
    return lambda *more: fedlight("fit", *tiny_selector(tiny_model, tmp_path / "run", *more))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*FEDBISCUIT, "--data.split.val_share=0"], "no validation examples by client, on which they are"),
        ([*FEDBISCUIT, f"--data.split.val_source={HELDOUT}"], "above 0 and no data.split.val_source"),
        ([*FEDBISCUIT, "--federated.algorithm.warmup_rounds=1"], "takes 3 rounds and the run has 2"),
        ([*FEDBISCUIT, "--federated.algorithm.warmup_rounds=-1"], "warmup_rounds=-1 must be at least 0"),
        ([*FEDBISCUIT, "--federated.algorithm.regroup_every=0"], "regroup_every=0 must be at least 1"),
        (
            [*FEDBISCUIT, "--federated.algorithm.assignment=soft"],
            "federated.algorithm.assignment: there is no class 'soft'; did you mean 'SoftGroups'?",
        ),
        (["--model.num_adapters=3"], "has 3 adapters, of which FedAvg would train one"),
        (["--federated.algorithm=Scaffold", "--model.num_adapters=3"], "has 3 adapters, of which Scaffold"),
        (["--federated.algorithm=FedProx", "--federated.algorithm.mu=-1"], ".mu=-1.0 must be at least 0"),
        (
            ["--federated.algorithm=Scaffold", "--federated.aggregation=CoordinateMedian"],
            "take out federated.aggregation",
        ),
        (
            ["--federated.aggregation=TrimmedMean", "--federated.aggregation.share=0.5"],
            "aggregation.share=0.5 is trimmed",
        ),
        (
            ["--federated.server=FedAdam", "--federated.server.lr=0"],
            ".lr=0.0 must be above 0 and finite at the server",
        ),
        (["--federated.server=FedYogi", "--federated.server.beta2=1"], ".beta2=1.0 must be at least 0"),
        (
            ["--federated.server=FedAdagrad", "--federated.server.tau=0"],
            ".tau=0.0 must be above 0 and finite at the",
        ),
        (["--federated.memory=ClientMemories"], "federated: FederatedLoop has no setting 'memory'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_work_is_refused_before_the_first_round(fit, tmp_path, arguments, message):
    line = refused(fit(*arguments))
    assert message in line
    assert "Union" not in line
    assert not (tmp_path / "run/visits.csv").exists()
    assert not (tmp_path / "run/checkpoints").exists()


def test_a_folder_for_memories_that_cannot_be_written(fit, tmp_path, monkeypatch):
    """Even where memories would move there much later, or never."""
    access = os.access
    monkeypatch.setattr(
        "fedlight.federation.client_state.os.access",
        lambda path, mode, **more: path != tmp_path / "run" and access(path, mode, **more),
    )
    line = refused(fit())
    assert f"nothing can be written in {tmp_path / 'run'}. Set trainer.default_root_dir to another" in line
    assert not (tmp_path / "run/visits.csv").exists()


def test_a_full_disk_while_a_memory_is_written(fit, tmp_path, monkeypatch, on_disk):
    def no_space(path, data, synced):
        if path.exists() or len(list(path.parent.glob("*.pt"))) >= 5:  # all of the first round are there
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, data, synced)

    from fedlight.federation import client_state as memory

    write = memory.write_whole
    with monkeypatch.context() as full:
        full.setattr(memory, "write_whole", no_space)
        line = refused(fit(*ON_DISK))
    assert f"the disk is full while writing {tmp_path}/run/clients: free some space and give the same" in line
    assert fit(*ON_DISK, f"--ckpt_path={tmp_path / 'run/checkpoints/epoch=0.ckpt'}").code == 0
    assert weights(tmp_path / "run")


@pytest.mark.slow
def test_memories_that_are_damaged_or_gone(fit, tmp_path, on_disk):
    assert fit(*ON_DISK, "--trainer.max_epochs=1").code == 0
    going_on = [*ON_DISK, f"--ckpt_path={tmp_path / 'run/checkpoints/epoch=0.ckpt'}"]
    whole = tmp_path / "whole"
    shutil.copytree(tmp_path / "run/clients", whole)
    for file in (tmp_path / "run/clients").iterdir():
        file.write_bytes(file.read_bytes()[:-1])
    line = refused(fit(*going_on))
    assert "the memory of client 'c00" in line
    assert "is damaged: resume from an earlier checkpoint" in line
    shutil.rmtree(tmp_path / "run/clients")
    assert "5 of the 5 clients' memories of this checkpoint are not in" in refused(fit(*going_on))
    shutil.copytree(whole, tmp_path / "run/clients")
    assert fit(*going_on).code == 0  # from a copy


@pytest.mark.slow
def test_a_checkpoint_of_another_server_or_algorithm(fit, tmp_path):
    assert fit("--federated.server=FedAvgM", "--trainer.max_epochs=1").code == 0
    going_on = f"--ckpt_path={tmp_path / 'run/checkpoints/epoch=0.ckpt'}"
    line = refused(fit("--federated.server=FedAdam", going_on))
    assert "was trained with federated.server=fedlight.FedAvgM and goes on with it" in line
    for other in (["--federated.algorithm=Scaffold"], [*FEDBISCUIT]):
        refused(fit(*other, "--federated.server=FedAvgM", going_on))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (None, "is not a file that GroupLog has written (FileNotFoundError)"),
        ("client,votes\nc000,3\n", "is not a file that GroupLog has written (KeyError)"),
        ("round,client,selector\n0,someone,0\n", "names none of the 6 clients of the test examples, such as"),
        ("round,client,selector\n0,c000,3\n", "names selector 3, but the model has 3, counted from 0"),
    ],
)
def test_groups_of_another_run(tiny_model, tmp_path, rows, message):
    file = tmp_path / "groups.csv"
    if rows is not None:
        file.write_text(rows)
    accuracy = ("--trainer.callbacks+=ClientAccuracy", f"--trainer.callbacks.init_args.groups={file}")
    settings = ["--federated=null", "--model.num_adapters=3", *accuracy]
    assert message in refused(fedlight("test", *tiny_selector(tiny_model, tmp_path / "run", *settings)))
