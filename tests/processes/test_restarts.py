"""torchrun starts the processes again when one is lost, and they go on from the newest checkpoint."""

import os
import signal

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from plain_lightning import Numbers, module, ten_clients, trainer, weights
from ranks import run_ranks
from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args, parse_args

from fedlight import ByClient, FederatedLoop

pytestmark = pytest.mark.slow  # teams of processes


class Kill(L.Callback):
    """Kills process 1 in the second round of the first attempt, in the third of the second, and so on."""

    def __init__(self, kills):
        self.kills = kills

    def on_train_epoch_start(self, trainer, pl_module):
        attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        if trainer.global_rank == 1 and attempt < self.kills and trainer.current_epoch == attempt + 1:
            os.kill(os.getpid(), signal.SIGKILL)


def train(folder, kills):
    """Train for four rounds as one of two processes, from the newest checkpoint on; return the attempt and the weights."""
    save = ModelCheckpoint(
        folder, save_last=True, save_top_k=0, every_n_epochs=1, save_on_train_epoch_end=True
    )
    loop = FederatedLoop(clients_per_round=4, local_steps=2)
    run = trainer(
        4,
        [loop, ByClient(ten_clients), save, Kill(kills)],
        strategy="client_parallel",
        devices=1,
        enable_checkpointing=True,
        default_root_dir=folder,
    )
    made = module()
    last = folder / "last.ckpt"  # the first may not be whole yet when the other process is killed
    run.fit(made, Numbers(), ckpt_path=last if last.exists() else None, weights_only=True)
    return os.environ["TORCHELASTIC_RESTART_COUNT"], weights(made)


def restarted(folder, kills):
    """Return what both processes return after four rounds of which some were broken off."""
    torchrun = ["--nproc-per-node=2", f"--max-restarts={kills}", "--rdzv-backend=c10d"]
    # Forks of an agent that is one itself: importing torch anew takes longer.
    more = ["--rdzv-endpoint=localhost:0", "--start-method=fork", "--monitor-interval=0.1", "train"]
    config, *_ = config_from_args(parse_args([*torchrun, *more]))
    [ends] = run_ranks(1, lambda rank: elastic_launch(config, train)(folder, kills), folder / "logs", 240)
    return [ends[rank] for rank in range(2)]


def undisturbed(folder):
    """Return what both processes return without an agent."""

    def work(rank):
        own = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0", "LOCAL_WORLD_SIZE": "2"}
        os.environ.update(own, RANK=str(rank))
        return train(folder, 0)

    return run_ranks(2, work, folder)


def test_two_restarts_end_with_the_bits_of_an_undisturbed_run(tmp_path):
    """The agent keeps its store, in which the addresses of the processes before would be found."""
    (_, first), (_, other) = undisturbed(tmp_path / "undisturbed")
    ends = restarted(tmp_path / "restarted", 2)
    assert [attempt for attempt, _ in ends] == ["2", "2"]
    assert first
    for found in (other, *(end for _, end in ends)):
        assert first.keys() == found.keys()
        assert all(torch.equal(tensor, found[name]) for name, tensor in first.items())
