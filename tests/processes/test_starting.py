import os
import signal
import time
from datetime import timedelta

import lightning as L
import pytest
import torch
from plain_lightning import Numbers, Regression, ten_clients, trainer
from ranks import log_of, run_ranks, start_ranks, wait_for
from shared_runs import files_of, folder_of, train

from fedlight import ByClient, FederatedLoop
from fedlight.callbacks.loop.ranks.ranks import Ranks
from fedlight.processes import joining

pytestmark = [
    pytest.mark.slow,  # teams of processes
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
]


REMEDY = "start again from the newest checkpoint"


def in_its_second_visit(monkeypatch, rank, what):
    """Have a process do something at the end of its second visit of round 2."""
    original = Ranks.visited

    def visited(ranks, run):
        original(ranks, run)
        if ranks._team.rank == rank and run.round_idx == 1:
            what()

    monkeypatch.setattr(Ranks, "visited", visited)


@pytest.mark.parametrize(("size", "rank"), [(2, 0), (2, 1), (4, 3)])
def test_when_one_is_killed_the_others_end_and_the_rerun_on_two_ends_alike(tmp_path, monkeypatch, size, rank):
    name = "scaffold"  # with memories on disk, of which process 0 alone keeps those of the checkpoint
    with monkeypatch.context() as patched:
        in_its_second_visit(patched, rank, lambda: os.kill(os.getpid(), signal.SIGKILL))
        began = time.monotonic()
        children = start_ranks(size, lambda rank: train(name, tmp_path, "killed", size), tmp_path / "logs")
        codes = wait_for(children, 60 * size / 2)
        assert time.monotonic() - began < 30 * size / 2
    assert codes == [-signal.SIGKILL if own == rank else 1 for own in range(size)]
    if size == 2:
        last = log_of(tmp_path / "logs", 1 - rank).strip().splitlines()[-1]
        who = (
            "process 1 is gone"
            if rank
            else "process 0 or another one has ended (see the output of process 0)"
        )
        assert last == f"ConnectionError: {who}, so process {1 - rank} ends too: {REMEDY}"
    (alone,) = run_ranks(1, lambda _: train(name, tmp_path, "alone", 1), tmp_path / "logs_alone")
    found = run_ranks(2, lambda _: train(name, tmp_path, "killed", 2, resumes=True), tmp_path / "logs_then")
    assert found == [alone, alone]
    visits = [files_of(folder_of(tmp_path, name, label))["visits.csv"] for label in ("alone", "killed")]
    assert visits[0] == visits[1]


@pytest.mark.parametrize("rank", [0, 1])
def test_when_one_is_stopped_the_other_ends_and_names_it(tmp_path, monkeypatch, rank):
    """The kernel answers for a stopped process, so its connections stay; a bounded wait ends."""
    monkeypatch.setattr(joining, "FOR_EVER", timedelta(seconds=4))
    monkeypatch.setattr(joining, "GRACE_SECONDS", 0.5)
    in_its_second_visit(monkeypatch, rank, lambda: os.kill(os.getpid(), signal.SIGSTOP))
    children = start_ranks(2, lambda rank: train("fedavg", tmp_path, "stopped", 2), tmp_path / "logs")
    try:
        assert wait_for([children[1 - rank]], 60) == [1]
    finally:
        os.kill(children[rank], signal.SIGKILL)
        os.waitpid(children[rank], 0)
    last = log_of(tmp_path / "logs", 1 - rank).strip().splitlines()[-1]
    waited = 4 if rank else 8.5
    assert last == (
        f"ConnectionError: process {rank} is not here after {waited} seconds, so process {1 - rank} ends too: {REMEDY}"
    )


class StoppedAt:
    """gloo's group of a process that is stopped when it calls one of the methods."""

    def __init__(self, group, method):
        self.group, self.method = group, method

    def __getattr__(self, name):
        if name == self.method:
            os.kill(os.getpid(), signal.SIGSTOP)
        return getattr(self.group, name)


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("method", ["allreduce", "alltoall_base", "broadcast"])
def test_where_gloo_names_none_that_is_stopped_no_other_is_accused(tmp_path, monkeypatch, method, rank):
    """In these all wait for their neighbours, and the first whose wait ends closes its connections."""
    monkeypatch.setattr(joining, "GRACE_SECONDS", 0.5)

    def work(own):
        store = joining._store(own, "127.0.0.1", int(os.environ["MASTER_PORT"]))
        others = joining.Others(own, 3, store)
        others.begin(1.0)
        others.add(torch.ones(5))  # all have met, for which they need the store in process 0
        if own == rank:
            others._group = StoppedAt(others._group, method)
        few, many = memoryview(bytearray(5)), memoryview(bytearray(joining.SMALL_BYTES + 1))
        {
            "allreduce": lambda: others.add(torch.ones(5)),
            "alltoall_base": lambda: others.swap([few] * 3),
            "broadcast": lambda: others.exchange(many),
        }[method]()

    children = start_ranks(3, work, tmp_path)
    living = [own for own in range(3) if own != rank]
    try:
        assert wait_for([children[own] for own in living], 30) == [1, 1]
    finally:
        os.kill(children[rank], signal.SIGKILL)
        os.waitpid(children[rank], 0)
    for own in living:
        last = log_of(tmp_path, own).strip().splitlines()[-1]
        late = [f"is not here after {1 if own == 0 else 2.5} seconds", *["has ended"] * (own > 0)]
        who = (
            "another process {}" if own == 0 else "process 0 or another one {} (see the output of process 0)"
        )
        ends = f", so process {own} ends too: {REMEDY}"
        assert last in [f"ConnectionError: {who.format(how)}{ends}" for how in late]


