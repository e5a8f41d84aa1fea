"""torchrun starts the processes again when one is lost, and they go on from the newest checkpoint."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ranks import run_ranks

pytestmark = pytest.mark.slow  # teams of processes
SUPPORT = Path(__file__).parents[1] / "support"
SCRIPT = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {support!r})
import lightning as L, torch
from lightning.pytorch.callbacks import ModelCheckpoint
from plain_lightning import Numbers, module, ten_clients, trainer, weights
from fedlight import ByClient, FederatedLoop

attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])

class Kill(L.Callback):
    def on_train_epoch_start(self, trainer, pl_module):
        if rank == 1 and attempt < {kills} and trainer.current_epoch == attempt + 1:
            os.kill(os.getpid(), signal.SIGKILL)

folder = Path(sys.argv[1])
save = ModelCheckpoint(folder, save_last=True, save_top_k=0, every_n_epochs=1, save_on_train_epoch_end=True)
loop = FederatedLoop(clients_per_round=4, local_steps=2)
run = trainer(4, [loop, ByClient(ten_clients), save, Kill()], strategy="client_parallel", devices=1,
              enable_checkpointing=True, default_root_dir=folder)
made = module()
last = folder / "last.ckpt"  # the first may not be whole yet when the other process is killed
run.fit(made, Numbers(), ckpt_path=last if last.exists() else None, weights_only=True)
(folder / f"{{rank}}.attempt").write_text(str(attempt))
torch.save(weights(made), folder / f"{{rank}}.pt")
"""


def restarted(folder, kills):
    """Return the weights of both processes after four rounds of which some were broken off."""
    script = folder / "train.py"
    script.write_text(SCRIPT.format(support=str(SUPPORT), kills=kills))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--max-restarts={kills}"]
    own = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(script), str(folder)],
        env=own,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert [(folder / f"{rank}.attempt").read_text() for rank in range(2)] == [str(kills)] * 2
    return weights_in(folder)


def undisturbed(folder):
    """Return the weights of both processes of the same script, which forks of this process run."""

    def work(rank):
        own = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0", "LOCAL_WORLD_SIZE": "2"}
        os.environ.update(own, RANK=str(rank))
        sys.argv[1:] = [str(folder)]
        exec(SCRIPT.format(support=str(SUPPORT), kills=0), {})

    run_ranks(2, work, folder)
    return weights_in(folder)


def weights_in(folder):
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


def test_two_restarts_end_with_the_bits_of_an_undisturbed_run(tmp_path):
    """The agent keeps its store, in which the addresses of the processes before would be found."""
    first, *others = undisturbed(tmp_path / "undisturbed") + restarted(tmp_path, 2)
    assert len(others) == 3
    assert first
    for other in others:
        assert first.keys() == other.keys()
        assert all(torch.equal(tensor, other[name]) for name, tensor in first.items())
