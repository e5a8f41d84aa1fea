"""Runs in whose processes several train a client together, on numbers in fp64, and comparisons with one process."""

import lightning as L
import numpy as np
from lightning.pytorch.callbacks import ModelCheckpoint
from memories import loop_with
from plain_lightning import Numbers, ten_clients
from ranks import run_ranks
from shared_runs import newest

from fedlight.callbacks.logs.visit_log import VisitLog
from fedlight.datamodules.federated.by_client import FederatedWrapper
from fedlight.processes.strategy import ClientParallelStrategy

ALONE = (1, 1)


def train(folder, shape, model, rounds, resumes=False, callbacks=(), options=None, several=None, **loop):
    """Train in this process, and return the module, the loop and the trainer.

    Args:
        folder: of the run.
        shape: number of processes, and of those that train a client together.
        model: makes the module.
        rounds: number of rounds.
        resumes: go on from the newest checkpoint.
        callbacks: further ones.
        options: further ones of the trainer.
        several: options of the strategy.
        loop: settings of the loop.
    """
    L.seed_everything(0, verbose=False)
    module, loop = model(), loop_with(**({"clients_per_round": 4, "local_steps": 2} | loop))
    saved = ModelCheckpoint(folder / "checkpoints", filename="{epoch}", save_top_k=-1)
    options = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False} | (options or {})
    if shape != ALONE:
        strategy = ClientParallelStrategy(processes_per_client=shape[1], **(several or {}))
        options |= {"strategy": strategy, "devices": shape[0]}
    trainer = L.Trainer(
        max_epochs=rounds,
        accelerator="cpu",
        precision="64-true",
        default_root_dir=folder,
        callbacks=[loop, VisitLog(), saved, *callbacks],
        **options,
    )
    path = newest(folder) if resumes else None
    data = FederatedWrapper(Numbers(), ten_clients)
    trainer.fit(module, data, ckpt_path=path, weights_only=bool(path) or None)
    return module, loop, trainer


def in_processes(shape, work, folder):
    """Return what ``work(shape)`` returns in each process."""
    return run_ranks(shape[0], lambda rank: work(shape), folder / f"logs{shape}", 240)


def close(some, others):
    """Check that numbers or arrays, in dictionaries of dictionaries, agree."""
    assert some.keys() == others.keys()
    for name in some:
        if isinstance(some[name], dict):
            close(some[name], others[name])
        else:
            np.testing.assert_allclose(some[name], others[name], rtol=1e-6, atol=1e-6, err_msg=name)


def metrics_of(trainer):
    """Return the logged values."""
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def assert_same_visits(rows, others):
    """Check that rows of ``visits.csv`` are equal, their losses to rounding."""
    losses, expected = ([float(row.pop("loss")) for row in each] for each in (rows, others))
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    assert rows == others