def test_of_several_that_end_the_one_that_ended_first_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(joining, "GRACE_SECONDS", 0.5)

    def work(own):
        others = joining.Others(own, 4, joining._store(own, "127.0.0.1", int(os.environ["MASTER_PORT"])))
        if own == 2:  # its neighbours end, which are those of process 0
            os.kill(os.getpid(), signal.SIGKILL)
        others.add(torch.ones(200_000))

    codes = wait_for(start_ranks(4, work, tmp_path), 30)
    assert codes == [1, 1, -signal.SIGKILL, 1]
    assert log_of(tmp_path, 0).splitlines()[-1].startswith("ConnectionError: process 2 is gone, so")


@pytest.mark.parametrize("rank", [0, 1])
def test_who_waits_for_one_that_never_comes_says_so_and_ends_with_the_address(tmp_path, monkeypatch, rank):
    monkeypatch.setattr(joining, "SAID_AFTER_SECONDS", 0.5)
    monkeypatch.setattr(joining, "JOIN_SECONDS", 2.0)

    def work(own):
        if own == rank:
            train("fedavg", tmp_path, "alone", 2)

    codes = wait_for(start_ranks(2, work, tmp_path), 60)
    assert codes == [int(own == rank) for own in range(2)]
    lines = log_of(tmp_path, rank).splitlines()
    said = [line for line in lines if line.startswith("fedlight: ")]
    assert len(said) == 1
    assert said[0].startswith(f"fedlight: process {rank} waits for the other 1 of 2 at 127.0.0.1:")
    assert lines[-1].startswith(f"ConnectionError: process {rank} has not met the other 1 of 2 at 127.0.0.1:")
    assert lines[-1].endswith("look at what they have printed, and whether each host reaches this address")


def test_when_one_fails_the_other_ends_with_its_reason(tmp_path, monkeypatch):
    def fail():
        raise RuntimeError("out of paper")

    in_its_second_visit(monkeypatch, 1, fail)
    children = start_ranks(2, lambda rank: train("fedavg", tmp_path, "failed", 2), tmp_path / "logs")
    assert wait_for(children, 60) == [1, 1]
    said = "process 1 has failed (RuntimeError: out of paper), so process 0 ends too"
    for rank, text in ((0, said), (1, "RuntimeError: out of paper")):
        assert text in log_of(tmp_path / "logs", rank)


class Warming(Regression):
    """Counts its batches, which run on through clients unless it starts anew, and may log in its steps."""

    def __init__(self, reset, logs):
        super().__init__()
        self.batches, self.marked, self.logs = 0, "kept", logs
        if reset:
            self.on_visit_start = self.start_anew

    def start_anew(self, client_id):
        self.batches = 0

    def training_step(self, batch, batch_idx):
        self.batches += 1
        loss = super().training_step(batch, batch_idx) * (1 + 0.01 * self.batches)
        if self.logs:
            self.log("train/loss", loss, on_epoch=True)
        return loss


@pytest.mark.parametrize("is_said", [False, True])
def test_what_each_process_has_of_its_own_is_said_once(tmp_path, is_said):
    """What training steps log, and an attribute that runs on through clients."""

    def work(rank):
        callbacks = [FederatedLoop(clients_per_round=4, local_steps=2), ByClient(ten_clients)]
        run = trainer(2, callbacks, strategy="client_parallel", devices=2)
        L.seed_everything(0, verbose=False)
        run.fit(Warming(reset=not is_said, logs=is_said), Numbers())

    run_ranks(2, work, tmp_path)
    logged = (
        "train/loss: training_step logs it, so under trainer.strategy=client_parallel it is of the clients"
    )
    kept = "Warming's batches: visits change it, and each process of trainer.strategy=client_parallel has its own."
    for said in (logged, kept):
        assert [log_of(tmp_path, rank).count(said) for rank in range(2)] == [int(is_said), 0]
    assert "Warming's" not in log_of(tmp_path, 0).replace(kept, "")
