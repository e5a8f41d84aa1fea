"""Rows: several processes under the strategy client_parallel, started in each way, and what they say to each other."""

import os

import lightning as L
import torch
from matrix import Row, Works, kind
from project import Net, Project, Run, Validated, loader

from fedlight.processes.strategy import ClientParallelStrategy
from fedlight.processes.team import Team, current_team, working_in

several = kind("Several processes")

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": ("none", "none"),
    "RANK": ("0", "1"),
    "LOCAL_RANK": ("0", "1"),
    "LOCAL_WORLD_SIZE": ("2", "2"),
    "WORLD_SIZE": ("2", "2"),
}
SLURM = {
    "SLURM_NTASKS": ("2", "2"),
    "SLURM_NTASKS_PER_NODE": ("1", "1"),
    "SLURM_NNODES": ("2", "2"),
    "SLURM_PROCID": ("0", "1"),
    "SLURM_NODEID": ("0", "1"),
    "SLURM_LOCALID": ("0", "0"),
    "SLURM_JOB_NAME": ("train", "train"),
    "SLURM_JOB_ID": ("17", "17"),
}
TWO_NODES = {"NODE_RANK": ("0", "1"), "LOCAL_RANK": ("0", "0")}


def two(module=Net, **trainer):
    return Project(module=module, trainer={"strategy": "client_parallel", "devices": 2} | trainer)


def in_parts(folder):
    """The weights are nearly those of one process, and both processes make every step."""
    alone = Run(Project(), folder / "alone").fit()
    together = two(strategy=ClientParallelStrategy(processes_per_client=2))
    for weights, steps in in_two(folder / "two", together, lambda run: run.steps):
        torch.testing.assert_close(weights, alone.weights(), rtol=1e-4, atol=1e-5)
        assert steps >= alone.steps  # some batches are also computed whole, and compared


def in_two(folder, project, found=lambda run: None, environment=None):
    """Train in two processes; return of each the weights and ``found(run)``."""
    from ranks import run_ranks  # here: where the page is written, tests/support is not on the path

    def work(rank):
        if environment:
            for name in ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE"):
                os.environ.pop(name, None)
            os.environ.update({name: values[rank] for name, values in environment.items()})
        run = Run(project, folder).fit()
        assert run.trainer.strategy.team.size == 2
        return run.weights(), found(run)

    return run_ranks(2, work, folder)


def trains_as_one_process(project, environment=None):
    """The weights are those of one process, bit for bit, and each process trains some of the clients."""

    def check(folder):
        alone = Run(Project(), folder / "alone").fit()
        ranks = in_two(folder / "two", project, lambda run: run.steps, environment)
        for weights, _ in ranks:
            assert all(torch.equal(weights[name], value) for name, value in alone.weights().items())
        steps = [steps for _, steps in ranks]
        assert min(steps) > 0
        assert sum(steps) == alone.steps

    return Works(check)


class Synced(Validated):
    """Logs with sync_dist=True, as modules do that are trained with DDP."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_epoch_start(self):
        self.seen = []

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.seen.append(loss.item())
        self.log("train/loss", loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=1)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.loss(batch), sync_dist=True)

    def val_dataloader(self):
        return loader(shuffle=False)


def sync_dist_adds_nothing_up(folder):
    from ranks import log_of

    def found(run):
        logged = run.trainer.callback_metrics
        return run.module.seen, logged["train/loss"].item(), logged["val/loss"].item()

    project = two(Synced)
    alone = Run(Project(module=Synced), folder / "alone")
    alone.fit()
    ranks = [values for _, values in in_two(folder / "two", project, found)]
    for seen, train, validated in ranks:
        torch.testing.assert_close(train, sum(seen) / len(seen))
        assert validated == alone.trainer.callback_metrics["val/loss"].item()
    assert ranks[0][1] != ranks[1][1]
    said = "train/loss: training_step logs it, so under trainer.strategy=client_parallel it is of the clients"
    assert log_of(folder / "two", 0).count(said) == 1
    assert "also with sync_dist=True; fed/loss is of all" in log_of(folder / "two", 0)


class Talks(L.Callback):
    """What Lightning's collectives give when a round is over."""

    def on_train_epoch_end(self, trainer, module):
        strategy, own = trainer.strategy, torch.tensor(float(trainer.global_rank))
        self.found = {
            "world_size": trainer.world_size,
            "is_initialized": torch.distributed.is_initialized(),
            "reduce": strategy.reduce(own, reduce_op="sum").item(),
            "all_gather": module.all_gather(own).tolist(),
            "broadcast": strategy.broadcast(f"of {trainer.global_rank}"),
            "gather": [value.item() for value in current_team().gather(own)],
        }
        strategy.barrier()


def collectives_of_lightning(folder):
    def found(run):
        return next(one.found for one in run.trainer.callbacks if isinstance(one, Talks))

    project = Project(callbacks=lambda folder: [Talks()], trainer=two().trainer)
    for rank, (_, values) in enumerate(in_two(folder, project, found)):
        assert values == {
            "world_size": 1,
            "is_initialized": False,
            "reduce": rank,
            "all_gather": rank,
            "broadcast": "of 0",
            "gather": [0.0, 1.0],
        }


class Uploads(L.Callback):
    """Looks at what clients send."""

    def on_upload(self, upload):
        pass


def ask_in_a_team(run):
    with working_in(Team(0, 2, lambda data: [data, data])):
        run.ask()


ROWS: list[Row] = [
    several(
        'strategy="client_parallel", devices=2',
        trains_as_one_process(two()),
        "each process trains some of a round's clients; the model is that of one process, bit for bit",
    ),
    several(
        "strategy=ClientParallelStrategy(processes_per_client=2), devices=2",
        Works(in_parts),
        "each process has a part of every batch and of the frozen layers of a client; the model is that of one process, but "
        "for rounding",
    ),
    several(
        "torchrun --nproc-per-node 2",
        trains_as_one_process(two(), TORCHRUN),
        "torchrun says how many processes there are",
    ),
    several(
        "srun with --nodes=2 --ntasks-per-node=1",
        trains_as_one_process(two(devices=1, num_nodes=2), SLURM),
        "SLURM says how many processes and nodes there are",
    ),
    several(
        'strategy="client_parallel", num_nodes=2',
        trains_as_one_process(two(devices=1, num_nodes=2), TWO_NODES),
        "one start on each node, with NODE_RANK and MASTER_ADDR in the environment",
    ),
    several(
        "self.log(..., sync_dist=True)",
        Works(sync_dist_adds_nothing_up),
        "in training_step the mean over the clients of the own process, whatever sync_dist says, and a line says so once; "
        "fed/loss and fedlight's own train/... are of all clients. In validation_step each process sees all batches",
    ),
    several(
        "strategy.reduce, self.all_gather, strategy.broadcast, strategy.barrier",
        Works(collectives_of_lightning),
        "trainer.world_size is 1, so reduce and all_gather give the value back; broadcast and barrier are over all "
        "processes. fedlight.processes.current_team().gather(value) gives those of all, outside of visits",
    ),
    several.refused(
        "a callback with on_upload that does not gather what it finds",
        Project(callbacks=lambda folder: [Uploads()]),
        "Uploads.on_upload sees the uploads of those clients that its own process",
        "give the class shares_uploads = True; or set trainer.devices=1",
        means="its own process's uploads alone would be seen",
        call=ask_in_a_team,
    ),
]
